"""Stateful tests of allocator and scheduler by Hypothesis, which calls them in any order.

Unlike a failure of a random workload, one found here is shrunk to the shortest sequence of calls.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from infer.config import BATCHING_MODES, SCHEDULER_POLICIES, STATIC_ORDERS, SchedulerConfig
from infer.engine.core import EngineCore
from infer.errors import OverloadedError, RequestError
from infer.schedule.page_allocator import PageAllocator, PageTable
from infer.schedule.scheduler import Scheduler
from infer.types import Request, SamplingParams
from tests.support.hash_engine import HashRunner, solo

VOCAB_SIZE = 97
few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class AllocatorMachine(RuleBasedStateMachine):
    """Matches, grows, commits and releases tables; their pages must hold their own tokens."""

    tables = Bundle("tables")

    @initialize(
        num_pages=st.integers(3, 12),
        page_size=st.integers(1, 4),
        low_water=st.sampled_from([None, 0, 1, 3]),
    )
    def start(self, num_pages: int, page_size: int, low_water: int | None) -> None:
        self.allocator = PageAllocator(num_pages, page_size, low_water=low_water)
        self.open: list[PageTable] = []
        # Content of each page (scope, tokens up to its end): set by commit, compared by match.
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(target=tables, tokens=few_tokens, scope=st.sampled_from(["", "a"]))
    def begin(self, tokens: list[int], scope: str):  # type: ignore[no-untyped-def]
        allocator = self.allocator
        table = allocator.match(tokens, scope)
        size = allocator.page_size
        assert len(table.pages) * size < len(tokens)
        for i, page in enumerate(table.pages):
            assert self.written[page] == (scope, tuple(tokens[: (i + 1) * size]))
        cached = len(table.pages)
        if not allocator.grow(table, len(tokens)):
            allocator.release(table)
            return multiple()
        for i in range(cached, len(table.pages)):
            self.written[table.pages[i]] = (scope, tuple(tokens[: (i + 1) * size]))
        self.open.append(table)
        return (table, tokens, scope)

    @rule(entry=tables, share=st.floats(0, 1))
    def commit(self, entry: tuple[PageTable, list[int], str], share: float) -> None:
        table, tokens, _ = entry
        if table.pages:
            self.allocator.commit(table, tokens, int(len(tokens) * share))

    @rule(at_least=st.integers(0, 9), shortest=st.integers(1, 3), by_age=st.booleans())
    def take_back(self, at_least: int, shortest: int, by_age: bool) -> None:
        allocator = self.allocator
        free, touched = allocator.num_free, allocator.num_touched
        before = allocator.begin_period() if by_age else None
        runs = allocator.take_back(before=before, at_least=at_least, shortest=shortest)
        taken = {page for first, count in runs for page in range(first, first + count)}
        assert all(count >= shortest for _, count in runs)
        assert allocator.num_free == free
        assert allocator.num_touched == touched - len(taken)
        if by_age and shortest == 1:
            assert allocator.num_touched == allocator.num_used
        for page in taken:
            self.written.pop(page, None)

    @rule(limit=st.integers(0, 12))
    def set_limit(self, limit: int) -> None:
        self.allocator.limit = min(limit, self.allocator.num_usable)

    @rule(entry=consumes(tables))
    def end(self, entry: tuple[PageTable, list[int], str]) -> None:
        self.allocator.release(entry[0])
        self.open.remove(entry[0])

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check(self.open)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and preempts; every request's tokens must be those of a solo run."""

    @initialize(
        mode=st.sampled_from(BATCHING_MODES),
        policy=st.sampled_from(SCHEDULER_POLICIES),
        seats=st.integers(1, 3),
        budget=st.integers(1, 9),
        page_size=st.integers(1, 4),
        pool=st.integers(24, 60),
        max_step_ms=st.sampled_from([None, 5.0]),
        static_order=st.sampled_from(STATIC_ORDERS),
        low_water=st.sampled_from([None, 0, 5]),
    )
    def start(
        self,
        mode: str,
        policy: str,
        seats: int,
        budget: int,
        page_size: int,
        pool: int,
        max_step_ms: float | None,
        static_order: str,
        low_water: int | None,
    ) -> None:
        self.now_s = 0.0
        num_pages = 1 + pool // page_size
        self.allocator = PageAllocator(num_pages, page_size, low_water=low_water)
        self.least = -(-40 // page_size)
        config = SchedulerConfig(
            max_batch_size=seats,
            max_num_batched_tokens=budget,
            max_seq_len=40,
            max_waiting_requests=4,
            batching_mode=mode,
            scheduler_policy=policy if mode == "continuous" else "fcfs",
            max_step_ms=max_step_ms,
            static_order=static_order,
        )
        self.scheduler = Scheduler(config, self.allocator, lambda: self.now_s)
        self.runner = HashRunner(num_pages, page_size, VOCAB_SIZE)
        self.core = EngineCore(self.scheduler, self.runner)
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.count = 0

    @rule(prompt=few_tokens, max_tokens=st.integers(1, 8), priority=st.integers(0, 1))
    def add(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        self.count += 1
        request = Request(
            f"r{self.count}",
            tuple(prompt),
            SamplingParams(temperature=0),
            0,
            max_tokens,
            priority=priority,
        )
        try:
            self.core.add(request)
        except (OverloadedError, RequestError):
            return
        self.wanted[request.request_id] = solo(request, VOCAB_SIZE)
        self.got[request.request_id] = []

    @rule(seconds=st.sampled_from([0.0, 0.02, 1.0]))
    def step(self, seconds: float) -> None:
        self.now_s += seconds
        anybody = bool(self.scheduler.running or self.scheduler.preempted)
        computed = self.scheduler.stats.num_computed_tokens
        for output in self.core.step():
            assert output.token_id is not None
            self.got[output.request_id].append(output.token_id)
            got, wanted = self.got[output.request_id], self.wanted[output.request_id]
            assert got == wanted[: len(got)]
            assert (output.finish_reason is not None) == (len(got) == len(wanted))
        assert not anybody or self.scheduler.stats.num_computed_tokens > computed

    @rule(limit=st.integers(0, 60), at_least=st.integers(0, 30), shortest=st.integers(1, 3))
    def lose_memory(self, limit: int, at_least: int, shortest: int) -> None:
        """What was in pages that are given back is gone; nobody may read it."""
        usable = self.allocator.num_usable
        self.allocator.limit = min(usable, max(self.least, limit))
        self.scheduler.keep_within_limit()
        assert len(self.scheduler.running) <= 1 or self.allocator.num_used <= self.allocator.limit
        for first, count in self.allocator.take_back(at_least=at_least, shortest=shortest):
            for page in range(first, first + count):
                self.runner.cells[page] = [None] * self.runner.page_size

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.by_id)))
        assert self.core.abort(name) is not None

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.scheduler.running) - 1))
        self.scheduler.preempt(self.scheduler.running[index])

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.outputs_until_complete()
            self.scheduler.check()
            assert self.allocator.num_free == self.allocator.num_usable


few = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = few
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = few
