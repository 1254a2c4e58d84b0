"""An engine of a test whose steps on the CPU are launched ahead, whatever that gains."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from infer import LLM
from infer.runner.model_runner import AheadRunner, ModelRunner
from infer.runner.step_thread import HostFlight
from infer.schedule.sequence import Plan, Sampled, Sequence


class AlwaysAhead(AheadRunner):
    """Goes ahead with any model, and counts how often a step was launched behind another."""

    num_launched = num_ahead = 0

    def goes_ahead(self, running: Seq[Sequence]) -> bool:
        return not any(sequence.is_special for sequence in running)

    def launch(self, plan: Plan) -> HostFlight:
        self.num_launched += 1
        before = self._last
        self.num_ahead += before is not None and any(
            chunk.samples and chunk.sequence.is_pending for chunk in plan
        )
        return super().launch(plan)


class FailsInFlight(AlwaysAhead):
    """Every fifth step that is launched fails in its thread; steps that are waited for do not."""

    num_failed = 0

    def _compute(self, step: Any) -> list[Sampled]:
        is_flying = step.attend is not self.backend
        if is_flying and self.num_launched % 5 == 4:
            self.num_failed += 1
            raise MemoryError("on purpose")
        return super()._compute(step)


def work_ahead(llm: LLM, kind: type[AlwaysAhead] = AlwaysAhead) -> AlwaysAhead:
    """Replace the runner of an engine by one of the same parts that works ahead."""
    assert isinstance(llm.core.runner, ModelRunner)
    llm.core.runner = runner = kind(llm.core.runner)
    return runner
