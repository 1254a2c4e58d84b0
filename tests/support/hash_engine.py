"""`HashRunner`: a runner without torch that makes every error in paging or scheduling visible"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from infer.config import SchedulerConfig
from infer.engine.core import EngineCore
from infer.engine.loop import Blueprint
from infer.schedule.drafting import Drafter
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import PENDING, Plan, Sampled, Sequence, verified
from infer.text.checkpoint_text import TextFiles, read_text_files
from infer.types import Request, TokenLogprobs
from infer.types.engine_limits import EngineLimits
from tests.support.checkpoints import VOCAB_SIZE, write_tokenizer

_MASK = (1 << 61) - 1
_ROOT = 0x9E3779B97F4A7C15 & _MASK


def hash_cell(previous: int, token: int) -> int:
    """The content of a cell."""
    x = (previous * 6364136223846793005 + token * 1442695040888963407 + 1) & _MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9) & _MASK


def sample_cell(cell: int, request: Request, vocab_size: int) -> int:
    """The token that follows a cell."""
    if request.sampling.temperature:
        cell = hash_cell(cell, request.seed & _MASK)
    return (cell >> 7) % vocab_size


def fake_logprobs(request: Request, token: int, vocab_size: int) -> TokenLogprobs | None:
    """Log-probabilities that are a function of the token, so that tests can predict them."""
    count = request.sampling.logprobs
    if count is None:
        return None
    top = tuple(((token + i) % vocab_size, -0.5 - i) for i in range(count))
    return TokenLogprobs(-0.5, top)


def solo(request: Request, vocab_size: int) -> list[int]:
    """The tokens of a request, run alone and without a cache."""
    cell = _ROOT
    for token in request.prompt_token_ids:
        cell = hash_cell(cell, token)
    ends = {*request.eos_token_ids, *request.sampling.stop_token_ids}
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(sample_cell(cell, request, vocab_size))
        if output[-1] in ends and len(output) > request.sampling.min_tokens:
            break
        cell = hash_cell(cell, output[-1])
    return output


class HashRunner:
    """The KV cell at position p is a hash of the cell at p-1, read through the page table, and the
    token at p. The sampled token is the last cell modulo the vocabulary (mixed with the seed if the
    request samples). So a wrong page, a stale cell, a page shared too early, or a token computed
    twice or not at all changes the output at once. `solo` computes the expected tokens of a request
    without any cache. The tests of scheduler, engine, asyncio and server use this runner."""

    def __init__(
        self, num_pages: int, page_size: int, vocab_size: int = 97, *, step_s: float = 0.0
    ) -> None:
        """`step_s`: seconds per step, for tests that need a busy engine."""
        self.step_s = step_s
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.cells: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.num_chunks = 0
        """Number of chunks that did not reach the end of their sequence."""
        self.max_rows = 0

    def execute(self, plan: Plan) -> Seq[Sampled]:
        """Write the cells of every chunk, then sample where a chunk reaches the end."""
        if self.step_s:
            time.sleep(self.step_s)
        seen: set[int] = set()
        results = []
        for chunk in plan:
            sequence = chunk.sequence
            assert id(sequence) not in seen, "a sequence twice in one plan"
            seen.add(id(sequence))
            assert chunk.num_tokens > 0
            assert chunk.start == sequence.num_computed
            cell = self._compute(sequence, chunk.start, chunk.num_tokens)
            if not chunk.samples:
                self.num_chunks += 1
                continue
            results.append(self._sample(cell, sequence.request))
            for place, guess in enumerate(chunk.proposed, chunk.start + chunk.num_tokens):
                cell = self._write(sequence, place, cell, guess)
                results.append(self._sample(cell, sequence.request))
        self.max_rows = max(self.max_rows, len(plan))
        return verified(plan, results)

    def _sample(self, cell: int, request: Request) -> Sampled:
        token = sample_cell(cell, request, self.vocab_size)
        return Sampled(token, fake_logprobs(request, token, self.vocab_size))

    def launch_now(self, plan: Plan, resolve: Callable[[Sequence, int], int]) -> list[Sampled]:
        """`execute`, with `resolve` for the values of pending tokens."""
        known = {}
        for chunk in plan:
            sequence = chunk.sequence
            known[id(sequence)] = sequence.tokens
            sequence.tokens = [
                resolve(sequence, position) if token == PENDING else token
                for position, token in enumerate(sequence.tokens)
            ]
        try:
            return list(self.execute(plan))
        finally:
            for chunk in plan:
                chunk.sequence.tokens = known[id(chunk.sequence)]

    def poison(self, pages: list[int]) -> None:
        """Clear the cells of these pages."""
        for page in pages:
            self.cells[page] = [None] * self.page_size

    def _compute(self, sequence: Sequence, start: int, num_tokens: int) -> int:
        cell = self._read(sequence, start - 1) if start else _ROOT
        for position in range(start, start + num_tokens):
            cell = self._write(sequence, position, cell, sequence.tokens[position])
            count = sequence.request.sampling.prompt_logprobs
            if count is not None and position + 1 < sequence.num_prompt:
                sequence.prompt_scores[position + 1] = TokenLogprobs(-0.5, ((0, -0.5),) * count)
        return self._read(sequence, start + num_tokens - 1)

    def _write(self, sequence: Sequence, position: int, before: int, token: int) -> int:
        cell = hash_cell(before, token)
        page = sequence.table.pages[position // self.page_size]
        assert page != 0
        self.cells[page][position % self.page_size] = cell
        return cell

    def _read(self, sequence: Sequence, position: int) -> int:
        page = sequence.table.pages[position // self.page_size]
        cell = self.cells[page][position % self.page_size]
        assert cell is not None, "a cell is read that was never written"
        return cell


@dataclass(frozen=True)
class Landed:
    """A step that was computed at its launch, as on a device that works in order."""

    sampled: list[Sampled]

    def results(self) -> list[Sampled]:
        return self.sampled

    def elapsed_ms(self) -> float | None:
        return None


class AheadHashRunner(HashRunner):
    """A `HashRunner` that works one step ahead; the tokens sampled last are on its device."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.num_pending = 0
        self.num_failed = 0
        """Number of launches that raised."""
        self._device: dict[int, tuple[int, int]] = {}
        """Id of a sequence → position and id of the token sampled last."""

    def launch(self, plan: Plan) -> Landed:
        ends = [(c.sequence, c.start + c.num_tokens) for c in plan if c.samples]
        self.num_failed += 1  # the core continues whatever is raised here
        sampled = self.launch_now(plan, self._resolve)
        self.num_failed -= 1
        self._device = {
            id(sequence): (end, result.token_id)
            for (sequence, end), result in zip(ends, sampled, strict=True)
        }
        return Landed(sampled)

    def _resolve(self, sequence: Sequence, position: int) -> int:
        assert not sequence.reads_output, "a pending token is read on the host"
        self.num_pending += 1
        place, token = self._device[id(sequence)]
        assert place == position, "a pending token of an earlier step"
        return token


def drafts_of(
    sequence: Sequence, count: int, vocab_size: int, wrong: Callable[[int], bool]
) -> tuple[int, ...]:
    """What a `HashDraftRunner` drafts behind a sequence's tokens, computed without a cache."""
    cell, found = _ROOT, []
    for token in sequence.tokens:
        cell = hash_cell(cell, token)
    for _ in range(count):
        token = sample_cell(cell, sequence.request, vocab_size)
        found.append((token + wrong(cell)) % vocab_size)
        cell = hash_cell(cell, found[-1])
    return tuple(found)


class HashDraftRunner(HashRunner):
    """A draft model that agrees with `HashRunner` except behind some cells."""

    def __init__(self, *args: Any, wrong: Callable[[int], bool] = lambda cell: False) -> None:
        """`wrong`: whether another token is sampled behind a cell."""
        super().__init__(*args)
        self.wrong = wrong
        self.num_cells = 0
        """Number of cells that were computed."""

    def execute(self, plan: Plan) -> Seq[Sampled]:
        for chunk in plan:
            assert not chunk.proposed
            assert chunk.sequence.request.sampling.logprobs is None
            self.num_cells += chunk.num_tokens
        return super().execute(plan)

    def _sample(self, cell: int, request: Request) -> Sampled:
        sampled = super()._sample(cell, request)
        if self.wrong(cell):
            sampled.token_id = (sampled.token_id + 1) % self.vocab_size
        return sampled


def make_hash_drafter(
    vocab_size: int = VOCAB_SIZE,
    *,
    num_pages: int = 400,
    page_size: int = 4,
    max_tokens: int = 64,
    max_seq_len: int = 512,
    wrong: Callable[[int], bool] = lambda cell: False,
    clock: Callable[[], float] = time.monotonic,
    runner: type[HashDraftRunner] = HashDraftRunner,
) -> Drafter:
    """A drafter over a `HashDraftRunner` with a cache of its own."""
    return Drafter(
        runner(num_pages, page_size, vocab_size, wrong=wrong),
        PageAllocator(num_pages, page_size),
        clock,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        max_tokens=max_tokens,
    )


@lru_cache
def small_text_files() -> TextFiles:
    """A byte-level tokenizer with a chat template: see `checkpoints.write_tokenizer`."""
    with tempfile.TemporaryDirectory() as folder:
        return read_text_files(write_tokenizer(Path(folder)))


def make_hash_core(
    *,
    num_pages: int = 400,
    page_size: int = 4,
    vocab_size: int = VOCAB_SIZE,
    clock: Callable[[], float] = time.monotonic,
    enable_prefix_caching: bool = True,
    keeps_computed: bool = True,
    step_s: float = 0.0,
    runner: type[HashRunner] = HashRunner,
    announce: Callable[[str | None], None] = lambda request_id: None,
    drafter: Drafter | None = None,
    **settings: Any,
) -> EngineCore:
    """An engine core over a `HashRunner`; `settings` go to `SchedulerConfig`."""
    values = {"max_batch_size": 8, "max_num_batched_tokens": 64, "max_seq_len": 512, **settings}
    allocator = PageAllocator(
        num_pages,
        page_size,
        enable_prefix_caching=enable_prefix_caching,
        keeps_computed=keeps_computed,
    )
    scheduler = Scheduler(SchedulerConfig(**values), allocator, clock, drafter=drafter)
    return EngineCore(scheduler, runner(num_pages, page_size, vocab_size, step_s=step_s), announce)


def limits_of(core: EngineCore) -> EngineLimits:
    """The limits of a hash core."""
    runner, scheduler = core.runner, core.scheduler
    return EngineLimits(
        vocab_size=getattr(runner, "vocab_size", VOCAB_SIZE),
        max_seq_len=scheduler.config.max_seq_len,
        num_seats=scheduler.num_seats,
        max_waiting_requests=scheduler.config.max_waiting_requests,
        max_waiting_tokens=scheduler.config.max_waiting_tokens,
        batching_mode=scheduler.config.batching_mode,
        page_size=scheduler.allocator.page_size,
        prefix_caching=scheduler.allocator.enable_prefix_caching,
    )


def hash_blueprint(settings: dict[str, Any]) -> Blueprint:
    """The blueprint of a hash core for an engine process; `settings` as in `make_hash_core`, and
    the model's name."""
    settings = dict(settings)
    name = settings.pop("served_model_name", "hash-model")

    def build(announce: Callable[[str | None], None]) -> tuple[EngineCore, EngineLimits]:
        core = make_hash_core(announce=announce, **settings)
        return core, limits_of(core)

    return Blueprint(name, small_text_files(), build)
