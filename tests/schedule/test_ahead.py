"""Random workloads with a runner that works one step ahead, and a fault for each of its rules.

A fault is a changed line of the scheduler: its source is compiled again with that line replaced,
and the same workloads must fail.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from infer.config import BATCHING_MODES
from infer.engine.core import EngineCore
from infer.errors import DeviceLostError
from infer.schedule.committer import Committer
from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import Plan, Sampled
from infer.schedule.step_planner import StepPlanner
from infer.types import FinishReason, Request, SamplingParams, StepOutput
from tests.support.hash_engine import AheadHashRunner, Landed, make_hash_core, solo
from tests.support.workloads import Seen, Workload

NUM_WORKLOADS = 150


def test_every_request_has_the_tokens_that_it_has_alone() -> None:
    seen = Seen()
    for seed in range(NUM_WORKLOADS):
        try:
            seen.add(Workload(seed, ahead=True).run())
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
    assert seen.modes == set(BATCHING_MODES)
    assert seen.reasons == set(FinishReason) - {FinishReason.ERROR, FinishReason.COMPLETE}
    assert seen.num_pending > 3_000
    assert seen.num_late > 75
    assert seen.num_preemptions > 300
    assert seen.num_cached > 300
    assert seen.num_aborted > 45


def run_workloads(count: int, kind: type[AheadHashRunner] = AheadHashRunner) -> None:
    for seed in range(count):
        workload = Workload(seed, ahead=True)
        workload.core.runner.__class__ = kind
        workload.run()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # four minutes of one core
def test_many_more_workloads() -> None:
    for seed in range(NUM_WORKLOADS, 50_000):
        Workload(seed, ahead=True).run()


def rewritten(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The function, compiled again with a part of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is not there once"
    code = compile("from __future__ import annotations\n" + source.replace(old, new), "f", "exec")
    namespace = dict(vars(sys.modules[function.__module__]))
    exec(code, namespace)
    made: Callable[..., Any] = namespace[function.__name__]
    return made


def owner_of(method: Callable[..., Any]) -> type:
    """The class that a method belongs to."""
    owner: type = vars(sys.modules[method.__module__])[method.__qualname__.partition(".")[0]]
    return owner


FAULTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "the token goes to the end of the list": (
        Committer._append_token,
        "sequence.tokens[end] = result.token_id",
        "sequence.tokens[-1] = result.token_id",
    ),
    "pending tokens count towards the end": (
        Committer._append_token,
        "num_output = end + 1 - sequence.num_prompt",
        "num_output = sequence.num_output",
    ),
    "pages are indexed that a preempted sequence has lost": (
        Committer.commit,
        "if sequence.num_preemptions == advanced.num_preemptions:",
        "if True:",
    ),
    "pages are indexed up to what flies": (
        Committer.commit,
        "allocator.commit(table, sequence.tokens, end)",
        "allocator.commit(table, sequence.tokens, len(sequence.tokens))",
    ),
    "a late row is delivered": (
        Committer.commit,
        "if sequence.status is Status.FINISHED:",
        "if False:",
    ),
    "who reads its output does not sit out": (
        StepPlanner.plan,
        "len(tokens) >= sequence.max_length or sequence.reads_output",
        "len(tokens) >= sequence.max_length",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_workloads_notice_a_rule_that_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, old, new = FAULTS[name]
    monkeypatch.setattr(owner_of(function), function.__name__, rewritten(function, old, new))
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_workloads(150)


class LateMasks(AheadHashRunner):
    """A runner for which every third mask of a grammar is late."""

    num_masks = num_late = 0

    def launch(self, plan: Plan) -> Landed:
        landed = super().launch(plan)
        rows = [chunk.sequence for chunk in plan if chunk.samples]
        for row in [row for row, sequence in enumerate(rows) if sequence.reads_output]:
            LateMasks.num_masks += 1
            if LateMasks.num_masks % 3 == 0:
                LateMasks.num_late += 1
                landed.sampled[row] = Sampled(0, is_late=True)
        return landed


def test_a_late_mask_delays_its_sequence_and_changes_nothing() -> None:
    run_workloads(60, LateMasks)
    assert LateMasks.num_late > 60


class WrongRow(AheadHashRunner):
    """A runner that reads the pending token of another sequence."""

    def _resolve(self, sequence: Any, position: int) -> int:
        return super()._resolve(sequence, position) + 1


def test_the_workloads_notice_a_wrong_device_token() -> None:
    with pytest.raises(AssertionError):
        run_workloads(30, WrongRow)


class FailsInFlight(AheadHashRunner):
    """A runner whose steps fail in flight, some of them; so does what was launched behind them."""

    num_launched = num_lost = 0

    def launch(self, plan: Plan) -> Landed:
        landed = super().launch(plan)
        FailsInFlight.num_launched += 1
        if FailsInFlight.num_launched % 4 < 3:
            return landed
        FailsInFlight.num_lost += 1
        return LostFlight(landed.sampled)


class LostFlight(Landed):
    def results(self) -> list[Sampled]:
        raise MemoryError("on purpose")


def test_a_step_that_fails_in_flight_is_computed_again() -> None:
    run_workloads(80, FailsInFlight)
    assert FailsInFlight.num_lost > 200


RETRACTED: dict[str, tuple[str, str]] = {
    "the place of its token stays": ("sequence.tokens.pop()", "pass"),
    "its tokens stay computed": ("sequence.num_computed = max(chunk.start, num_adopted)", "pass"),
    "who was preempted is moved, too": (
        "if sequence.num_preemptions == advanced.num_preemptions:",
        "if True:",
    ),
    "who has ended is moved, too": ("if sequence.status is Status.FINISHED:", "if False:"),
}


@pytest.mark.parametrize("name", RETRACTED)
def test_the_workloads_notice_what_a_failed_step_leaves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Committer, "retract", rewritten(Committer.retract, *RETRACTED[name]))
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_workloads(400, FailsInFlight)


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
    """A runner that fails to launch a request with 13 in its prompt once it has three tokens."""

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


class Watched(AheadHashRunner):
    """A runner that records what is launched and executed, and fails where a test says."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.launched: list[tuple[str, ...]] = []
        self.executed: list[tuple[str, ...]] = []
        self.fault: Exception | None = None
        self.fault_at = ""
        """Method that fails: launch, results or execute."""
        self.room = 1 << 30

    def _names(self, plan: Any) -> tuple[str, ...]:
        return tuple(chunk.sequence.request_id for chunk in plan)

    def _maybe_fail(self, where: str, plan: Any = ()) -> None:
        if self.fault is not None and self.fault_at == where:
            raise self.fault
        if sum(chunk.num_tokens for chunk in plan) > self.room:
            raise MemoryError("20.00 MiB are not there")

    def launch(self, plan: Any) -> Any:
        self.launched.append(self._names(plan))
        self._maybe_fail("launch", plan)
        inner, self.execute = self.execute, super().execute  # type: ignore[method-assign]
        try:
            landed = super().launch(plan)
        finally:
            self.execute = inner  # type: ignore[method-assign]
        runner = self

        class Flight:
            def results(self) -> Any:
                runner._maybe_fail("results")
                return landed.results()

            def elapsed_ms(self) -> float | None:
                return runner.step_ms(plan)

        return Flight()

    def step_ms(self, plan: Any) -> float | None:
        """The device's time of a step."""
        return None

    def execute(self, plan: Any) -> Any:
        self.executed.append(self._names(plan))
        self._maybe_fail("execute", plan)
        return super().execute(plan)


def watched(**settings: Any) -> tuple[EngineCore, Watched]:
    core = make_hash_core(runner=Watched, **settings)
    assert isinstance(core.runner, Watched)
    return core, core.runner


@pytest.mark.parametrize("where", ["launch", "results", "execute"])
def test_a_lost_device_is_nobodys_failure(where: str) -> None:
    core, runner = watched()
    core.add(request("a", 1, 2, 3))
    core.step()
    if where == "execute":  # it is called only after a launch that failed
        runner.room = 0
    runner.fault, runner.fault_at = DeviceLostError("gone"), where
    with pytest.raises(DeviceLostError):
        core.step()
    assert core.scheduler.num_unfinished == 1, "it is for the next engine to go on with"


def test_a_launch_without_memory_is_made_smaller() -> None:
    core, runner = watched()
    runner.room = 5
    for i in range(4):
        core.add(request(f"{i}", *range(20 + i, 40 + i)))
    outputs = run(core)
    for i in range(4):
        each = request(f"{i}", *range(20 + i, 40 + i))
        assert tokens_of(outputs, f"{i}") == solo(each, runner.vocab_size)
    assert any(len(names) == 4 for names in runner.launched)
    assert runner.executed, "what could not be launched was not halved"


def test_a_failed_launch_is_computed_after_what_flew_was_committed() -> None:
    core, runner = watched()
    core.add(request("a", 1, 2, 3))
    core.step()
    [sequence] = core.scheduler.running
    assert sequence.is_pending
    runner.fault, runner.fault_at = IndexError("once"), "launch"
    seen: list[bool] = []
    execute = runner.execute

    def look(plan: Any) -> Any:
        seen.append(plan[0].sequence.is_pending)
        return execute(plan)

    runner.execute = look  # type: ignore[method-assign]
    outputs = core.step()
    assert seen == [False], "a step is executed while one of its tokens is still being computed"
    assert len(tokens_of(outputs, "a")) == 2


def test_who_is_suspected_flies_alone() -> None:
    told: list[str] = []
    core, runner = watched(announce=told.append)
    core.add(request("good", 1, 2, 3))
    core.step()
    core.add(replace(request("bad", 4, 5), num_crashes=1))
    core.add(request("other", 6, 7))
    outputs = core.step()
    # The suspect alone, then the rest of that step; both with nothing in flight.
    assert runner.executed[0] == ("bad",)
    assert not any("bad" in names for names in runner.launched)
    assert told[0] == "bad"
    assert len(tokens_of(outputs, "bad")) == 1
    outputs += run(core)
    assert any("bad" in names for names in runner.launched), "with a token it is not suspected"
    assert tokens_of(outputs, "other") == solo(request("other", 6, 7), runner.vocab_size)


def test_the_row_of_who_was_aborted_comes_late() -> None:
    core, _ = watched()
    for name in ("a", "b"):
        core.add(request(name, 1, 2, len(name) + ord(name)))
    core.step()
    core.step()
    free = core.scheduler.allocator.num_free
    end = core.abort("a")
    assert end is not None
    assert core.scheduler.allocator.num_free > free, "its pages do not wait for the row"
    outputs = core.step()
    assert tokens_of(outputs, "a") == []
    assert core.scheduler.stats.num_late_tokens == 1
    run(core)
    assert core.scheduler.stats.num_late_tokens == 1


def test_the_row_behind_an_end_token_comes_late() -> None:
    core, runner = watched()
    plain = request("a", 1, 2, 3, temperature=0)
    second = solo(plain, runner.vocab_size)[1]
    core.add(replace(plain, eos_token_ids=(second,)))
    outputs = run(core)
    assert tokens_of(outputs, "a")[-1] == second
    assert outputs[-1].finish_reason is FinishReason.EOS
    assert core.scheduler.stats.num_late_tokens == 1


def test_who_reads_its_output_sits_out_and_the_others_fly_on() -> None:
    core, runner = watched()
    core.add(request("a", 1, 2, 3, max_tokens=8, temperature=0))
    core.add(request("b", 4, 5, 6, max_tokens=4, temperature=0, presence_penalty=1.0))
    run(core)
    assert not runner.executed
    with_b = [i for i, names in enumerate(runner.launched) if "b" in names]
    with_a = [i for i, names in enumerate(runner.launched) if "a" in names]
    assert with_a == list(range(8))
    assert with_b == [0, 2, 4, 6]


def test_who_has_ended_is_not_executed_when_a_launch_fails() -> None:
    core, runner = watched()
    plain = request("a", 1, 2, 3, temperature=0)
    first = solo(plain, runner.vocab_size)[0]
    core.add(replace(plain, eos_token_ids=(first,)))
    core.add(request("b", 4, 5, 6))
    core.step()
    runner.fault, runner.fault_at = IndexError("once"), "launch"
    outputs = core.step()
    assert runner.launched[-1] == ("a", "b")
    assert runner.executed == [("b",)]
    assert tokens_of(outputs, "a") == [first]


class Timed(Watched):
    """A runner whose device takes a millisecond for each token. The clock shows less: a step's
    results are waited for in the next one."""

    def step_ms(self, plan: Any) -> float:
        return float(sum(chunk.num_tokens for chunk in plan))


def test_the_length_of_steps_follows_from_the_time_of_the_device() -> None:
    core = make_hash_core(
        runner=Timed, max_step_ms=40.0, max_num_batched_tokens=600, max_seq_len=1000, num_pages=300
    )
    core.add(request("stream", 1, 2, max_tokens=60))
    for _ in range(3):
        core.step()
    core.add(request("prompt", *range(700), max_tokens=1))
    before, parts = core.scheduler.stats.num_computed_tokens, []
    while core.scheduler.find("prompt").num_remaining > 1:
        core.step()
        parts.append(core.scheduler.stats.num_computed_tokens - before)
        before = core.scheduler.stats.num_computed_tokens
    assert max(parts) <= 40
    assert sum(part > 30 for part in parts) > 10


OTHER_FAULTS: dict[str, tuple[Callable[..., Any], str, str, Callable[[], None]]] = {
    "what is behind the last token is offered": (
        StepPlanner.plan,
        "len(tokens) >= sequence.max_length or sequence.reads_output",
        "sequence.reads_output",
        test_nothing_is_computed_behind_the_last_token,
    ),
    "pages in flight do not count as being computed": (
        StepPlanner._keys_being_computed,
        "for advanced in launched:",
        "for advanced in ():",
        test_a_prefix_that_flies_is_not_computed_twice,
    ),
    "the device's time is not used": (
        Scheduler.commit,
        "1000 * (self.clock() - self._planned_s) if step_ms is None else step_ms",
        "1000 * (self.clock() - self._planned_s)",
        test_the_length_of_steps_follows_from_the_time_of_the_device,
    ),
    "late rows are not counted": (
        Committer.commit,
        "stats.num_late_tokens += result is not None",
        "pass",
        test_the_row_of_who_was_aborted_comes_late,
    ),
    "a suspect flies": (
        EngineCore._step_ahead,
        "if plan and not _suspects(plan):",
        "if plan:",
        test_who_is_suspected_flies_alone,
    ),
    "what flies is not waited for": (
        EngineCore._step_ahead,
        "outputs = self._commit_in_flight()",
        "outputs, self._in_flight = [], None",
        test_a_failed_launch_is_computed_after_what_flew_was_committed,
    ),
    "who has ended is executed": (
        EngineCore._step_ahead,
        "if c.sequence.status is Status.RUNNING)",
        "if True)",
        test_who_has_ended_is_not_executed_when_a_launch_fails,
    ),
    "a lost device is taken for a failed launch": (
        EngineCore._step_ahead,
        "except DeviceLostError:",
        "except ZeroDivisionError:",
        lambda: test_a_lost_device_is_nobodys_failure("launch"),
    ),
    "a lost device is taken for a failed request": (
        EngineCore._execute,
        "except DeviceLostError:",
        "except ZeroDivisionError:",
        lambda: test_a_lost_device_is_nobodys_failure("execute"),
    ),
}


@pytest.mark.parametrize("name", OTHER_FAULTS)
def test_a_rule_of_the_core_that_is_broken_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, old, new, test = OTHER_FAULTS[name]
    test()
    monkeypatch.setattr(owner_of(function), function.__name__, rewritten(function, old, new))
    # pytest's own failures (DID NOT RAISE) do not derive from Exception.
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        test()
    assert not isinstance(caught.value, (KeyboardInterrupt, NameError, SyntaxError))
