"""Random workloads whose runner is launched one step ahead, and a fault for each rule of it.

A fault is a line of the scheduler that is written otherwise: its source is compiled again with
that line changed, and the same workloads must notice.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from workloads import Seen, Workload

import infer.schedule.scheduler
from doubles import AheadHashRunner, make_hash_core, solo
from infer.config import BATCHING_MODES
from infer.engine.core import EngineCore
from infer.schedule.scheduler import Scheduler
from infer.types import FinishReason, Request, SamplingParams, StepOutput

NUM_WORKLOADS = 1000


def test_every_request_has_the_tokens_that_it_has_alone() -> None:
    seen = Seen()
    for seed in range(NUM_WORKLOADS):
        try:
            seen.add(Workload(seed, ahead=True).run())
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
    assert seen.modes == set(BATCHING_MODES)
    assert seen.reasons == set(FinishReason) - {FinishReason.ERROR, FinishReason.COMPLETE}
    assert seen.num_pending > 20_000
    assert seen.num_late > 500
    assert seen.num_preemptions > 2_000
    assert seen.num_cached > 2_000
    assert seen.num_aborted > 300


def run_workloads(count: int, kind: type[AheadHashRunner] = AheadHashRunner) -> None:
    for seed in range(count):
        workload = Workload(seed, ahead=True)
        workload.core.runner.__class__ = kind
        workload.run()


@pytest.mark.slow
def test_many_more_workloads() -> None:
    for seed in range(NUM_WORKLOADS, 50_000):
        Workload(seed, ahead=True).run()


def rewritten(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """A function of the scheduler's module with a piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is not there once"
    code = compile("from __future__ import annotations\n" + source.replace(old, new), "f", "exec")
    namespace = dict(vars(infer.schedule.scheduler))
    exec(code, namespace)
    made: Callable[..., Any] = namespace[function.__name__]
    return made


FAULTS = {
    "the token goes to the end of the list": (
        Scheduler.commit,
        "sequence.tokens[end] = result.token_id",
        "sequence.tokens[-1] = result.token_id",
    ),
    "pending tokens count towards the end": (
        Scheduler.commit,
        "num_output = end + 1 - sequence.num_prompt",
        "num_output = sequence.num_output",
    ),
    "pages are indexed that a preempted sequence has lost": (
        Scheduler.commit,
        "if sequence.num_preemptions == advanced.num_preemptions:",
        "if True:",
    ),
    "pages are indexed up to what flies": (
        Scheduler.commit,
        "allocator.commit(table, sequence.tokens, end)",
        "allocator.commit(table, sequence.tokens, len(sequence.tokens))",
    ),
    "a late row is delivered": (
        Scheduler.commit,
        "if sequence.status is Status.FINISHED:",
        "if False:",
    ),
    "who reads its output does not sit out": (
        Scheduler._hand_out_tokens,
        "len(tokens) >= sequence.max_length or sequence.reads_output",
        "len(tokens) >= sequence.max_length",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_workloads_notice_a_rule_that_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, old, new = FAULTS[name]
    monkeypatch.setattr(Scheduler, function.__name__, rewritten(function, old, new))
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_workloads(150)


class WrongRow(AheadHashRunner):
    """Reads the pending token of its neighbour."""

    def _resolve(self, sequence: Any, position: int) -> int:
        return super()._resolve(sequence, position) + 1


def test_the_workloads_notice_a_wrong_device_token() -> None:
    with pytest.raises(AssertionError):
        run_workloads(30, WrongRow)


def request(name: str, *prompt: int, max_tokens: int = 6, **sampling: Any) -> Request:
    return Request(name, prompt, SamplingParams(**sampling), seed=1, max_tokens=max_tokens)


def run(core: EngineCore) -> list[StepOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.scheduler.check()
    return outputs


def tokens_of(outputs: list[StepOutput], name: str) -> list[int | None]:
    return [o.token_id for o in outputs if o.request_id == name]


def test_the_next_step_is_launched_before_the_last_one_is_committed() -> None:
    core = make_hash_core(runner=AheadHashRunner)
    core.add(request("a", 1, 2, 3))
    assert core.step() == []
    [first] = core.step()
    wanted = solo(request("a", 1, 2, 3), core.runner.vocab_size)  # type: ignore[attr-defined]
    assert [first.token_id, *tokens_of(run(core), "a")] == wanted


def test_nothing_is_computed_behind_the_last_token() -> None:
    core = make_hash_core(runner=AheadHashRunner)
    core.add(request("a", 1, 2, 3, max_tokens=5, temperature=0))
    run(core)
    assert core.scheduler.stats.num_computed_tokens == 3 + 4
    assert core.scheduler.stats.num_late_tokens == 0


def test_a_prefix_that_flies_is_not_computed_twice() -> None:
    core = make_hash_core(runner=AheadHashRunner, max_num_batched_tokens=16)
    prompt = range(40)
    for name in ("a", "b", "c"):
        core.add(request(name, *prompt))
    outputs = run(core)
    assert core.scheduler.stats.num_cached_tokens == 2 * 36
    for name in ("a", "b", "c"):
        assert tokens_of(outputs, name) == solo(request(name, *prompt), core.runner.vocab_size)  # type: ignore[attr-defined]


class Fragile(AheadHashRunner):
    """Cannot launch a step with a request that has 13 in its prompt and three tokens."""

    def launch(self, plan: Any) -> Any:
        self._look(plan)
        return super().launch(plan)

    def execute(self, plan: Any) -> Any:
        self._look(plan)
        return super().execute(plan)

    def _look(self, plan: Any) -> None:
        for chunk in plan:
            sequence = chunk.sequence
            if 13 in sequence.request.prompt_token_ids and sequence.num_output >= 3:
                raise IndexError("broken on purpose")


def test_a_launch_that_fails_is_halved_after_what_flies_is_committed() -> None:
    core = make_hash_core(runner=Fragile, max_batch_size=32, max_num_batched_tokens=256)
    requests = [request(f"{i}", 20 + i, 3) for i in range(15)] + [request("bad", 13)]
    for each in requests:
        core.add(each)
    outputs = run(core)
    vocab_size = core.runner.vocab_size  # type: ignore[attr-defined]
    for each in requests[:-1]:
        assert tokens_of(outputs, each.request_id) == solo(each, vocab_size)
    (*good, end) = [o for o in outputs if o.request_id == "bad"]
    assert [o.token_id for o in good] == solo(requests[-1], vocab_size)[:3]
    assert end.finish_reason is FinishReason.ERROR
