"""Tests of GGUF files whose weights stay in their own blocks.

The reference is transformers' model with exactly the weights of the file, dequantised by the
package, in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from infer import LLM, SamplingParams
from infer.config import EngineConfig
from infer.engine.build.assemble import plan_for
from infer.kernels.invariance import linears
from infer.kernels.linear import BlockEmbedding, NativeLinear, native_obstacle
from infer.models.gguf_file import GGUFFile
from tests.support.checkpoints import make_model
from tests.support.gguf_files import dense_logits, write, write_gpt2
from tests.support.parity import deviation, reference, tokens_of

pytestmark = pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
CASES: dict[str, tuple[str, Q, Q | None, dict[str, Any]]] = {
    "Q8_0": ("llama", Q.Q8_0, None, {}),
    "Q4_0": ("llama", Q.Q4_0, Q.Q6_K, {}),
    "Q4_K, as Q4_K_M": ("llama", Q.Q4_K, Q.Q6_K, {}),
    "Q5_K, tied": ("llama", Q.Q5_K, None, {"tie_word_embeddings": True}),
    "Q6_K": ("qwen3", Q.Q6_K, Q.F16, {}),
    "Q5_0, which is converted": ("qwen2", Q.Q5_0, None, {}),
    "gemma3, tied": ("gemma3", Q.Q8_0, None, {"query_pre_attn_scalar": 24}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    """They are as near to float32's as those of the same weights in bfloat16, or twice as far."""
    arch, kind, head, shape = CASES[case]
    theirs = write(tmp_path / "m.gguf", arch, make_model(arch, **{**WIDE, **shape}), kind, head)
    file, tokens = GGUFFile(tmp_path / "m.gguf"), tokens_of(150)
    exact = reference(theirs, tokens)
    own = deviation(dense_logits(file, tokens, torch.bfloat16, in_blocks=True), exact)
    rounded = deviation(dense_logits(file, tokens, torch.bfloat16), exact)
    print(case, own, rounded)
    assert own <= 2 * rounded + 0.01


def test_gpt2(tmp_path: Path) -> None:
    theirs = write_gpt2(tmp_path / "m.gguf", make_model("gpt2"), Q.Q8_0)
    tokens = tokens_of(60)
    ours = dense_logits(GGUFFile(tmp_path / "m.gguf"), tokens, torch.bfloat16, in_blocks=True)
    assert deviation(ours, reference(theirs, tokens)) <= 0.03


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    write(path, "llama", make_model("llama", **WIDE), Q.Q4_K, Q.Q6_K)
    return path


def test_blocks_are_kept_by_default(mixed: Path) -> None:
    with LLM(str(mixed), max_seq_len=128) as llm:
        runner: Any = llm.core.runner
        model = runner.model
        assert isinstance(model.embedding, BlockEmbedding)
        assert {type(layer) for layer in linears(model)} == {NativeLinear}
        assert model.stack is not None
        (answer,) = llm.generate(["abc"], SamplingParams(max_tokens=8, temperature=0))
        assert len(answer.token_ids) == 8
    held = sum(layer.packed.nbytes for layer in linears(model)) + model.embedding.packed.nbytes
    assert held <= 1.1 * mixed.stat().st_size
    plan = plan_for(EngineConfig(model=str(mixed), device="cpu"))
    assert held <= plan.weight_bytes <= held + 20_000
    assert "in the file's own Q4_K, Q6_K" in plan.products


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_dtype_overrides_them(dtype: Any, mixed: Path) -> None:
    plan = plan_for(EngineConfig(model=str(mixed), device="cpu", dtype=dtype))
    assert "own" not in plan.products
    assert plan.weight_bytes > 1.3 * mixed.stat().st_size
    with LLM(str(mixed), max_seq_len=64, dtype=dtype) as llm:
        runner: Any = llm.core.runner
        assert isinstance(runner.model.embedding, torch.Tensor)
