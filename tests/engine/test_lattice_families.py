"""The equivalence lattice on every family: small random checkpoints, in float32.

`test_lattice` has all variants on the shipped model. This file has the strongest combinations of
them for equations that differ: windows, two RoPE tables, head norms, learned positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from tests.support.cases import slow_but
from tests.support.checkpoints import write_checkpoint
from tests.support.model_shapes import SHAPES
from tests.support.parity import tokens_of

pytestmark = pytest.mark.usefixtures("kept_templates")

BEGINNING = tokens_of(70, seed=9)
PROMPTS = [
    BEGINNING,
    [*BEGINNING, *tokens_of(21, seed=1)],
    [*BEGINNING[:50], *tokens_of(60, seed=2)],
    tokens_of(3, seed=3),
    tokens_of(130, seed=4),
    BEGINNING[:33],
]
WINDOWED = {
    "llama": "llama3 rope beyond its original length",
    "mistral": "window shorter than the prompt",
    "qwen2": "window from the second layer on",
    "qwen3": "windows by layer_types",
    "cwm": "scaled rope, own pattern",
    "gemma3": "soft-capped logits, own pattern",
    "gpt2": "plain",
    "ministral3": "plain",
    "smollm3": "windows in layers that do not rotate, biases",
    "phi3": "three quarters rotate, no window, tied",
    "granite": "all multipliers, one kv head, biases",
    "granite_swa": "a base for each layer, one kv head, untied",
    "olmo": "clipped, biases",
    "olmo3": "scaled global rope",
    "glm4": "plain",
    "exaone4": "plain",
    "helium": "tied, one kv head, biases",
    "hunyuan": "plain",
    "cohere": "q/k norms, biases",
    "cohere2": "plain",
    "starcoder2": "plain",
    "nemotron": "plain",
    "apertus": "plain",
    "gemma2": "plain",
    "vaultgemma": "no caps, one kv head, untied, own pattern",
    "falcon": "new decoder architecture",
    "bloom": "three heads, untied",
}
"""One shape of each kind of layer."""
SLOW = {
    *("llama", "qwen2", "qwen3", "smollm3", "phi3", "granite", "olmo", "exaone4", "cohere"),
    *("starcoder2", "nemotron", "mistral", "gemma2", "glm4", "hunyuan", "apertus"),
    *("ministral3", "granite_swa", "cohere2", "cwm", "helium", "vaultgemma"),
}  # their parts are in the others; a new family is not slow


def params(i: int) -> SamplingParams:
    temperature = 0.8 if i % 2 else 0
    return SamplingParams(
        temperature=temperature, top_p=0.95, seed=i, max_tokens=10, ignore_eos=True
    )


def run(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", slow_but(WINDOWED.keys() - SLOW, WINDOWED))
def test_same_tokens_in_any_company(family: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, family, **SHAPES[family][WINDOWED[family]])

    def engine(**settings: Any) -> LLM:
        return LLM(str(tmp_path), **{"dtype": "float32", "max_seq_len": 256, **settings})

    with engine(batching_mode="sequential", kv_cache_backend="none") as llm:
        alone = run(llm)
    with engine(batching_mode="sequential", enable_prefix_caching=False) as llm:
        assert run(llm) == alone
    with engine(max_batch_size=4) as llm:
        assert run(llm) == alone
        assert run(llm) == alone  # warm
        assert llm.stats()["num_cached_tokens"] > 300
    with engine(max_batch_size=6, max_num_batched_tokens=7, page_size=3) as llm:
        assert run(llm) == alone
        assert llm.stats()["num_steps"] > 40
    with engine(batching_mode="static", max_batch_size=3, kv_cache_backend="contiguous") as llm:
        assert run(llm) == alone
    config = theirs.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", getattr(config, "num_attention_heads", 0))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * 4 * config.num_hidden_layers * heads * size
    with engine(page_size=4, max_seq_len=144, kv_cache_memory_bytes=token_bytes * 180) as llm:
        assert run(llm) == alone
        assert llm.stats()["num_preemptions"] > 0
