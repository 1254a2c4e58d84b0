"""Measures how much our model's logits differ from transformers' on the same checkpoint.

`Bench` runs a model over a paged cache, chunk by chunk, with the attention that serves or with the
reference. Each function in `WAYS` computes tokens in
another way (prefill, single decodes, chunks, a mixed batch, after a prefix hit) and returns the
largest difference of logits relative to their scale. Tests assert on the differences, and
`benchmarks/parity.py` prints them as the table of docs/models.md.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from infer.attention.layout import AttentionBackend
from infer.engine.build.checkpoint import find_checkpoint
from infer.engine.build.runner_factory import make_attention
from infer.models.model import build_model
from infer.runner.kv_storage import KVStorage
from infer.runner.pack import Packer
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Chunk, Sequence
from infer.types import Request, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE


class Bench:
    """Runs a model over a paged cache, chunk by chunk."""

    def __init__(
        self,
        path: Path,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        *,
        quantization: str | None = None,
        attention: str = "sdpa",
        model_impl: str = "auto",
    ) -> None:
        """`path`: a folder, or a GGUF file. Weights that are quantised stay as they are in
        bfloat16. `attention`, `model_impl`: as in `EngineConfig`; an attention of "auto" serves."""
        cpu = torch.device("cpu")
        checkpoint = find_checkpoint(str(path), model_impl=model_impl)
        self.config = checkpoint.config
        held = None if quantization or dtype != torch.bfloat16 else checkpoint.blocks
        blocks = None if held is None else held.read
        if checkpoint.borrowed is None:
            source = checkpoint.source(dtype, cpu).with_layers(quantization, blocks=blocks)
            self.model = build_model(self.config, source, self.config.max_seq_len)
        else:
            self.model = checkpoint.borrowed(dtype)
        self.page_size, self.dtype, self.attention = page_size, dtype, attention

    @functools.cached_property
    def storage(self) -> KVStorage:
        cpu = torch.device("cpu")
        return KVStorage(self.config, 300, self.page_size, dtype=self.dtype, device=cpu)

    @functools.cached_property
    def backend(self) -> AttentionBackend:
        return make_attention(self.attention, self.storage, self.config)

    @functools.cached_property
    def allocator(self) -> PageAllocator:
        return PageAllocator(300, self.page_size)

    def emptied(self, attention: str, page_size: int | None = None) -> Bench:
        """A bench of the same model with a cache and an attention of its own."""
        other = copy.copy(self)
        other.page_size = page_size or self.page_size
        for name in ("storage", "backend", "allocator"):
            other.__dict__.pop(name, None)
        other.attention = attention
        return other

    def sequence(self, tokens: list[int], *, matched: bool = True) -> Sequence:
        request = Request(str(id(tokens)), tuple(tokens), SamplingParams(), 0, 1)
        sequence = Sequence.from_request(request, 0)
        sequence.table = self.allocator.match(tokens if matched else [])
        sequence.num_computed = sequence.table.num_indexed * self.allocator.page_size
        assert self.allocator.grow(sequence.table, len(tokens))
        return sequence

    @torch.inference_mode()
    def step(self, *chunks: tuple[Sequence, int]) -> list[Tensor]:
        """Logits [n, V] of every token of each chunk."""
        plan = tuple(Chunk(s, s.num_computed, n) for s, n in chunks)
        step = Packer(self.allocator.page_size, torch.device("cpu")).pack(plan)
        self.backend.plan(step.layout)
        hidden = self.model.forward(step.tokens, step.positions, self.backend)
        for sequence, n in chunks:
            sequence.num_computed += n
            self.allocator.commit(sequence.table, sequence.tokens, sequence.num_computed)
        return list(self.model.logits(hidden).split([n for _, n in chunks]))


def tokens_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


_KNOWN: WeakKeyDictionary[Any, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()
"""Model → text → its logits."""


def reference(model: Any, tokens: list[int]) -> Tensor:
    """Logits [n, V] of a text by transformers' model, or by a bench.

    They are computed once: weights must not change after that."""
    known = _KNOWN.setdefault(model, {})
    if (logits := known.get(tuple(tokens))) is not None:
        return logits
    if isinstance(model, Bench):
        logits = model.step((model.sequence(tokens, matched=False), len(tokens)))[0]
    else:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
    known[tuple(tokens)] = logits
    return logits


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the scale of the logits."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def prefill(bench: Bench, theirs: Any) -> float:
    tokens = tokens_of(150)
    (ours,) = bench.step((bench.sequence(tokens), 150))
    return deviation(ours, reference(theirs, tokens))


def decode(bench: Bench, theirs: Any) -> float:
    tokens = tokens_of(70, seed=1)
    sequence = bench.sequence(tokens)
    # Single tokens from the first one on, and at long contexts over the edge of a page of 16.
    counts = [*[1] * 5, 55, *[1] * 10]
    ours = torch.cat([bench.step((sequence, n))[0] for n in counts])
    return deviation(ours, reference(theirs, tokens))


def chunked(bench: Bench, theirs: Any) -> float:
    tokens = tokens_of(300, seed=2)
    sequence = bench.sequence(tokens)
    ours = torch.cat([bench.step((sequence, n))[0] for n in (7, 1, 120, 64, 108)])
    return deviation(ours, reference(theirs, tokens))


def mixed(bench: Bench, theirs: Any) -> float:
    """One step with decodes at different lengths, a new prompt and the later chunk of another."""
    prompts = [tokens_of(n, seed=n) for n in (5, 90, 33, 64)]
    sequences = [bench.sequence(tokens) for tokens in prompts]
    first = bench.step((sequences[0], 4), (sequences[1], 89), (sequences[2], 20))
    second = bench.step(
        (sequences[0], 1), (sequences[1], 1), (sequences[2], 13), (sequences[3], 64)
    )
    worst = 0.0
    for i, tokens in enumerate(prompts):
        ours = torch.cat([first[i], second[i]]) if i < 3 else second[i]
        worst = max(worst, deviation(ours, reference(theirs, tokens)))
    return worst


def prefix_hit(bench: Bench, theirs: Any) -> float:
    """The end of a text whose beginning another sequence has computed before."""
    tokens = tokens_of(120, seed=3)
    first = bench.sequence(tokens)
    bench.step((first, 120))
    again = bench.sequence([*tokens[:100], *tokens_of(30, seed=4)])
    num_cached = 100 // bench.allocator.page_size * bench.allocator.page_size
    assert again.num_computed == num_cached
    (ours,) = bench.step((again, 130 - num_cached))
    return deviation(ours, reference(theirs, again.tokens)[num_cached:])


WAYS: dict[str, Callable[[Bench, Any], float]] = {
    "prefill": prefill,
    "decode": decode,
    "chunked": chunked,
    "mixed batch": mixed,
    "prefix hit": prefix_hit,
}
