"""The draft model in the scheduler: its cache is right after everything that can happen to a
sequence, no token depends on it, and it computes nothing where it does not pay."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from infer.config import SpeculativeConfig
from infer.schedule.cost_model import DraftTimes, StepCost, draft_counts
from infer.schedule.drafting import Drafter
from infer.schedule.sequence import Plan, Sampled, Sequence
from infer.schedule.speculation import Speculator
from infer.types import FinishReason, Request, SamplingParams
from tests.support import hash_engine
from tests.support.cases import over, slow_but
from tests.support.eager_drafts import draft_eagerly
from tests.support.hash_engine import (
    HashDraftRunner,
    drafts_of,
    make_hash_core,
    make_hash_drafter,
    solo,
)
from tests.support.workloads import VOCAB_SIZE, Workload

SETTINGS = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=5)


def run(seed: int) -> tuple[Workload, Drafter]:
    """A random workload with a draft model that is wrong behind every third to sixth cell; small
    passes, few or many pages, and numbers of drafted tokens that change from step to step."""
    r = random.Random(seed)

    def is_wrong(cell: int) -> bool:
        return cell % (3 + seed % 4) == 0

    drafter = make_hash_drafter(
        VOCAB_SIZE,
        num_pages=r.choice([20, 60, 200]),
        page_size=r.choice([1, 3, 4, 16]),
        max_tokens=r.choice([2, 7, 64]),
        max_seq_len=r.choice([30, 100]),
        wrong=is_wrong,
    )
    workload = Workload(seed, speculative=SETTINGS, drafter=drafter)
    check, verify = workload.scheduler.check, workload.runner.execute
    wrong: list[Any] = []

    def checked() -> None:
        check()
        drafter.check()
        assert not wrong, "a draft is wrong"
        assert drafter.num_sequences <= len(workload.scheduler.running), "pages are left"

    def execute(plan: Plan) -> Any:
        for chunk in plan:
            if chunk.proposed:
                number = len(chunk.proposed)
                if chunk.proposed != drafts_of(chunk.sequence, number, VOCAB_SIZE, is_wrong):
                    wrong.append(chunk)
        return verify(plan)

    def counts(acceptance: Any, limits: list[int], *rest: Any) -> list[int]:
        return [r.randrange(limit + 1) for limit in limits]

    with pytest.MonkeyPatch.context() as patch:
        draft_eagerly(patch)
        patch.setattr("infer.schedule.speculation.draft_counts", counts)
        patch.setattr(Drafter, "propose", Drafter._propose)  # errors are not contained
        patch.setattr(workload.scheduler, "check", checked)
        patch.setattr(workload.runner, "execute", execute)
        workload.run()
    assert not drafter.num_sequences
    assert drafter.allocator.num_free == drafter.allocator.num_usable
    return workload, drafter


@pytest.mark.parametrize("count", [120, pytest.param(300, marks=pytest.mark.slow)])
def test_every_request_has_the_tokens_that_it_has_alone(count: int) -> None:
    sums = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
    modes, reasons, backends, preemptions, cells, evictions = set(), set(), set(), 0, 0, 0
    for seed in range(count):
        try:
            workload, drafter = run(seed)
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
        stats = workload.scheduler.stats
        for name in sums:
            sums[name] += getattr(stats, name)
        preemptions += stats.num_preemptions
        modes.add(workload.scheduler.config.batching_mode)
        backends.add(workload.allocator.keeps_computed)
        reasons |= set(stats.num_finished)
        evictions += drafter.allocator.num_evictions
        cells += vars(drafter)["_runner"].num_cells
    assert sums["num_drafts"] > 3 * count
    assert sums["num_accepted_tokens"] > 5 * count
    assert sums["num_draft_tokens"] > sums["num_accepted_tokens"] + count
    assert modes == {"continuous", "static", "sequential"}
    assert backends == {True, False}
    assert reasons == set(FinishReason) - {FinishReason.ERROR, FinishReason.COMPLETE}
    assert preemptions > 1.6 * count
    assert evictions > 0.3 * count
    assert cells > sums["num_draft_tokens"]


# Faults planted on purpose.


def keeps_rejected_cells(patch: pytest.MonkeyPatch) -> None:
    caught_up = Drafter._caught_up

    def kept(self: Drafter, sequence: Sequence) -> Any:
        draft = self._drafts.get(sequence.request_id)
        before = 0 if draft is None else draft.sequence.num_computed
        found = caught_up(self, sequence)
        if found is not None:
            least = min(before, len(sequence.tokens) - 1)
            found.sequence.num_computed = max(found.sequence.num_computed, least)
        return found

    patch.setattr(Drafter, "_caught_up", kept)


def indexes_drafted_tokens(patch: pytest.MonkeyPatch) -> None:
    compute = Drafter._compute

    def computed(self: Drafter, plan: Any, record: Any) -> Any:
        results = compute(self, plan, record)
        for chunk in plan:
            sequence = chunk.sequence
            self.allocator.commit(sequence.table, sequence.tokens, sequence.num_computed)
        return results

    patch.setattr(Drafter, "_compute", computed)


def forgets_to_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Speculator, "forget", lambda *_: None)


def samples_at_another_position(patch: pytest.MonkeyPatch) -> None:
    sample = HashDraftRunner._sample

    def sampled(self: HashDraftRunner, cell: int, request: Request) -> Sampled:
        return sample(self, cell, dataclasses.replace(request, seed=request.seed + 1))

    patch.setattr(HashDraftRunner, "_sample", sampled)


def drafts_for_the_wrong_sequence(patch: pytest.MonkeyPatch) -> None:
    propose = Drafter._propose

    def proposed(self: Drafter, wanted: Any, record: Any) -> Any:
        found = propose(self, wanted, record)
        return [*found[1:], found[0]]

    patch.setattr(Drafter, "_propose", proposed)


FAULTS = [
    keeps_rejected_cells,
    indexes_drafted_tokens,
    forgets_to_release,
    samples_at_another_position,
    drafts_for_the_wrong_sequence,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_workloads_notice_a_fault(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, IndexError, KeyError)):
            all(run(seed) for seed in range(60))


# One request.


def request(name: str = "r", *, max_tokens: int = 40, **values: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **values})
    return Request(name, (5, 6, 7, 5, 6, 7, 5, 6), sampling, 1, max_tokens)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are drafted as are allowed."""
    draft_eagerly(monkeypatch)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_agrees_saves_steps(temperature: float) -> None:
    drafter = make_hash_drafter()
    core = make_hash_core(speculative=SETTINGS, drafter=drafter)
    asked = request(temperature=temperature)
    core.add(asked)
    outputs = core.outputs_until_complete()
    assert [output.token_id for output in outputs] == solo(asked, hash_engine.VOCAB_SIZE)
    counters = core.stats().counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 30
    assert counters.num_steps < 12
    # Each token is computed once, and none behind the last one.
    assert vars(drafter)["_runner"].num_cells <= 8 + 40


@pytest.mark.usefixtures("eager")
def test_a_prompt_is_computed_in_parts_and_taken_from_the_prefix_cache() -> None:
    drafter = make_hash_drafter(max_tokens=16)
    core = make_hash_core(speculative=SETTINGS, drafter=drafter)
    prompt = tuple(range(60))
    asked = dataclasses.replace(request("a"), prompt_token_ids=prompt)
    core.add(asked)
    core.step()
    steps = 0
    while core.has_work and not core.stats().counters.num_draft_tokens:
        core.step()
        steps += 1
    assert steps == 4  # 16 + 16 + 16 + the rest
    core.outputs_until_complete()
    num_cells = vars(drafter)["_runner"].num_cells
    core.add(dataclasses.replace(asked, request_id="b"))
    core.outputs_until_complete()
    assert vars(drafter)["_runner"].num_cells - num_cells < 60
    # Another tenant's request shares nothing.
    num_cells = vars(drafter)["_runner"].num_cells
    core.add(dataclasses.replace(asked, request_id="c", cache_scope="other"))
    core.outputs_until_complete()
    assert vars(drafter)["_runner"].num_cells - num_cells >= 60


@pytest.mark.usefixtures("eager")
def test_nothing_is_drafted_where_it_must_not_be() -> None:
    drafter = make_hash_drafter()
    core = make_hash_core(speculative=SETTINGS, drafter=drafter)
    core.add(request("off", speculation=False))
    core.add(dataclasses.replace(request("crashed"), num_crashes=1))
    core.outputs_until_complete()
    assert core.stats().counters.num_draft_tokens == 0
    assert vars(drafter)["_runner"].num_cells == 0
    short = make_hash_drafter(max_seq_len=12)
    core = make_hash_core(speculative=SETTINGS, drafter=short)
    asked = request()
    core.add(asked)
    outputs = core.outputs_until_complete()
    assert [output.token_id for output in outputs] == solo(asked, hash_engine.VOCAB_SIZE)
    assert 0 < core.stats().counters.num_draft_tokens <= 4


@pytest.mark.usefixtures("eager")
def test_a_token_that_the_draft_model_does_not_know_is_not_given_to_it() -> None:
    wanted = {"a": solo(request(), hash_engine.VOCAB_SIZE)}
    num_known = max(wanted["a"][:6]) + 1
    assert max(wanted["a"]) >= num_known
    asked = [request("a"), dataclasses.replace(request("b"), prompt_token_ids=(5, num_known))]
    wanted["b"] = solo(asked[1], hash_engine.VOCAB_SIZE)
    drafter = make_hash_drafter(num_known)
    core = make_hash_core(speculative=SETTINGS, drafter=drafter)
    seen: list[int] = []
    runner = vars(drafter)["_runner"]
    execute = runner.execute

    def watched(plan: Plan) -> Any:
        for chunk in plan:
            end = chunk.start + chunk.num_tokens
            seen.extend(chunk.sequence.tokens[chunk.start : end])
        return execute(plan)

    runner.execute = watched
    for each in asked:
        core.add(each)
    found: dict[str, list[Any]] = {"a": [], "b": []}
    for output in core.outputs_until_complete():
        found[output.request_id].append(output.token_id)
    assert found == wanted
    assert len(seen) > 8
    assert max(seen) < num_known


@pytest.mark.usefixtures("eager")
def test_a_draft_model_that_fails_is_given_up() -> None:
    class Fragile(HashDraftRunner):
        num_calls = 0

        def execute(self, plan: Plan) -> Any:
            self.num_calls += 1
            if self.num_calls > 4:
                raise MemoryError
            return super().execute(plan)

    drafter = make_hash_drafter(runner=Fragile)
    core = make_hash_core(speculative=SETTINGS, drafter=drafter)
    asked = request()
    core.add(asked)
    outputs = core.outputs_until_complete()
    assert [output.token_id for output in outputs] == solo(asked, hash_engine.VOCAB_SIZE)
    assert vars(drafter)["_runner"].num_calls == 4 + 3
    assert drafter.allocator.num_free == drafter.allocator.num_usable


@pytest.mark.usefixtures("eager")
def test_a_prediction_goes_before_the_draft_model() -> None:
    drafter = make_hash_drafter(wrong=lambda cell: True)
    core = make_hash_core(speculative=SETTINGS, drafter=drafter)
    asked = request()
    wanted = solo(asked, hash_engine.VOCAB_SIZE)
    core.add(dataclasses.replace(asked, prediction_token_ids=tuple(wanted)))
    outputs = core.outputs_until_complete()
    assert [output.token_id for output in outputs] == wanted
    assert outputs[-1].num_predicted[0] > 20


def test_a_trial_says_what_is_wrong() -> None:
    assert make_hash_drafter().try_out() == ""
    drafter = make_hash_drafter(num_pages=2, page_size=1)
    assert drafter.try_out() == "it samples no token"

    class Broken(HashDraftRunner):
        def execute(self, plan: Plan) -> Any:
            raise ValueError("on purpose")

    assert make_hash_drafter(runner=Broken).try_out() == "ValueError: on purpose"


# Whether tokens are drafted.


@over("num_sequences", [1, 4, 32])
@over("acceptance", [0.3, 0.6, 0.8, 0.95])
@over(("row_share", "ratio"), [(0.0, 0.15), (0.02, 0.25), (0.1, 0.4), (0.9, 0.3)])
def test_the_numbers_of_drafted_tokens_give_most_tokens_a_second(
    num_sequences: int, acceptance: float, row_share: float, ratio: float
) -> None:
    """With sequences that are alike, no other number of passes is faster, or not much."""
    step_ms = 10.0
    row_ms = row_share * step_ms / num_sequences

    def rate(count: int) -> float:
        tokens = sum(acceptance**j for j in range(count + 1))
        took_ms = step_ms + count * (ratio * step_ms + row_ms * num_sequences)
        took_ms += ratio * row_ms * num_sequences * bool(count)
        return tokens / took_ms

    counts = draft_counts(
        [acceptance] * num_sequences,
        [8] * num_sequences,
        StepCost(num_sequences, step_ms, row_ms),
        ratio,
    )
    assert len(set(counts)) == 1
    most = max(map(rate, range(9)))
    assert rate(counts[0]) == pytest.approx(most, rel=0.03 if counts[0] == 0 else 1e-9)


def test_sequences_of_a_step_are_drafted_for_by_their_own_acceptance() -> None:
    counts = draft_counts([0.95, 0.5, 0.05], [8, 8, 8], StepCost(3, 10.0, 0.3), 0.05)
    assert counts[0] > counts[1] > counts[2] == 0
    assert draft_counts([1.0, 1.0], [2, 0], StepCost(2, 10.0, 0.0), 0.1) == [2, 0]
    assert draft_counts([], [], StepCost(4, 10.0, 0.1), 0.2) == []


def test_the_ratio_follows_from_the_times_of_passes() -> None:
    times = DraftTimes(0.4)
    assert times.ratio(StepCost(1, 10.0, 0.1)) == 0.4
    for _ in range(10):
        times.record(1, 2.0)
        times.record(500, 1000.0)
    assert times.ratio(StepCost(1, 10.0, 0.1)) == pytest.approx(0.2)
    assert times.ratio(StepCost(11, 11.0, 0.1)) == pytest.approx(0.2)
    assert times.wide_row_ms(StepCost(1, 10.0, 1.0)) == pytest.approx(2.0)


def timed_core(
    cost_ms: Callable[[int], float], ratio: float, right: bool
) -> tuple[Any, Drafter, Callable[[], float]]:
    """A core and a draft model whose steps take a time by their rows, on a clock of their own."""
    now_s = 0.0

    class Timed(hash_engine.HashRunner):
        def execute(self, plan: Plan) -> Any:
            nonlocal now_s
            now_s += cost_ms(sum(chunk.num_rows for chunk in plan)) / 1000
            return super().execute(plan)

    class TimedDraft(HashDraftRunner):
        def execute(self, plan: Plan) -> Any:
            nonlocal now_s
            now_s += ratio * cost_ms(sum(chunk.num_tokens for chunk in plan)) / 1000
            return super().execute(plan)

    drafter = make_hash_drafter(
        num_pages=20_000,
        max_seq_len=4000,
        max_tokens=512,
        clock=lambda: now_s,
        runner=TimedDraft,
        wrong=lambda cell: not right,
    )
    core = make_hash_core(
        speculative=SETTINGS,
        runner=Timed,
        drafter=drafter,
        clock=lambda: now_s,
        num_pages=20_000,
        max_seq_len=4000,
        max_batch_size=32,
        max_num_batched_tokens=512,
    )
    return core, drafter, lambda: now_s


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("num_streams", slow_but([32], [1, 32]))
@pytest.mark.parametrize(
    ("cost_ms", "is_cheap"),
    [(lambda rows: 10.0 + 0.02 * rows, True), (lambda rows: 1.0 + 4.0 * rows, False)],
)
def test_drafting_pays_or_is_off(
    right: bool, num_streams: int, cost_ms: Callable[[int], float], is_cheap: bool
) -> None:
    """On a virtual clock: a quarter of the time for a model that agrees, and never much more."""
    num_tokens = 500
    asked = [
        Request(f"{i}", (5, 6, i, *range(60)), SamplingParams(temperature=1), i + 1, num_tokens)
        for i in range(num_streams)
    ]
    times = []
    for speculation in (False, True):
        core, _, clock = timed_core(cost_ms, 0.2, right)
        for each in asked:
            sampling = dataclasses.replace(each.sampling, speculation=speculation)
            core.add(dataclasses.replace(each, sampling=sampling))
        found: dict[str, list[Any]] = {each.request_id: [] for each in asked}
        for output in core.outputs_until_complete():
            found[output.request_id].append(output.token_id)
        for each in asked[:3]:
            assert found[each.request_id] == solo(each, hash_engine.VOCAB_SIZE)
        times.append(clock())
    if right and is_cheap:
        assert times[1] < times[0] / 1.8
    else:
        assert times[1] < 1.03 * times[0]


def test_nothing_is_computed_for_a_load_at_which_nothing_pays() -> None:
    """Once the costs are known, not even the prompts of new requests."""
    core, drafter, _ = timed_core(lambda rows: 1.0 + 4.0 * rows, 0.3, True)
    for i in range(8):
        sampling = SamplingParams(temperature=1)
        core.add(Request(f"{i}", (5, 6, i, *range(40)), sampling, i + 1, 300))
    for _ in range(200):
        core.step()
    runner = vars(drafter)["_runner"]
    num_cells = runner.num_cells
    core.add(Request("new", tuple(range(50)), SamplingParams(), 1, 60))
    for _ in range(50):
        core.step()
    assert runner.num_cells == num_cells
