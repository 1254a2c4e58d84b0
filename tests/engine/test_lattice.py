"""The equivalence lattice: the same request gives the same tokens under all settings.

On the shipped model, in float32: alone or batched, each batching mode, any chunk size, cold or warm
cache, preempted or not, any page size, dense reference or paged, blocking or asyncio. The oracle is
`kv_cache_backend="none"`, which computes every token from the whole sequence. Each variant proves
that its subject (a cache hit, a preemption, a chunk, a shared batch) did occur.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from infer import LLM, EngineConfig, SamplingParams
from infer.engine.build.assemble import build_async_llm
from infer.errors import EngineError
from infer.kernels.rotary import QKRotation
from infer.models.hub import SHIPPED_FOLDER
from infer.models.model import build_model
from infer.models.registry import read_model_config
from infer.models.weights import open_checkpoint
from infer.runner.sampler import sample
from infer.schedule.sequence import Sequence
from tests.support.cases import slow_but
from tests.support.lattice import (
    NUM_TOKENS,
    OPENING,
    PROMPTS,
    params,
    preempt_at_every_third_step,
)

Tokens = list[tuple[int, ...]]


def run(llm: LLM) -> Tokens:
    each = [params(i) for i in range(len(PROMPTS))]
    return [output.token_ids for output in llm.generate(PROMPTS, each, use_tqdm=False)]


def engine(**settings: Any) -> LLM:
    return LLM(**{"dtype": "float32", "max_seq_len": 512, "max_batch_size": 4, **settings})


@pytest.fixture(scope="module")
def alone() -> Tokens:
    """The tokens of every request alone in an engine that keeps no keys and values."""
    with engine(batching_mode="sequential", kv_cache_backend="none") as llm:
        forget_between_steps(llm)
        result = run(llm)
        # A request computes n, n + 1, … tokens, so far more than its n + `max_tokens`.
        assert llm.stats()["num_computed_tokens"] > 10 * sum(len(tokens) for tokens in result)
    return result


def forget_between_steps(llm: LLM) -> None:
    """Overwrite all keys and values with NaN before each step. Page 0 is never read as data."""
    step, runner = llm.core.step, llm.core.runner

    def stepping(*, flush: bool = False) -> Any:
        for cache in runner.caches:  # type: ignore[attr-defined]
            cache[1:].fill_(torch.nan)
        return step(flush=flush)

    llm.core.step = stepping  # type: ignore[method-assign]


def test_without_a_cache_no_key_or_value_is_kept_between_steps(alone: Tokens) -> None:
    some = (0, 3, 6, 7)
    prompts, each = [PROMPTS[i] for i in some], [params(i) for i in some]
    with engine(kv_cache_backend="none", max_num_batched_tokens=512) as llm:
        forget_between_steps(llm)
        outputs = llm.generate(prompts, each, use_tqdm=False)
        assert [output.token_ids for output in outputs] == [alone[i] for i in some]
    with engine() as llm:
        forget_between_steps(llm)
        with pytest.raises(EngineError, match="no finite numbers"):
            llm.generate(prompts, each, use_tqdm=False)


def test_dense_reference_without_any_cache(alone: Tokens) -> None:
    """A five-line causal attention over the whole text at every token: no pages, no chunks."""
    config = read_model_config(SHIPPED_FOLDER)
    source = open_checkpoint(SHIPPED_FOLDER, torch.float32, torch.device("cpu"))
    model = build_model(config, source, 512)

    def attend(
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: QKRotation | None = None,
    ) -> torch.Tensor:
        assert rotation is not None
        q, k, v = (x.transpose(0, 1)[None] for x in (*rotation(q, k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with LLM(dtype="float32") as llm, torch.inference_mode():
        for i in (0, 3, 5):
            request = llm.make_request(PROMPTS[i], params(i))
            sequence = Sequence.from_request(request, 0)
            for _ in range(request.max_tokens):
                tokens = torch.tensor(sequence.tokens)
                hidden = model.forward(tokens, torch.arange(len(tokens)), attend)
                (result,) = sample(model.logits(hidden[-1:]), [sequence])
                sequence.tokens.append(result.token_id)
            assert tuple(sequence.tokens[sequence.num_prompt :]) == alone[i]


QUICK = {"sequential", "continuous", "static", "chunks of 7", "slotted", "contiguous", "preempted"}
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "sequential": (
        {"batching_mode": "sequential", "enable_prefix_caching": False},
        lambda s: s["num_cached_tokens"] == 0,
    ),
    "continuous": ({}, lambda s: s["num_cached_tokens"] > 0),
    "static": ({"batching_mode": "static"}, lambda s: s["num_batches"] == 2),
    "one batch": ({"max_batch_size": 8}, lambda s: s["num_steps"] < 1.5 * NUM_TOKENS),
    "sequential, cached": ({"batching_mode": "sequential"}, lambda s: s["num_cached_tokens"] > 0),
    "chunks of 1": ({"max_num_batched_tokens": 1}, lambda s: s["num_steps"] > 8 * NUM_TOKENS),
    "chunks of 7": ({"max_num_batched_tokens": 7}, lambda s: s["num_steps"] > 2 * NUM_TOKENS),
    "page size 1": ({"page_size": 1}, lambda s: s["num_cached_tokens"] > 0),
    "page size 5": ({"page_size": 5}, lambda s: s["num_cached_tokens"] > 0),
    "slotted": ({"kv_cache_backend": "slotted"}, lambda s: s["num_pages"] == 4),
    "contiguous": (
        {"kv_cache_backend": "contiguous", "batching_mode": "static"},
        lambda s: s["num_pages"] == 4,
    ),
    "preempted": (
        # 28 pages of 4 tokens for 8 sequences of up to 86 tokens.
        {"max_seq_len": 104, "page_size": 4, "kv_cache_memory_bytes": 0, "max_batch_size": 8},
        lambda s: s["num_preemptions"] > 0,
    ),
    "a bound on the step": (
        # No step takes less than a millisecond, so prompts get the smallest chunks.
        {
            "max_step_ms": 1.0,
            "max_batch_size": 8,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
        },
        lambda s: s["num_steps"] > NUM_TOKENS + 6,
    ),
    "prefill first": (
        {"scheduler_policy": "prefill_first", "max_num_batched_tokens": 9},
        lambda s: s["num_steps"] > NUM_TOKENS,
    ),
    "round robin": (
        {"scheduler_policy": "decode_round_robin", "max_num_batched_tokens": 3},
        lambda s: s["num_steps"] > 2 * NUM_TOKENS,
    ),
}


@pytest.mark.parametrize("name", slow_but(QUICK, VARIANTS))
def test_same_tokens_as_alone(name: str, alone: Tokens) -> None:
    settings, pending_events = VARIANTS[name]
    if settings.get("kv_cache_memory_bytes") == 0:
        config = read_model_config(SHIPPED_FOLDER)
        token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
        settings = {**settings, "kv_cache_memory_bytes": token * 116}
    with engine(**settings) as llm:
        assert run(llm) == alone
        stats = llm.stats()
        assert pending_events(stats), stats
        assert stats["num_free_pages"] == stats["num_pages"]


def test_a_warm_cache_changes_nothing(alone: Tokens) -> None:
    with engine() as llm:
        assert run(llm) == alone
        cold = llm.stats()["num_cached_tokens"]
        assert run(llm) == alone
        assert llm.stats()["num_cached_tokens"] > 2 * cold


def test_preempted_at_every_third_step(alone: Tokens) -> None:
    # Small pages: a sequence has often just filled one when it is preempted.
    with engine(page_size=4) as llm:
        preempt_at_every_third_step(llm.core)
        assert run(llm) == alone
        assert llm.stats()["num_preemptions"] > 8


def test_asyncio(alone: Tokens) -> None:
    async def main() -> Tokens:
        config = EngineConfig(dtype="float32", max_seq_len=512, max_batch_size=4)
        async with build_async_llm(config) as llm:
            requests = [llm.make_request(p, params(i)) for i, p in enumerate(PROMPTS)]
            outputs = await asyncio.gather(*[llm.generate(request) for request in requests])
            return [output.token_ids for output in outputs]

    assert asyncio.run(main()) == alone


def test_streaming(alone: Tokens) -> None:
    """One thread reads all streams in turn, piece by piece."""
    with engine() as llm:
        streams = {i: llm.stream(PROMPTS[i], params(i)) for i in range(len(PROMPTS))}
        got: dict[int, tuple[int, ...]] = dict.fromkeys(streams, ())
        while streams:
            for i in list(streams):
                piece = next(streams[i], None)
                if piece is None:
                    del streams[i]
                else:
                    got[i] += piece.token_ids
        assert [got[i] for i in range(len(PROMPTS))] == alone


@pytest.mark.parametrize("count", [10, pytest.param(64, marks=pytest.mark.slow)])
def test_mixed_requests_through_the_three_modes(count: int) -> None:
    """The modes give the same tokens in different numbers of steps (docs/architecture.md)."""
    prompts = [(OPENING * (1 + i % 5))[: 20 + 17 * (i % 11)] for i in range(count)]
    each = [SamplingParams(temperature=0, max_tokens=3 + (i * 7) % 13) for i in range(count)]
    tokens, steps = {}, {}
    for mode in ("sequential", "static", "continuous"):
        with engine(batching_mode=mode, max_batch_size=4) as llm:
            outputs = llm.generate(prompts, each, use_tqdm=False)
            tokens[mode] = [output.token_ids for output in outputs]
            steps[mode] = llm.stats()["num_steps"]
    assert tokens["sequential"] == tokens["static"] == tokens["continuous"]
    assert steps["continuous"] < steps["static"] < steps["sequential"]
    assert {len(t) for t in tokens["static"]} != {15}
