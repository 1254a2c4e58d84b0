"""`Scheduler`: each mode, policy and limit, step by step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from infer.config import SCHEDULER_POLICIES
from infer.engine.core import EngineCore
from infer.errors import OverloadedError, RequestError
from infer.types import FinishReason, Request, SamplingParams, StepOutput
from tests.support.hash_engine import make_hash_core, solo

names = (f"q{i}" for i in itertools.count())


def request(num_prompt: int = 4, max_tokens: int = 4, **fields: Any) -> Request:
    prompt = tuple((i * 7 + num_prompt) % 90 for i in range(num_prompt))
    fields.setdefault("sampling", SamplingParams(temperature=0))
    return Request(next(names), prompt, seed=0, max_tokens=max_tokens, **fields)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def widths(core: EngineCore) -> list[int]:
    """Number of tokens sampled in each step, until all requests have ended."""
    counts = []
    while core.has_work:
        counts.append(len(core.step(flush=True)))
    return counts


def chunks(core: EngineCore) -> list[tuple[str, int]]:
    """Execute the next step; returns its plan as (request id, number of tokens)."""
    plan = core.scheduler.schedule()
    shape = [(c.sequence.request_id, c.num_tokens) for c in plan]
    sampled = core.runner.execute(plan)
    core.scheduler.commit(core.scheduler.advance(plan), sampled)
    return shape


# The three modes.


def test_sequential_runs_one_at_a_time() -> None:
    core = make_hash_core(batching_mode="sequential")
    for _ in range(3):
        core.add(request(max_tokens=4))
    assert widths(core) == [1] * 12


def test_static_runs_a_batch_until_its_last_member_is_done() -> None:
    core = make_hash_core(batching_mode="static", max_batch_size=2)
    for max_tokens in (2, 5, 3, 3):
        core.add(request(max_tokens=max_tokens))
    # The requests of 2 and 5 tokens together, in which the freed seat stays empty; then 3 and 3.
    assert widths(core) == [2, 2, 1, 1, 1, 2, 2, 2]


def test_continuous_fills_a_freed_seat_at_the_next_step() -> None:
    core = make_hash_core(batching_mode="continuous", max_batch_size=2)
    for max_tokens in (2, 5, 3, 3):
        core.add(request(max_tokens=max_tokens))
    assert widths(core) == [2, 2, 2, 2, 2, 1, 1, 1]


def test_static_reports_what_padding_would_have_cost() -> None:
    core = make_hash_core(batching_mode="static", max_batch_size=2)
    core.add(request(4, max_tokens=2))
    core.add(request(10, max_tokens=5))
    core.outputs_until_complete()
    stats = core.stats().by_name()
    assert stats["num_batches"] == 1
    assert stats["num_batch_tokens"] == 6 + 15
    assert stats["num_padded_tokens"] == 2 * 15


def test_static_waits_for_company_but_not_longer_than_the_timeout() -> None:
    clock = Clock()
    core = make_hash_core(
        batching_mode="static", max_batch_size=3, batch_wait_timeout_s=0.05, clock=clock
    )
    core.add(request())
    assert core.step() == []
    assert core.wait_s() == pytest.approx(0.05)
    clock.now_s = 0.04
    assert core.step() == []
    assert core.wait_s() == pytest.approx(0.01)
    core.add(request())
    assert core.step() == []  # one seat is still empty
    clock.now_s = 0.051
    assert len(core.step()) == 2


def test_static_goes_at_once_when_it_is_full() -> None:
    core = make_hash_core(batching_mode="static", max_batch_size=3, clock=Clock())
    for _ in range(2):
        core.add(request())
    assert core.step() == []
    core.add(request())
    assert len(core.step()) == 3


def test_static_starts_its_timer_afresh_between_batches() -> None:
    clock = Clock()
    core = make_hash_core(
        batching_mode="static", max_batch_size=2, batch_wait_timeout_s=0.05, clock=clock
    )
    for _ in range(2):
        core.add(request(max_tokens=2))
    assert len(core.step()) == 2
    core.add(request())  # arrives while the batch runs; that wait does not count
    clock.now_s = 10.0
    assert len(core.step()) == 2  # the batch ends
    assert core.step() == []
    clock.now_s = 10.04
    assert core.step() == []
    clock.now_s = 10.06
    assert len(core.step()) == 1


def test_static_forgets_who_waited_and_left() -> None:
    clock = Clock()
    core = make_hash_core(
        batching_mode="static", max_batch_size=2, batch_wait_timeout_s=0.05, clock=clock
    )
    gone = request()
    core.add(gone)
    assert core.step() == []
    core.abort(gone.request_id)
    core.step()
    clock.now_s = 1.0
    core.add(request())
    assert core.step() == []  # the wait of this request begins now
    clock.now_s = 1.06
    assert len(core.step()) == 1


def test_a_newcomer_does_not_join_a_static_batch_that_runs() -> None:
    core = make_hash_core(batching_mode="static", max_batch_size=4, clock=Clock())
    for _ in range(4):
        core.add(request(max_tokens=3))
    core.step()
    core.add(request())
    assert len(core.step()) == 4


def test_contiguous_gives_pages_back_batch_by_batch() -> None:
    core = make_hash_core(
        batching_mode="static",
        max_batch_size=2,
        page_size=512,
        num_pages=3,
        enable_prefix_caching=False,
        hold_pages_until_batch_ends=True,
    )
    core.add(request(max_tokens=1))
    core.add(request(max_tokens=3))
    core.step()
    assert core.stats().gauges.num_free_pages == 0  # one is done, but the batch is not
    core.step()
    core.step()
    assert core.stats().gauges.num_free_pages == 2


def test_without_a_cache_every_token_comes_from_a_chunk_of_the_whole_sequence() -> None:
    core = make_hash_core(
        max_batch_size=3,
        max_num_batched_tokens=64,
        max_seq_len=64,
        enable_prefix_caching=False,
        keeps_computed=False,
    )
    runner: Any = core.runner
    each = [request(30, max_tokens=6), request(30, max_tokens=6), request(20, max_tokens=6)]
    for one in each:
        core.add(one)
    turns: dict[str, list[int]] = {one.request_id: [] for one in each}
    tokens: dict[str, list[int | None]] = {one.request_id: [] for one in each}
    while core.has_work:
        plan = core.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in plan) <= 64
        assert all(chunk.start == 0 and chunk.samples for chunk in plan)
        for chunk in plan:
            turns[chunk.sequence.request_id].append(chunk.num_tokens)
        sampled = runner.execute(plan)
        for output in core.scheduler.commit(core.scheduler.advance(plan), sampled):
            tokens[output.request_id].append(output.token_id)
        runner.poison(list(range(len(runner.cells))))
        core.scheduler.check()
    # The third one has its first turn as soon as the first two have had one.
    assert turns[each[0].request_id][:2] == [30, 31]
    assert turns[each[2].request_id] == [20, 21, 22, 23, 24, 25]
    assert tokens == {one.request_id: solo(one, runner.vocab_size) for one in each}


# Tokens: chunks and budgets.


def test_a_long_prompt_is_cut_and_running_streams_advance_before_it() -> None:
    core = make_hash_core(max_num_batched_tokens=10)
    short = request(3, max_tokens=9)
    long = request(25, max_tokens=2)
    core.add(short)
    core.add(long)
    assert chunks(core) == [(short.request_id, 3), (long.request_id, 7)]
    assert chunks(core) == [(short.request_id, 1), (long.request_id, 9)]
    assert chunks(core) == [(short.request_id, 1), (long.request_id, 9)]
    assert chunks(core) == [(short.request_id, 1), (long.request_id, 1)]


def test_the_budget_is_never_exceeded() -> None:
    for policy in SCHEDULER_POLICIES:
        core = make_hash_core(max_num_batched_tokens=5, scheduler_policy=policy)
        for i in range(8):
            core.add(request(3 + 2 * i, max_tokens=6))
        while core.has_work:
            assert sum(n for _, n in chunks(core)) <= 5


def test_prefill_first_gives_prompts_the_step() -> None:
    core = make_hash_core(max_num_batched_tokens=8, scheduler_policy="prefill_first")
    old = [request(2, max_tokens=9) for _ in range(3)]
    for r in old:
        core.add(r)
    core.step()
    new = request(20, max_tokens=2)
    core.add(new)
    assert chunks(core) == [(new.request_id, 8)]
    assert chunks(core) == [(new.request_id, 8)]
    assert chunks(core) == [(new.request_id, 4), *((r.request_id, 1) for r in old)]


def test_decode_round_robin_takes_turns() -> None:
    core = make_hash_core(max_num_batched_tokens=3, scheduler_policy="decode_round_robin")
    requests = [request(1, max_tokens=60) for _ in range(6)]
    for r in requests:
        core.add(r)
    while any(s.num_output == 0 for s in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    progress = {s.request_id: s.num_output for s in core.scheduler.running}
    for _ in range(10):
        core.step()
    gained = {
        s.request_id: s.num_output - progress[s.request_id]
        for s in core.scheduler.running
        if s.request_id in progress
    }
    assert sum(gained.values()) == 30
    assert max(gained.values()) - min(gained.values()) <= 1


# Seats, pages, the queue.


def test_priority_goes_before_arrival() -> None:
    core = make_hash_core(max_batch_size=1)
    core.add(request(max_tokens=2, priority=5))
    urgent = request(max_tokens=1, priority=-1)
    core.add(urgent)
    assert core.step()[0].request_id == urgent.request_id


def test_preemption_takes_the_youngest_and_recomputes_it_exactly() -> None:
    # Three requests that each grow to 16 tokens (4 pages) in a pool of 8 pages.
    core = make_hash_core(num_pages=9, page_size=4)
    requests = [
        Request(f"p{i}", (i, i + 1, i + 2, i + 3), SamplingParams(temperature=0), 0, 13)
        for i in range(3)
    ]
    for r in requests:
        core.add(r)
    outputs: dict[str, list[int | None]] = {r.request_id: [] for r in requests}
    order = []
    for output in core.outputs_until_complete():
        outputs[output.request_id].append(output.token_id)
        if output.finish_reason:
            order.append(output.request_id)
    assert core.stats().counters.num_preemptions >= 1
    assert order == ["p0", "p1", "p2"]
    for r in requests:
        assert outputs[r.request_id] == solo(r, core.runner.vocab_size)  # type: ignore[attr-defined]


def test_newcomers_do_not_overtake_a_preempted_sequence() -> None:
    core = make_hash_core(num_pages=9, page_size=4, max_batch_size=4)
    for i in range(3):
        core.add(Request(f"n{i}", (i,) * 4, SamplingParams(temperature=0), 0, 13))
    while not core.scheduler.preempted:
        core.step()
    core.add(Request("small", (9,), SamplingParams(temperature=0), 0, 1))
    victim = core.scheduler.preempted[0]
    while core.scheduler.preempted:
        assert [s.request_id for s in core.scheduler.waiting] == ["small"]
        core.step()
    assert victim.num_preemptions == 1
    core.outputs_until_complete()


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    core = make_hash_core(max_batch_size=2, max_waiting_requests=3)
    for _ in range(5):
        core.add(request())
    with pytest.raises(OverloadedError, match="queue is full") as caught:
        core.add(request())
    assert caught.value.status == 503
    assert caught.value.retry_after_s >= 1
    assert core.stats().counters.num_requests_refused == 1
    core.outputs_until_complete()
    core.add(request())  # there is room again


def test_what_can_never_fit_is_refused_at_once() -> None:
    core = make_hash_core(max_seq_len=512, num_pages=9, page_size=4)
    with pytest.raises(RequestError, match="length is 512 tokens"):
        core.add(request(500, max_tokens=13))
    with pytest.raises(RequestError, match="whole cache has 8"):
        core.add(request(30, max_tokens=4))
    core.add(request(29, max_tokens=4))  # 32 cells: the last token is never computed
    assert core.outputs_until_complete()[-1].finish_reason is FinishReason.LENGTH


def test_an_id_in_use_is_refused() -> None:
    core = make_hash_core()
    core.add(request())
    same = Request(next(iter(core.scheduler.by_id)), (1,), SamplingParams(), 0, 1)
    with pytest.raises(RequestError, match="already running"):
        core.add(same)


# Abort.


def states(core: EngineCore) -> dict[str, Request]:
    """Bring a core into a state with a request of each status; returns them by status."""
    by_state = {name: request(20, max_tokens=20) for name in ("decode", "prefill", "wait")}
    core.add(by_state["decode"])
    while core.scheduler.running == [] or core.scheduler.running[0].num_output == 0:
        core.step()
    core.add(by_state["prefill"])
    core.step()
    core.add(by_state["wait"])
    return by_state


@pytest.mark.parametrize("state", ["decode", "prefill", "wait", "preempted"])
def test_abort_frees_everything_in_every_state(state: str) -> None:
    core = make_hash_core(max_batch_size=2, max_num_batched_tokens=6)
    by_state = states(core)
    if state == "preempted":
        core.scheduler.preempt(core.scheduler.running[0])
        state = "decode"
    victim = by_state.pop(state)
    ended = core.abort(victim.request_id)
    assert ended is not None
    assert ended.finish_reason is FinishReason.ABORT
    core.scheduler.check()
    assert core.abort(victim.request_id) is None
    outputs: list[StepOutput] = core.outputs_until_complete()
    assert victim.request_id not in {o.request_id for o in outputs}
    stats = core.stats().by_name()
    assert stats["num_free_pages"] == stats["num_pages"]
    assert stats["num_finished_abort"] == 1
    assert stats["num_finished_length"] == 2


def test_an_unknown_id_is_ignored() -> None:
    core = make_hash_core()
    assert core.abort("nobody") is None


# Ends.


def test_eos_stop_tokens_and_min_tokens() -> None:
    plain = request(max_tokens=8)
    core = make_hash_core()
    tokens = solo(plain, core.runner.vocab_size)  # type: ignore[attr-defined]
    third = tokens[2]
    assert third not in tokens[:2]

    def run(**fields: Any) -> tuple[int, FinishReason | None]:
        core.add(Request("x", plain.prompt_token_ids, seed=0, max_tokens=8, **fields))
        outputs = core.outputs_until_complete()
        return len(outputs), outputs[-1].finish_reason

    greedy = SamplingParams(temperature=0)
    assert run(sampling=greedy, eos_token_ids=(third,)) == (3, FinishReason.EOS)
    assert run(sampling=greedy.replace(stop_token_ids=(third,))) == (3, FinishReason.STOP)
    assert run(sampling=greedy) == (8, FinishReason.LENGTH)
    assert run(sampling=greedy.replace(min_tokens=3), eos_token_ids=(third,))[0] == 8


def test_a_prefix_hit_is_reported() -> None:
    core = make_hash_core(page_size=4)
    first = request(17, max_tokens=2)
    core.add(first)
    core.outputs_until_complete()
    core.add(Request("again", first.prompt_token_ids, SamplingParams(temperature=0), 0, 2))
    assert [o.num_cached for o in core.outputs_until_complete()] == [16, 16]
