"""Batch invariance on a CPU in bfloat16, int8, int4 and the blocks of GGUF files: tokens and
log-probabilities are bitwise equal in any batch.

On the shipped model, with the defaults (its own dtype, the native attention kernel), with int8 or
int4 layers, with keys and values in int8, and with the kernels for CPUs that have AVX2 only; and on
a small random model in a GGUF file of Q4_K and Q6_K. Without the compiled kernel there is no such
guarantee, and the start-up warns; these tests are then skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from infer import LLM
from infer.attention.cpu import obstacle
from infer.kernels.loader import (
    ISA_VARIABLE,
    available,
    chosen_instruction_set,
    instruction_sets,
)
from infer.kernels.native import bfloat16_obstacle, quantization_obstacle
from infer.types import RequestOutput
from tests.support.cases import slow_but
from tests.support.checkpoints import make_model
from tests.support.gguf_files import write
from tests.support.lattice import PROMPTS, params

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

Result = list[tuple[tuple[int, ...], Any]]


def run(llm: LLM, order: list[int] | None = None) -> Result:
    order = order or list(range(len(PROMPTS)))
    each = [params(i).replace(logprobs=3) for i in order]
    texts = [text[:MOST_BYTES] for text in PROMPTS] if is_of_bytes(llm) else PROMPTS
    outputs = llm.generate([texts[i] for i in order], each, use_tqdm=False)
    by_prompt: dict[int, RequestOutput] = dict(zip(order, outputs, strict=True))
    return [(by_prompt[i].token_ids, by_prompt[i].logprobs) for i in range(len(PROMPTS))]


MOST_BYTES = 96
"""Length of a prompt for a model with a token for each byte: it fits 128 tokens with the answer."""


def is_of_bytes(llm: LLM) -> bool:
    return str(llm.config.model).endswith(".gguf")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "lattice.gguf"
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    write(path, "llama", make_model("llama", **shape), Q.Q4_K, Q.Q6_K)
    return path


KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"dtype": "int8", "kv_cache_dtype": "model"},
    "int4": {"dtype": "int4", "kv_cache_dtype": "model"},
    "int8-cache": {"dtype": "int8", "kv_cache_dtype": "int8"},
    "avx2": {},
    "int8-cache-avx2": {"dtype": "int8", "kv_cache_dtype": "int8"},
    "gguf": {},
    "gguf-avx2": {},
}


# Both halves of each are in another kind, and GGUF files have a short test of their own.
SLOW_KINDS = {"int4", "int8-cache-avx2", "gguf", "gguf-avx2"}


@pytest.fixture(
    scope="module",
    params=slow_but(KINDS.keys() - SLOW_KINDS, KINDS),
)
def alone(
    request: pytest.FixtureRequest, gguf_file: Path
) -> Iterator[tuple[dict[str, Any], Result]]:
    kind = KINDS[request.param]
    if request.param.startswith("gguf"):
        kind = {"model": str(gguf_file), "kv_cache_dtype": "model"}
    with pytest.MonkeyPatch.context() as patched:
        if request.param.endswith("avx2"):
            if "avx2" not in instruction_sets():
                pytest.skip("no AVX2 here")
            patched.setenv(ISA_VARIABLE, "avx2")
        yield kind, result_of(kind)
    chosen_instruction_set()  # the limit as before


def result_of(kind: dict[str, Any]) -> Result:
    """What each request gets when nothing is batched or cached; skips what cannot run here."""
    if kind.get("dtype") == "int4" and (reason := quantization_obstacle("int4")):
        pytest.skip(reason)
    with_int8 = kind.get("kv_cache_dtype") == "int8"
    if with_int8 and (reason := obstacle(64, torch.int8, torch.device("cpu"))):
        pytest.skip(reason)
    if with_int8 and (reason := bfloat16_obstacle()):
        pytest.skip(reason)
    settings: dict[str, Any] = {
        "batching_mode": "sequential",
        "kv_cache_backend": "none",
        "max_seq_len": 512,
    }
    with LLM(**kind, **settings) as llm:
        runner: Any = llm.core.runner
        held = runner.model.embedding.dtype
        assert held == (torch.float32 if bfloat16_obstacle() else torch.bfloat16)
        cache = runner.caches[0]
        assert (cache.dtype == torch.int8) == with_int8
        return run(llm)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"batching_mode": "sequential", "kv_cache_backend": "slotted"}, marks=pytest.mark.slow
        ),
        pytest.param({"max_batch_size": 8}, marks=pytest.mark.slow),
        pytest.param({"batching_mode": "static", "max_batch_size": 3}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 7}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 1, "page_size": 1},
        pytest.param({"page_size": 5, "num_threads": 2}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_backend": "slotted", "max_batch_size": 4}, marks=pytest.mark.slow),
        {"page_size": 4, "max_seq_len": 128, "kv_cache_pages": 41},
    ],
    ids=str,
)
def test_bitwise_as_alone(settings: dict[str, Any], alone: tuple[dict[str, Any], Result]) -> None:
    kind, wanted = alone
    if kind.get("kv_cache_dtype") == "int8":  # in whole strips
        sizes = {1: 16, 5: 48, 4: 16}
        settings = settings | {k: sizes[v] for k, v in settings.items() if k == "page_size"}
        settings = {k: v // 4 - 1 if k == "kv_cache_pages" else v for k, v in settings.items()}
    with LLM(**{"max_seq_len": 512, **kind, **settings}) as llm:
        assert run(llm) == wanted
        assert run(llm, order=[5, 2, 7, 0, 4, 1, 6, 3]) == wanted  # warm, and in another order
        stats = llm.stats()
        if "kv_cache_pages" in settings:
            assert stats["num_preemptions"] > 0
        if settings.get("kv_cache_backend") is None:
            assert stats["num_cached_tokens"] > 0


def test_blocks_of_a_gguf_file_in_chunks_and_preempted(gguf_file: Path) -> None:
    kind = {"model": str(gguf_file), "kv_cache_dtype": "model"}
    wanted = result_of(kind)
    assert any(len(set(tokens)) > 3 for tokens, _ in wanted)
    small: dict[str, Any] = {
        "page_size": 4,
        "max_seq_len": 128,
        "kv_cache_pages": 41,
        "max_num_batched_tokens": 50,
    }
    with LLM(**kind, **small) as llm:
        assert run(llm) == wanted
        assert llm.stats()["num_preemptions"] > 0


def test_int8_and_int4_are_other_models_than_bfloat16() -> None:
    """Their log-probabilities are close but not equal, so the layers do compute in int8."""
    results = []
    dtypes = [each for each in ("int8", "int4") if quantization_obstacle(each) is None]
    for dtype in ("auto", *dtypes):
        with LLM(dtype=dtype, max_seq_len=512) as llm:
            one = params(0).replace(temperature=0.0, logprobs=0, max_tokens=1)
            output = llm.generate([PROMPTS[0]], one, use_tqdm=False)[0]
            assert output.logprobs is not None
            results.append(output.logprobs[0].logprob)
    assert len(set(results)) == len(results) > 1
    assert results == pytest.approx([results[0]] * len(results), abs=0.3)
