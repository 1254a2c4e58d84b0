"""Random workloads over `HashRunner`, each made from a seed.

A workload draws a mode, a policy, a page size, a pool, a budget and requests with common prefixes
from its seed. While it runs, requests arrive at random steps, some are aborted, and some running
sequences are preempted. All invariants are checked after every step. At the end every request must
have exactly the tokens of a solo run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from infer.config import (
    BATCHING_MODES,
    SCHEDULER_POLICIES,
    STATIC_ORDERS,
    SchedulerConfig,
    SpeculativeConfig,
)
from infer.engine.core import EngineCore
from infer.errors import OverloadedError, RequestError
from infer.schedule.drafting import Drafter
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.types import FinishReason, Request, SamplingParams, StepOutput
from tests.support.hash_engine import AheadHashRunner, HashRunner, solo

VOCAB_SIZE = 97
MAX_STEPS = 20_000


@dataclass
class Seen:
    """Counts of what happened in workloads, to prove that the interesting cases did."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    num_chunks: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    num_evictions: int = 0
    num_pending: int = 0
    num_late: int = 0
    modes: set[str] = field(default_factory=set)
    reasons: set[FinishReason] = field(default_factory=set)

    def add(self, other: Seen) -> None:
        for name, value in vars(other).items():
            if isinstance(value, set):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


class Workload:
    """The engine and the requests of one seed."""

    def __init__(
        self,
        seed: int,
        *,
        ahead: bool = False,
        speculative: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`ahead`: the runner works one step ahead. `speculative`: settings of speculation.
        `drafter`: its draft model."""
        self.random = r = random.Random(seed)
        self.ahead = ahead
        mode = r.choice(BATCHING_MODES)
        backend = r.choice(["paged", "paged", "paged", "slotted", "contiguous"])
        if mode == "continuous" and backend == "contiguous":
            backend = "slotted"
        if without_cache := seed % 8 == 5:
            backend = "none"
        seats = r.choice([1, 2, 5, 8])
        max_seq_len = 64
        if backend == "paged":
            page_size = r.choice([1, 2, 3, 4, 16])
            num_pages = 1 + r.choice([30, 64, 160]) // page_size
        else:
            page_size, num_pages = max_seq_len, seats + 1
        self.now_s = 0.0
        config = SchedulerConfig(
            max_batch_size=seats,
            max_num_batched_tokens=r.choice([64, 100] if without_cache else [1, 3, 8, 64]),
            max_seq_len=max_seq_len,
            max_waiting_requests=r.choice([2, 100]),
            batching_mode=mode,
            static_order=STATIC_ORDERS[seed % 2],
            min_batch_size=1 + seed % seats,
            scheduler_policy=r.choice(SCHEDULER_POLICIES)
            if mode == "continuous" and not without_cache
            else "fcfs",
            hold_pages_until_batch_ends=backend == "contiguous",
            max_step_ms=None if without_cache else r.choice([None, None, 1.0]),
            speculative=speculative,
        )
        caching = backend == "paged" and r.random() < 0.8
        self.allocator = PageAllocator(
            num_pages, page_size, enable_prefix_caching=caching, keeps_computed=not without_cache
        )
        self.scheduler = Scheduler(config, self.allocator, self._clock, drafter=drafter)
        kind = AheadHashRunner if ahead else HashRunner
        self.runner = kind(num_pages, page_size, VOCAB_SIZE)
        self.core = EngineCore(self.scheduler, self.runner)
        self.beginnings = [
            [r.randrange(VOCAB_SIZE) for _ in range(r.randrange(1, 20))] for _ in range(3)
        ]
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[StepOutput]] = {}
        self.aborted: set[str] = set()
        self.num_refused = 0

    def _clock(self) -> float:
        self.now_s += self.random.random() * 0.001
        return self.now_s

    def new_request(self, name: str) -> Request:
        r = self.random
        prompt = r.choice(self.beginnings)[: r.randrange(1, 21)]
        prompt = prompt + [r.randrange(3) for _ in range(r.randrange(0, 8))]
        return Request(
            name,
            tuple(prompt),
            SamplingParams(
                temperature=r.choice([0, 1]),
                min_tokens=r.choice([0, 0, 2]),
                stop_token_ids=r.sample(range(VOCAB_SIZE), 2),
                # `HashRunner` has no penalties; only `Sequence.reads_output` follows from it.
                repetition_penalty=r.choice([1.0, 1.0, 1.0, 1.5]) if self.ahead else 1.0,
            ),
            seed=r.randrange(5),
            max_tokens=r.randrange(2, 20),
            eos_token_ids=tuple(r.sample(range(VOCAB_SIZE), 2)),
            priority=r.choice([0, 0, 1]),
            cache_scope=r.choice(["", "", "tenant"]),
        )

    def run(self, num_requests: int = 12) -> Seen:
        r, core = self.random, self.core
        arrived = steps = 0
        while arrived < num_requests or core.has_work:
            while arrived < num_requests and r.random() < 0.5:
                self._add(self.new_request(f"r{arrived}"))
                arrived += 1
            for output in core.step():
                self.outputs[output.request_id].append(output)
            self.scheduler.check()
            if self.scheduler.running and r.random() < 0.1:
                self.scheduler.preempt(r.choice(self.scheduler.running))
                self.scheduler.check()
            if self.requests and r.random() < 0.05:
                name = r.choice(list(self.requests))
                ended = core.abort(name)
                assert core.abort(name) is None
                if ended is not None:
                    self.aborted.add(name)
                    self.outputs[name].append(ended)
                self.scheduler.check()
            self.now_s += 0.02
            steps += 1
            assert steps < MAX_STEPS, "no progress"
        self._judge()
        return self._seen(steps)

    def _add(self, request: Request) -> None:
        try:
            self.core.add(request)
        except (OverloadedError, RequestError):
            self.num_refused += 1
            return
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []

    def _judge(self) -> None:
        for name, request in self.requests.items():
            outputs = self.outputs[name]
            assert [o.finish_reason is not None for o in outputs[:-1]] == [False] * (
                len(outputs) - 1
            ), "something after the end"
            last = outputs[-1]
            tokens = [o.token_id for o in outputs if o.token_id is not None]
            wanted = solo(request, VOCAB_SIZE)
            if name in self.aborted:
                assert last.finish_reason is FinishReason.ABORT
                assert tokens == wanted[: len(tokens)]
                continue
            assert tokens == wanted
            if tokens[-1] in request.eos_token_ids and len(tokens) > request.sampling.min_tokens:
                assert last.finish_reason is FinishReason.EOS
            elif len(tokens) < request.max_tokens:
                assert last.finish_reason is FinishReason.STOP
        assert self.allocator.num_free == self.allocator.num_usable
        assert self.scheduler.num_unfinished == 0
        assert getattr(self.runner, "num_failed", 0) == 0, "a launch failed"

    def _seen(self, steps: int) -> Seen:
        stats = self.scheduler.stats
        return Seen(
            num_steps=steps,
            num_preemptions=stats.num_preemptions,
            num_cached=stats.num_cached_tokens,
            num_chunks=self.runner.num_chunks,
            num_aborted=len(self.aborted),
            num_refused=self.num_refused,
            num_evictions=self.allocator.num_evictions,
            num_pending=getattr(self.runner, "num_pending", 0),
            num_late=stats.num_late_tokens,
            modes={self.scheduler.config.batching_mode},
            reasons=set(stats.num_finished),
        )
