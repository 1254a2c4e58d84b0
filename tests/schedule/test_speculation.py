"""Speculation in the scheduler: no token depends on what is proposed, and proposals must pay."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infer.config import EngineConfig, SpeculativeConfig
from infer.errors import ConfigError
from infer.schedule import sequence as sequence_module
from infer.schedule.committer import Committer
from infer.schedule.cost_model import StepTimes, worthwhile
from infer.schedule.ngram_index import MAX_PAUSE, MIN_PAUSE, Guesses, NgramIndex, Prediction
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Chunk, Plan, Sampled
from infer.schedule.speculation import Speculator
from infer.types import FinishReason, Request, SamplingParams
from tests.support import hash_engine
from tests.support.hash_engine import make_hash_core, solo
from tests.support.workloads import VOCAB_SIZE, Workload

SETTINGS = SpeculativeConfig(method="ngram", num_speculative_tokens=5)


class Oracle:
    """Proposes the right tokens, wrong ones, or right ones up to a wrong one."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._random = random.Random(1)
        self._known: dict[str, list[int]] = {}

    def propose(self, index: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        r = self._random
        for name, request in self._workload.requests.items():
            if name not in self._known:
                self._known[name] = [*request.prompt_token_ids, *solo(request, VOCAB_SIZE)]
            known = self._known[name]
            if known[: len(tokens)] == tokens and len(known) > len(tokens):
                break
        else:
            known = tokens
        right = known[len(tokens) : len(tokens) + count]
        # A request that ends early is proposed for beyond its end.
        right += [r.randrange(VOCAB_SIZE) for _ in range(count - len(right))]
        match r.randrange(4):
            case 0:
                return ()
            case 1:
                return tuple(right)
            case 2:
                return tuple((token + 1) % VOCAB_SIZE for token in right)
            case _:
                right[r.randrange(count)] = r.randrange(VOCAB_SIZE)
                return tuple(right[: r.randrange(1, count + 1)])


def run(seed: int) -> Workload:
    """A random workload in which an oracle proposes; checks pages after each step."""
    workload = Workload(seed, speculative=SETTINGS)
    oracle, check = Oracle(workload), workload.scheduler.check

    def checked() -> None:
        check()
        allocator = workload.allocator
        for each in workload.scheduler.running:
            assert len(each.table.pages) <= allocator.pages_for(len(each.tokens)), "pages are left"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "propose", lambda *each: oracle.propose(*each))
        patch.setattr(workload.scheduler, "check", checked)
        workload.run()
    return workload


@pytest.mark.parametrize("count", [160, pytest.param(500, marks=pytest.mark.slow)])
def test_every_request_has_the_tokens_that_it_has_alone(count: int) -> None:
    sums = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
    modes, reasons, preemptions, backends = set(), set(), 0, set()
    for seed in range(count):
        try:
            workload = run(seed)
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
        stats = workload.scheduler.stats
        for name in sums:
            sums[name] += getattr(stats, name)
        assert sum(stats.num_accepted_at.values()) == stats.num_accepted_tokens
        preemptions += stats.num_preemptions
        modes.add(workload.scheduler.config.batching_mode)
        backends.add(workload.allocator.keeps_computed)
        reasons |= set(stats.num_finished)
    assert sums["num_drafts"] > 8 * count
    assert sums["num_accepted_tokens"] > 10 * count
    assert sums["num_draft_tokens"] > sums["num_accepted_tokens"] + 10 * count
    assert modes == {"continuous", "static", "sequential"}
    assert backends == {True, False}
    assert reasons == set(FinishReason) - {FinishReason.ERROR, FinishReason.COMPLETE}
    assert preemptions > 2 * count


# Faults planted on purpose.


def accepts_everything(patch: pytest.MonkeyPatch) -> None:
    def verified(plan: Plan, results: Any) -> list[Sampled]:
        rows: Iterator[Sampled] = iter(results)
        return [
            dataclasses.replace(next(rows), following=tuple(next(rows) for _ in chunk.proposed))
            for chunk in plan
            if chunk.samples
        ]

    patch.setattr(hash_engine, "verified", verified)


def keeps_one_computed_too_many(patch: pytest.MonkeyPatch) -> None:
    settle = Speculator.settle

    def settled(self: Speculator, advanced: Any, num_accepted: int, num_kept: int) -> None:
        settle(self, advanced, num_accepted, num_kept)
        sequence = advanced.chunk.sequence
        rejected = num_accepted < len(advanced.chunk.proposed)
        if rejected and sequence.num_computed == len(sequence.tokens) - 1:
            sequence.tokens[-1:] = [advanced.chunk.proposed[num_accepted]]

    patch.setattr(Speculator, "settle", settled)


def keeps_the_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageAllocator, "shrink", lambda *_: None)


def indexes_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    commit = PageAllocator.commit

    def committed(self: PageAllocator, table: Any, tokens: list[int], num_computed: int) -> None:
        commit(
            self,
            table,
            [*tokens, *[1] * 5],
            min(num_computed + 3, len(table.pages) * self.page_size),
        )

    patch.setattr(PageAllocator, "commit", committed)


def goes_on_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    append = Committer._append

    def appended(self: Committer, advanced: Any, result: Sampled) -> Any:
        outputs = append(self, advanced, result)
        if outputs[-1].finish_reason is not None and len(outputs) < 1 + len(result.following):
            outputs.append(outputs[-1])
        return outputs

    patch.setattr(Committer, "_append", appended)


def proposes_without_pages(patch: pytest.MonkeyPatch) -> None:
    propose = Speculator._propose

    def proposed(self: Speculator, sequence: Any, limit: int, price: float) -> Any:
        pages = list(sequence.table.pages)
        found = propose(self, sequence, limit, price)
        for page in reversed(sequence.table.pages[len(pages) :]):
            self._allocator._release_page(page)
        sequence.table.pages[len(pages) :] = [1] * (len(sequence.table.pages) - len(pages))
        return found

    patch.setattr(Speculator, "_propose", proposed)


FAULTS = [
    accepts_everything,
    keeps_one_computed_too_many,
    keeps_the_pages,
    indexes_what_was_rejected,
    goes_on_behind_the_end,
    proposes_without_pages,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_workloads_notice_a_fault(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, IndexError, KeyError)):
            all(run(seed) for seed in range(60))


# What a kill does: another engine goes on behind the tokens that were delivered.


def request(name: str = "r", **values: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=40, **values)
    return Request(name, (5, 6, 7, 5, 6, 7, 5, 6), sampling, 1, 40)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_another_engine_goes_on_in_the_middle_of_an_accepted_run(num_steps: int) -> None:
    asked = request()
    wanted = solo(asked, hash_engine.VOCAB_SIZE)
    full = [*asked.prompt_token_ids, *wanted]

    def propose(index: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        return tuple(full[len(tokens) : len(tokens) + count])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "propose", propose)
        core = make_hash_core(speculative=SETTINGS)
        core.add(asked)
        got = [output.token_id for _ in range(num_steps) for output in core.step()]
        assert len(got) > num_steps or num_steps == 1
        for delivered in (len(got), len(got) - 1):  # not all of a step may have come through
            after = make_hash_core(speculative=SETTINGS)
            head = tuple(token for token in got[:delivered] if token is not None)
            after.add(dataclasses.replace(asked, output_token_ids=head))
            rest = [output.token_id for output in after.outputs_until_complete()]
            assert [*head, *rest] == wanted


def test_a_request_may_switch_speculation_off() -> None:
    core = make_hash_core(speculative=SETTINGS)
    core.add(request("off", speculation=False))
    core.outputs_until_complete()
    assert core.stats().counters.num_draft_tokens == 0
    core.add(request("on"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "propose", lambda *_: (1, 2))
        core.outputs_until_complete()
    assert core.stats().counters.num_draft_tokens > 0


def test_a_step_that_fails_only_with_proposals_is_repeated_without() -> None:
    class Fragile(hash_engine.HashRunner):
        def execute(self, plan: Plan) -> Any:
            if any(chunk.proposed for chunk in plan):
                raise MemoryError
            return super().execute(plan)

    core = make_hash_core(speculative=SETTINGS, runner=Fragile)
    asked = request()
    core.add(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "propose", lambda *_: (1, 2))
        outputs = core.outputs_until_complete()
    assert [output.token_id for output in outputs] == solo(asked, hash_engine.VOCAB_SIZE)
    core.scheduler.check()


# The index.


def slow_proposal(tokens: list[int], least: int, most: int, count: int) -> tuple[int, ...]:
    """The latest of the longest matches, by trying every place."""
    best, best_length = 0, least - 1
    for place in range(len(tokens) - 1, least - 1, -1):
        length = 0
        while length < min(most, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = place, length
    period = len(tokens) - best
    return tuple(tokens[best + i % period] for i in range(count)) if best else ()


def test_the_index_finds_the_latest_of_the_longest_matches() -> None:
    r = random.Random(3)
    num_found = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.schedule.ngram_index.MAX_CANDIDATES", 1000)
        for _ in range(300):
            least = r.randrange(1, 4)
            most = least + r.randrange(3)
            index, tokens = NgramIndex(least, most), [r.randrange(3)]
            for _ in range(r.randrange(40)):
                tokens += [r.randrange(3) for _ in range(r.randrange(1, 3))]
                index.read(tokens)
                found = index.propose(tokens, 4)
                assert found == slow_proposal(tokens, least, most, 4)
                num_found += bool(found)
    assert num_found > 1000


def test_the_index_reads_a_long_prompt_in_parts_and_every_token_once() -> None:
    index, tokens = NgramIndex(2, 4), list(range(1000)) * 2
    assert not index.read(tokens, limit=1500)
    assert index.read(tokens, limit=500)
    assert index.propose(tokens, 3) == (0, 1, 2)
    assert index.read([*tokens, 0], limit=1)


def test_a_prediction_is_followed_from_its_beginning_and_found_again() -> None:
    text = Prediction((1, 2, 3, 4, 5, 6, 7), 2, 4)
    assert text.propose([9, 9], 0, 3) == ()
    assert text.propose([9, 9, 1], 1, 3) == (2, 3, 4)
    assert text.propose([9, 9, 2], 1, 3) == ()
    assert text.propose([9, 9, 8, 4, 5], 3, 3) == (6, 7)
    assert text.propose([9, 9, 6, 7], 2, 3) == ()
    assert text.propose([9, 1, 2], 0, 3) == ()


@pytest.mark.parametrize("right", [True, False])
def test_a_prediction_saves_steps_where_it_is_right(right: bool) -> None:
    asked = Request("r", (5, 6, 7), SamplingParams(temperature=0), 1, 60)
    wanted = solo(asked, hash_engine.VOCAB_SIZE)
    text = tuple(wanted if right else [wanted[0], *(token + 1 for token in wanted[1:])])
    core = make_hash_core(speculative=SETTINGS)
    core.add(dataclasses.replace(asked, prediction_token_ids=text))
    outputs = core.outputs_until_complete()
    assert [output.token_id for output in outputs] == wanted
    accepted, rejected = outputs[-1].num_predicted
    if right:
        assert accepted > len(wanted) // 2
        assert core.stats().counters.num_steps < len(wanted) // 2
    else:
        assert accepted == 0
        assert rejected > 0


# Whether proposals are made.


def test_a_token_is_proposed_while_it_is_probable_enough() -> None:
    assert [worthwhile(0.9, price, 8) for price in (0.0, 0.5, 0.85, 0.95)] == [8, 6, 1, 0]
    assert worthwhile(1.0, 0.9, 3) == 3
    assert worthwhile(1.0, 1.0, 3) == 0


def test_the_price_of_a_row_follows_from_step_times() -> None:
    def price(cost_ms: Callable[[int], float], num_rows: int) -> float | None:
        costs = StepTimes()
        for rows in (1, 9, 1, 5, 2, 9, 1):
            costs.record(rows, cost_ms(rows))
        found = costs.cost(num_rows)
        return None if found is None else found.price

    assert price(lambda rows: 10.0, 1) == pytest.approx(0.0)
    assert price(lambda rows: 8.0 + 2 * rows, 1) == pytest.approx(0.2)
    assert price(lambda rows: 8.0 + 2 * rows, 16) == pytest.approx(0.8)
    assert price(lambda rows: 2.0 * rows, 4) == pytest.approx(1.0)
    assert price(lambda rows: 20.0 - rows, 4) == 0.0
    alike = StepTimes()
    for _ in range(20):
        alike.record(4, 10.0)
    assert alike.cost(4) is None


def test_a_sequence_that_is_not_worth_it_is_tried_more_and_more_rarely() -> None:
    guesses = Guesses(NgramIndex(2, 4))
    assert guesses.acceptance == 1.0
    for _ in range(30):
        guesses.record(4, 0, 0)
    assert guesses.acceptance < 0.01
    pauses = []
    for _ in range(12):
        guesses.pause()
        num = 1
        while guesses.is_paused():
            num += 1
        pauses.append(num)
        guesses.record(1, 0, 0)
    assert pauses[:3] == [MIN_PAUSE, 2 * MIN_PAUSE, 4 * MIN_PAUSE]
    assert pauses[-1] == MAX_PAUSE
    guesses.record(1, 1, 1)
    assert not guesses.is_on_trial


def timed_core(cost_ms: Callable[[int], float], **settings: Any) -> Any:
    """A core whose steps take a time by the number of their rows, on a clock of its own."""
    now_s = 0.0

    class Timed(hash_engine.HashRunner):
        rows: list[int]

        def execute(self, plan: Plan) -> Any:
            nonlocal now_s
            num = sum(chunk.num_rows for chunk in plan)
            now_s += cost_ms(num) / 1000
            return super().execute(plan)

    core = make_hash_core(
        speculative=SETTINGS,
        runner=Timed,
        clock=lambda: now_s,
        num_pages=9000,
        max_seq_len=4000,
        **settings,
    )
    return core, lambda: now_s


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(
    ("cost_ms", "is_cheap"),
    [(lambda rows: 10.0 + 0.1 * rows, True), (lambda rows: 5.0 * rows, False)],
)
def test_speculation_pays_or_is_off(
    right: bool, cost_ms: Callable[[int], float], is_cheap: bool
) -> None:
    """On a virtual clock: cheap rows that are right save time, and nothing ever costs much."""
    asked = Request("r", (5, 6, 7), SamplingParams(temperature=0, max_tokens=800), 1, 800)
    full = [5, 6, 7, *solo(asked, hash_engine.VOCAB_SIZE)]

    def propose(index: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        shift = 0 if right else 1
        return tuple(token + shift for token in full[len(tokens) : len(tokens) + count])

    core, clock = timed_core(cost_ms)
    core.add(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "propose", propose)
        outputs = core.outputs_until_complete()
    assert [output.token_id for output in outputs] == full[3:]
    plain_s = 800 * cost_ms(1) / 1000
    if right and is_cheap:
        assert clock() < plain_s / 4
    else:
        assert clock() < 1.03 * plain_s


def test_rows_in_groups_lose_little() -> None:
    """On a virtual clock: 16 rows are computed at a time, so the first proposed token of a step
    costs as much as many. One of eight is right."""
    asked = [
        Request(f"{i}", (5, 6, i), SamplingParams(temperature=0, max_tokens=600), 1, 600)
        for i in range(16)
    ]
    full = {each.prompt_token_ids: solo(each, hash_engine.VOCAB_SIZE) for each in asked}

    def propose(index: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        (token,) = full[tuple(tokens[:3])][len(tokens) - 3 :][:1] or [0]
        return (token if hash(tuple(tokens[-2:])) % 8 == 0 else token + 1,)

    def cost_ms(rows: int) -> float:
        return 3.0 if rows <= 16 else 3.4 + 0.001 * rows

    core, clock = timed_core(cost_ms, max_batch_size=16)
    for each in asked:
        core.add(each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "propose", propose)
        outputs = core.outputs_until_complete()
    assert len(outputs) == 16 * 600
    assert core.stats().counters.num_draft_tokens > 20
    assert clock() < 1.03 * 600 * cost_ms(16) / 1000


# Settings.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "speculative_config: must be a JSON object, not 'ngram'"),
        ("{", "must be JSON such as"),
        ("{}", "missing required field `method`"),
        ('{"method": "draft"}', r"Invalid enum value 'draft' - at `\$.method`"),
        ('{"method": "draft_model"}', "method 'draft_model' needs `model`"),
        ('{"method": "ngram", "model": "m"}', "`model` is for method 'draft_model'"),
        ('{"method": "ngram", "quantization": "int8"}', "`quantization` is for method 'draft_m"),
        ('{"method": "draft_model", "model": "m", "quantization": "int2"}', "value 'int2'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', r">= 1 - at `\$.num_spec"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', r"<= 32 - at `\$.num_spec"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "must not exceed prompt_lookup_max"),
        ('{"method": "ngram", "lookup": 5}', "unknown field `lookup`"),
    ],
)
def test_a_setting_that_is_not_possible_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=text)


def test_a_sampler_of_one_s_own_and_speculation_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="a sampler of your own may depend on the steps"):
        EngineConfig(speculative_config='{"method": "ngram"}', sampler="m:f")


def test_what_is_sampled_behind_a_rejected_token_is_dropped() -> None:
    plan = (Chunk(three_tokens(), 2, 1, (7, 8, 9)),)
    rows = [Sampled(7), Sampled(8), Sampled(1), Sampled(9)]
    (result,) = sequence_module.verified(plan, rows)
    assert [result.token_id, *(each.token_id for each in result.following)] == [7, 8, 1]


def three_tokens() -> Any:
    return sequence_module.Sequence.from_request(Request("r", (1, 2, 3), SamplingParams(), 0, 4), 0)
