"""Static batches: their ids and padding, when they leave, and the order `prompt_length`."""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass
from typing import Any

import pytest

from infer.bench.workloads import Draw, mixed
from infer.config import EngineConfig
from infer.engine.core import EngineCore
from infer.errors import ConfigError
from infer.schedule import static_batches as static_batches_module
from infer.types import Request, SamplingParams
from infer.types.step_events import Admitted, BatchEnded, BatchFormed
from tests.support.hash_engine import make_hash_core

NUM_WORKLOADS = 2000
NUM_QUICK = 60
TIMEOUT_S = 0.05


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, num_prompt: int = 4, max_tokens: int = 2, **fields: Any) -> Request:
    prompt = tuple(random.Random(name).choices(range(90), k=num_prompt))
    return Request(name, prompt, SamplingParams(temperature=0), 0, max_tokens, **fields)


def events_of(core: EngineCore) -> list[Any]:
    return list(core.step_events.events) if core.step_events else []


# A batch that one can point at.


def test_a_batch_has_an_id_a_time_a_wait_and_its_padding() -> None:
    clock = Clock()
    core = make_hash_core(batching_mode="static", max_batch_size=2, clock=clock)
    clock.now_s = 1.0
    core.add(request("a", 4, max_tokens=1))
    clock.now_s = 1.5
    core.add(request("b", 10, max_tokens=3))
    core.add(request("c", 5, max_tokens=1))
    clock.now_s = 2.0
    core.step()
    formed = [event for event in events_of(core) if isinstance(event, BatchFormed)]
    admitted = [event for event in events_of(core) if isinstance(event, Admitted)]
    [first] = formed
    assert first == BatchFormed(first.batch_id, 2.0, 2, 1.0, 14, 20)
    assert [(event.request_id, event.batch_id) for event in admitted] == [
        ("a", first.batch_id),
        ("b", first.batch_id),
    ]
    assert events_of(core).index(first) < events_of(core).index(admitted[0])
    core.step()
    assert events_of(core) == []
    core.step()
    assert events_of(core) == [BatchEnded(first.batch_id, 4 + 1 + 10 + 3, 26)]
    core.step(flush=True)
    [second] = [event for event in events_of(core) if isinstance(event, BatchFormed)]
    assert second.batch_id != first.batch_id
    assert (second.num_requests, second.num_prompt_tokens, second.num_padded_tokens) == (1, 5, 5)


def test_another_engine_has_other_ids() -> None:
    ids, clock = set(), Clock()
    for now_s in (1.0, 1.2):
        clock.now_s = now_s
        core = make_hash_core(batching_mode="static", clock=clock)
        core.add(request("a"))
        core.step(flush=True)
        ids |= {event.batch_id for event in events_of(core) if isinstance(event, BatchFormed)}
    assert len(ids) == 2


def test_a_sequence_that_was_preempted_comes_back_into_its_batch() -> None:
    core = make_hash_core(batching_mode="static", max_batch_size=2)
    core.add(request("a"))
    core.step(flush=True)
    [before] = [event for event in events_of(core) if isinstance(event, Admitted)]
    core.scheduler.preempt(core.scheduler.running[0])
    core.step()
    [after] = [event for event in events_of(core) if isinstance(event, Admitted)]
    assert after.batch_id == before.batch_id is not None
    assert not [event for event in events_of(core) if isinstance(event, BatchFormed)]


@pytest.mark.parametrize("mode", ["continuous", "sequential"])
def test_the_other_modes_have_no_batches(mode: str) -> None:
    core = make_hash_core(batching_mode=mode)
    core.add(request("a"))
    found = []
    while core.has_work:
        core.step()
        found += events_of(core)
    assert not [event for event in found if isinstance(event, (BatchFormed, BatchEnded))]
    assert [event.batch_id for event in found if isinstance(event, Admitted)] == [None]


# When a batch leaves.


def test_a_batch_leaves_with_its_least_size_and_takes_all_who_wait() -> None:
    clock = Clock()
    core = make_hash_core(batching_mode="static", max_batch_size=4, min_batch_size=2, clock=clock)
    core.add(request("a", max_tokens=1))
    assert core.step() == []
    core.add(request("b", max_tokens=1))
    assert len(core.step()) == 2
    for name in "cdefg":
        core.add(request(name, max_tokens=1))
    assert len(core.step()) == 4
    assert core.step() == []  # one is left, and waits for another one
    clock.now_s = 0.051
    assert len(core.step()) == 1


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batching_mode": "static", "min_batch_size": 5, "max_batch_size": 4}, "min_batch_size"),
        ({"batching_mode": "static", "min_batch_size": 0}, "min_batch_size"),
        ({"min_batch_size": 2}, "min_batch_size"),
        ({"static_order": "prompt_length"}, "static_order"),
        ({"batching_mode": "static", "static_order": "longest"}, "static_order"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert caught.value.field == field


# The order `prompt_length`.


def padding_of(order: str, seed: int, **settings: Any) -> tuple[int, int]:
    """Padding of the prompts, and number of batches, of the workload `mixed`."""
    core = make_hash_core(
        batching_mode="static",
        static_order=order,
        num_pages=6000,
        max_seq_len=1400,
        max_num_batched_tokens=1400,
        **settings,
    )
    for i, planned in enumerate(mixed(Draw(seed, 0, 90))):
        core.add(request(f"r{i}", len(planned.prompt), 1))
    formed = []
    while core.has_work:
        core.step(flush=True)
        formed += [event for event in events_of(core) if isinstance(event, BatchFormed)]
    return sum(e.num_padded_tokens - e.num_prompt_tokens for e in formed), len(formed)


def test_batches_of_similar_prompts_have_at_most_half_the_padding() -> None:
    """On `mixed` (16 prompts at once) with 4 seats: with its usual seed, and over several."""
    paddings = []
    for seed in range(8):
        arrival, num_batches = padding_of("arrival", seed, max_batch_size=4)
        similar, same_number = padding_of("prompt_length", seed, max_batch_size=4)
        assert num_batches == same_number == 4
        paddings.append((similar, arrival))
    assert 2 * paddings[0][0] <= paddings[0][1]
    assert 2 * sum(similar for similar, _ in paddings) <= sum(arrival for _, arrival in paddings)


@dataclass
class Batch:
    """A batch of a random workload."""

    formed_s: float
    members: list[str]
    ended_s: float = 0.0


class RandomWorkload:
    """A random workload in the order `prompt_length`, and beside it a queue in order of rank, from
    which the same numbers of requests are taken at the same times."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        self.clock = Clock()
        self.core = make_hash_core(
            batching_mode="static",
            static_order="prompt_length",
            max_batch_size=r.choice([1, 2, 3, 4, 8]),
            num_pages=300,  # enough for 8 seats; a check looks at each page
            max_num_batched_tokens=r.choice([16, 300]),
            batch_wait_timeout_s=TIMEOUT_S,
            clock=self.clock,
        )
        self.batches: list[Batch] = []
        self.admitted_s: dict[str, float] = {}
        self.in_order: list[tuple[tuple[int, int], str]] = []
        """(rank, name) of the requests that would wait if seats were given in order of rank."""
        self.turns: dict[str, Batch] = {}
        """The batch that each request would have in order of rank."""

    def run(self) -> None:
        r, core = self.random, self.core
        num_requests, levels = r.randrange(2, 40), r.choice([1, 1, 2])
        pace, step_s = r.choice([0.0, 0.3, 0.9]), r.choice([0.001, 0.01, 0.1])
        arrived = 0
        while arrived < num_requests or core.has_work:
            while arrived < num_requests and r.random() >= pace:
                size = r.choice([r.randrange(1, 9), r.randrange(1, 120)])
                priority = r.randrange(levels)
                made = request(f"r{arrived}", size, r.randrange(1, 6), priority=priority)
                core.add(made)
                insort(self.in_order, (core.scheduler.find(made.request_id).rank, f"r{arrived}"))
                arrived += 1
            if r.random() < 0.02 and core.scheduler.waiting:
                self._abort(r.choice(core.scheduler.waiting).request_id)
            core.step()
            self._note(events_of(core), step_s)
            core.scheduler.check()
            self.clock.now_s += step_s

    def _abort(self, gone: str) -> None:
        """If its turn has passed, the first of those that went before their turn has its turn."""
        self.core.abort(gone)
        early = [name for _, name in self.in_order if name in self.admitted_s]
        if gone in self.turns:
            gone = early[0]
            self.turns[gone] = self.batches[-1]
        self.in_order = [each for each in self.in_order if each[1] != gone]

    def _note(self, events: list[Any], step_s: float) -> None:
        now_s = self.clock.now_s
        for event in events:
            if isinstance(event, BatchFormed):
                self.batches.append(Batch(now_s, []))
                turns = self.in_order[: event.num_requests]
                self.turns |= dict.fromkeys((name for _, name in turns), self.batches[-1])
                del self.in_order[: event.num_requests]
            elif isinstance(event, Admitted):
                self.batches[-1].members.append(event.request_id)
                self.admitted_s[event.request_id] = now_s
            elif isinstance(event, BatchEnded):
                self.batches[-1].ended_s = now_s + step_s

    def judge(self) -> int:
        """Check the bound for each request; returns the number of those that went behind their
        turn."""
        num_late = 0
        for number, batch in enumerate(self.batches):
            for name in batch.members:
                turn = self.turns[name]
                assert number <= self.batches.index(turn) + 1, name
                late_s = self.admitted_s[name] - turn.formed_s
                assert late_s <= turn.ended_s - turn.formed_s + TIMEOUT_S + 0.1001, name
                num_late += late_s > 0
        return num_late


def judged(seeds: range) -> int:
    num_late = 0
    for seed in seeds:
        workload = RandomWorkload(seed)
        workload.run()
        try:
            num_late += workload.judge()
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
    return num_late


def test_nobody_waits_longer_than_one_batch_and_the_timeout_for_it() -> None:
    assert judged(range(NUM_QUICK)) > NUM_QUICK


@pytest.mark.slow
def test_nobody_waits_longer_in_two_thousand_workloads() -> None:
    assert judged(range(NUM_WORKLOADS)) > NUM_WORKLOADS


def test_by_length_alone_somebody_would_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortest(lengths: list[int], owed: list[int], due: list[int], num_seats: int) -> list[int]:
        return sorted(range(len(lengths)), key=lengths.__getitem__)[:num_seats]

    monkeypatch.setattr(static_batches_module, "similar", shortest)
    with pytest.raises(AssertionError, match="workload"):
        judged(range(NUM_QUICK))


def test_a_choice_among_thousands_is_quick_to_make_and_owes_nobody_more_than_a_batch() -> None:
    """What waits beyond `MIN_CONSIDERED` is not looked at."""
    core = make_hash_core(
        batching_mode="static",
        static_order="prompt_length",
        max_batch_size=4,
        max_waiting_requests=3000,
    )
    looked_at = []
    for i in range(1000):
        core.add(request(f"r{i}", 1 + i * 37 % 100, 1))

    def counted(lengths: list[int], owed: list[int], due: list[int], num_seats: int) -> list[int]:
        looked_at.append(len(lengths))
        return original(lengths, owed, due, num_seats)

    original = static_batches_module.similar
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_batches_module, "similar", counted)
        for _ in range(8):
            core.step()
    assert max(looked_at) == static_batches_module.MIN_CONSIDERED
