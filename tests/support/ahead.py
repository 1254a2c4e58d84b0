"""An engine of a test whose steps on the CPU are launched ahead, whatever that gains."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from infer import LLM
from infer.runner.model_runner import AheadRunner, ModelRunner, PreparedStep, StepCalls
from infer.runner.step_thread import Computed, HostFlight
from infer.schedule.sequence import Plan, Sequence


class AlwaysAhead(AheadRunner):
    """Goes ahead with any model, and counts how often a step was launched behind another, and how
    often as calls of kernels alone."""

    num_launched = num_ahead = num_called = 0

    def goes_ahead(self, running: Seq[Sequence]) -> bool:
        return not any(sequence.is_special for sequence in running)

    def _calls(self, step: PreparedStep) -> StepCalls | None:
        calls = super()._calls(step)
        self.num_called += calls is not None
        return calls

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

    def _compute_in_flight(self, flight: HostFlight, step: Any, calls: Any) -> Computed:
        if self.num_launched % 5 == 4:
            self.num_failed += 1
            raise MemoryError("on purpose")
        return super()._compute_in_flight(flight, step, calls)


def work_ahead(llm: LLM, kind: type[AlwaysAhead] = AlwaysAhead) -> AlwaysAhead:
    """Replace the runner of an engine by one of the same parts that works ahead."""
    assert isinstance(llm.core.runner, ModelRunner)
    llm.core.runner = runner = kind(llm.core.runner)
    return runner
