"""Tests of models that transformers computes on our cache (`--model-impl transformers`).

Most families here have no decoder of our own. The reference is the library's model with its own
attention and cache: logits in every way that a step may have, and greedy tokens of `generate`.
What the cache does not hold, or attention does not compute, must be refused by name.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from infer import LLM, SamplingParams
from infer.config import EngineConfig
from infer.engine.build.checkpoint import find_checkpoint
from infer.engine.build.planner import plan_for
from infer.errors import ConfigError, LoadError
from tests.support.cases import one_of
from tests.support.checkpoints import BOS_ID, EOS_ID, VOCAB_SIZE, write_checkpoint, write_tokenizer
from tests.support.parity import WAYS, Bench, reference, tokens_of

TOLERANCE = 2e-4
"""Maximum difference of logits in float32, relative to their scale, as for our own decoders."""
BF16_TOLERANCE = 0.04
"""Root mean square of the differences in bfloat16, relative to the largest logit."""

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_CAPS: Mapping[str, Any] = {
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Helium": {},
    # Windows, a cap of scores, a scale that is not 1/√D, a cap of logits.
    "VaultGemma": _CAPS,
    # One fused projection, part of each head rotates, LayerNorm, biases.
    "Persimmon": {"num_key_value_heads": 4},
    # Learned positions with an offset, scaled embeddings.
    "BioGpt": {"num_key_value_heads": 4},
    # Experts.
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # Experts, and keys that are wider than values.
    "DeepseekV3": _LATENT,
}
"""Family, most without a decoder of our own → what their config has beside `_SHAPE`."""


def write_foreign(folder: Path, family: str, **shape: Any) -> Any:
    """Let transformers write a small random checkpoint of a family; returns its model."""
    fields = {**_SHAPE, **FAMILIES.get(family, {}), **shape}
    if "qk_rope_head_dim" in fields:
        del fields["head_dim"]
    config = getattr(transformers, f"{family}Config")(**fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, chat=False)
    return model


def bench(folder: Path, dtype: torch.dtype = torch.float32) -> Bench:
    return Bench(folder, dtype=dtype, attention="auto", model_impl="transformers")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Family → (folder, transformers' model)."""

    @functools.cache
    def pair(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family)
        return folder, write_foreign(folder, family)

    return pair


Pairs = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def benches(pairs: Pairs) -> Callable[[str], Bench]:
    """Family → a bench of its model in float32, read once; its `emptied` is to be used."""
    return functools.cache(lambda family: bench(pairs(family)[0]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(pairs: Pairs, benches: Callable[[str], Bench], family: str, way: str) -> None:
    assert WAYS[way](benches(family).emptied("auto"), pairs(family)[1]) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close(pairs: Pairs, family: str) -> None:
    folder, _ = pairs(family)
    ours, tokens = bench(folder, torch.bfloat16), tokens_of(60)
    (found,) = ours.step((ours.sequence(tokens), 60))
    narrow = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    wanted = reference(narrow.eval(), tokens).float()
    scale = wanted.abs().max()
    assert ((found - wanted).pow(2).mean().sqrt() / scale).item() <= BF16_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", one_of(2, ["continuous", "static"]))
def test_greedy_tokens(pairs: Pairs, family: str, mode: str) -> None:
    """Several sequences at once, prompts in chunks, and prompts that the cache has."""
    folder, theirs = pairs(family)
    prompts = [tokens_of(n, seed=n) for n in (3, 17, 130)]
    prompts.append([*prompts[2][:100], 5, 6, 7])
    settings: Any = {"max_num_batched_tokens": 50, "max_batch_size": 2, "batching_mode": mode}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), dtype="float32", model_impl="transformers", **settings) as llm:
        outputs = llm.generate(prompts, greedy)
        alone = [llm.generate([prompt], greedy)[0] for prompt in prompts]
    for tokens, output, single in zip(prompts, outputs, alone, strict=True):
        with torch.inference_mode():
            wanted = theirs.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(tokens) :].tolist()
        assert list(output.token_ids) == list(single.token_ids) == wanted


def test_windows_scales_and_caps_are_seen(pairs: Pairs) -> None:
    """They are not read from the config; a wider mask would differ beyond 16 positions only."""
    config = find_checkpoint(str(pairs("VaultGemma")[0]), model_impl="transformers").config
    assert set(config.windows) == {16, None}
    assert (config.score_softcap, config.query_scale) == (2.0, 32**-0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_the_parameters(pairs: Pairs, family: str) -> None:
    folder, theirs = pairs(family)
    plan = plan_for(EngineConfig(model=str(folder), model_impl="transformers", dtype="float32"))
    assert plan.num_parameters == sum(each.numel() for each in theirs.parameters())
    assert plan.weight_bytes == 4 * plan.num_parameters
    assert "transformers" in plan.products


def test_the_log_names_the_slow_way_and_the_fast_one(
    pairs: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write_checkpoint(tmp_path, "llama")
    with caplog.at_level(logging.WARNING):
        ours = bench(tmp_path)
        assert "slow way; Llama" in caplog.text
        caplog.clear()
        bench(pairs("Persimmon")[0])
        assert "slow way" in caplog.text
        assert "native" not in caplog.text
    assert WAYS["mixed batch"](ours, theirs) <= TOLERANCE


def test_a_family_without_a_decoder_names_the_way(pairs: Pairs) -> None:
    folder = str(pairs("Persimmon")[0])
    with pytest.raises(LoadError, match=r"not supported.*--model-impl transformers loads"):
        find_checkpoint(folder)
    with pytest.raises(LoadError) as error:
        find_checkpoint(folder, model_impl="native")
    assert "--model-impl" not in str(error.value)


def test_a_recurrent_family_does_not_name_the_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["MambaForCausalLM"]}', encoding="utf-8"
    )
    with pytest.raises(LoadError, match="recurrent state") as error:
        find_checkpoint(str(tmp_path))
    assert "--model-impl" not in str(error.value)


def test_without_the_extra(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(pairs("Persimmon")[0])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"optional part of infer: pip install .*transformers"):
        find_checkpoint(folder, model_impl="transformers")
    with pytest.raises(LoadError, match=r"optional part of infer: pip install .*transformers"):
        find_checkpoint(folder)


@pytest.mark.parametrize(
    ("setting", "value"), [("quantization", "int8"), ("dtype", "int4"), ("load_format", "dummy")]
)
def test_settings_of_our_own_decoders_are_refused(setting: str, value: str) -> None:
    fields: Any = {setting: value}
    with pytest.raises(ConfigError, match="model_impl='transformers'") as error:
        EngineConfig(model_impl="transformers", **fields)
    assert error.value.field == setting


_SMALL: Mapping[str, Any] = {**_SHAPE, "state_size": 4}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "Mamba": (_SMALL, "MambaForCausalLM has a recurrent state"),
    "Qwen3Next": (_SMALL, "recurrent state .layers of the kind linear_attention"),
    "Lfm2": (
        {**_SMALL, "layer_types": ["conv", "full_attention", "conv"]},
        "recurrent state .layers of the kind conv",
    ),
    "T5": ({"vocab_size": VOCAB_SIZE}, "has an encoder"),
    "Bert": (_SMALL, "BertLMHeadModel.*neither causal nor a sliding window"),
    "GptOss": ({**_SMALL, "num_local_experts": 4}, "s_aux, which is not computed"),
    "XGLM": ({"vocab_size": VOCAB_SIZE, "num_layers": 2}, "does not call the attention interface"),
    "DiffLlama": (_SMALL, "3 layers and calls the attention interface 6 times"),
    "ViT": ({}, "no causal model"),
    "Helium": (
        {**_SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 2, "rope_theta": 1e4}},
        "'dynamic' depends on the longest sequence",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_computed_is_refused_by_name(family: str, tmp_path: Path) -> None:
    fields, why = REFUSED[family]
    getattr(transformers, f"{family}Config")(**fields).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=why) as error:
        find_checkpoint(str(tmp_path), model_impl="transformers")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "unheard_of"}, "transformers makes no model of it"),
        ({"architectures": ["HeliumForSequenceClassification"]}, "the causal model of this type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights"),
    ],
)
def test_odd_configs(pairs: Pairs, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    config = json.loads((pairs("Helium")[0] / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(LoadError, match=why):
        find_checkpoint(str(tmp_path), model_impl="transformers")


def test_weights_that_are_missing(pairs: Pairs, tmp_path: Path) -> None:
    _, theirs = pairs("Helium")
    tensors = dict(theirs.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    theirs.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(LoadError, match=r"1 missing keys .*layers.1.mlp.up_proj.weight"):
        bench(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_are_not_taken(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The trial finds a model that counts positions itself, though each step looks plausible."""
    from transformers.models.helium import modeling_helium

    right = modeling_helium.HeliumRotaryEmbedding.forward

    def counted(self: Any, x: Any, position_ids: Any) -> Any:
        return right(self, x, torch.arange(position_ids.shape[1], device=x.device)[None])

    monkeypatch.setattr(modeling_helium.HeliumRotaryEmbedding, "forward", counted)
    with pytest.raises(LoadError, match="does not take positions"):
        bench(pairs("Helium")[0], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_state_is_found(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A layer that looks at the token before, as convolutions and token shifts do."""
    from transformers.models.helium import modeling_helium

    right = modeling_helium.HeliumMLP.forward

    def shifted(self: Any, x: Any) -> Any:
        return right(self, x + x.roll(1, dims=1))

    monkeypatch.setattr(modeling_helium.HeliumMLP, "forward", shifted)
    with pytest.raises(LoadError, match="keeps a state that the cache does not hold"):
        bench(pairs("Helium")[0], dtype)


def test_attention_of_another_kind_is_found(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial compares with the library's own attention, here with one that has no cap."""
    from transformers.models.vaultgemma import modeling_vaultgemma

    right: Any = modeling_vaultgemma.eager_attention_forward

    def uncapped(*tensors: Any, **arguments: Any) -> Any:
        return right(*tensors, **{**arguments, "softcap": None})

    monkeypatch.setattr(modeling_vaultgemma, "eager_attention_forward", uncapped)
    with pytest.raises(LoadError, match="logits differ from those with the attention"):
        bench(pairs("VaultGemma")[0])
