"""The promise in bfloat16 on a CPU: tokens and log-probabilities bitwise equal in any company.

On the model that ships, with the defaults (its own dtype, the native attention kernel). Where the
kernel was not compiled there is no promise, and the start-up says so; then this is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_lattice import PROMPTS, params

from infer import LLM
from infer.kernels.native import available
from infer.types import RequestOutput

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

Result = list[tuple[tuple[int, ...], Any]]


def run(llm: LLM, order: list[int] | None = None) -> Result:
    order = order or list(range(len(PROMPTS)))
    each = [params(i).replace(logprobs=3) for i in order]
    outputs = llm.generate([PROMPTS[i] for i in order], each, progress=False)
    by_prompt: dict[int, RequestOutput] = dict(zip(order, outputs, strict=True))
    return [(by_prompt[i].token_ids, by_prompt[i].logprobs) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def alone() -> Result:
    settings = {"batching_mode": "sequential", "enable_prefix_caching": False, "max_seq_len": 512}
    with LLM(**settings) as llm:
        assert llm._core.runner.model.embedding.dtype.itemsize == 2
        return run(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_size": 8},
        {"batching_mode": "static", "max_batch_size": 3},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1, "page_size": 1},
        {"page_size": 5, "num_threads": 2},
        {"kv_cache_backend": "slotted", "max_batch_size": 4},
        {"page_size": 4, "max_seq_len": 128, "kv_cache_memory_bytes": 3072 * 170},
    ],
    ids=str,
)
def test_bitwise_as_alone(settings: dict[str, Any], alone: Result) -> None:
    with LLM(**{"max_seq_len": 512, **settings}) as llm:
        assert run(llm) == alone
        assert run(llm, order=[5, 2, 7, 0, 4, 1, 6, 3]) == alone  # warm, and in another order
        stats = llm.stats()
        if "kv_cache_memory_bytes" in settings:
            assert stats["num_preemptions"] > 0
        if settings.get("kv_cache_backend") is None:
            assert stats["num_cached_tokens"] > 0
