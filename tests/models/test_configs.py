"""Configs of all families in the forms in which they are found.

transformers writes other keys than published files have, and files omit what has the class's
default. The configs are those of `model_shapes`, and those of transformers' classes with no field
but sizes; what each form means is what the form means that transformers writes.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import transformers

from infer.errors import LoadError
from infer.models.model_config import ModelConfig
from infer.models.registry import ARCHITECTURES, MODEL_TYPES, parse_model_config
from tests.support.cases import over
from tests.support.checkpoints import FAMILIES, VISIONS, architecture_of, written_config
from tests.support.model_shapes import SHAPES

CASES = [(family, name) for family, shapes in SHAPES.items() for name in shapes]


_written_once = functools.cache(written_config)


def in_old_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """The same in the keys of published files."""
    if isinstance(text := fields.get("text_config"), dict):
        return {**fields, "text_config": in_old_keys(text)}
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict):
        return fields
    old = {key: value for key, value in fields.items() if key != "rope_parameters"}
    local = rope.get("sliding_attention")
    spec = dict(rope["full_attention"] if local else rope)
    old["rope_theta"] = spec.pop("rope_theta")
    if local and fields["model_type"].startswith("gemma3"):
        old["rope_local_base_freq"] = local["rope_theta"]
    if "partial_rotary_factor" in spec:
        old["partial_rotary_factor"] = spec.pop("partial_rotary_factor")
    if fields["model_type"] == "gpt_neox":
        old["rotary_emb_base"] = old.pop("rope_theta")
        old["rotary_pct"] = old.pop("partial_rotary_factor")
    kind = spec.pop("rope_type")
    if kind != "default":
        old["rope_scaling"] = {"rope_type" if local else "type": kind, **spec}
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    return old


@over("case", CASES)
def test_old_keys_mean_the_same(case: tuple[str, str]) -> None:
    """transformers reads the old keys, too, and writes them anew."""
    family, name = case
    old = in_old_keys(written_config(family, **SHAPES[family][name]))
    kind = getattr(transformers, f"{FAMILIES[family][0]}Config")
    theirs = {**kind.from_dict(copy.deepcopy(old)).to_dict(), "architectures": old["architectures"]}
    assert parse_model_config(old, "old") == parse_model_config(theirs, "new")


BARE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
HEADS = ("num_attention_heads", "num_key_value_heads")
OTHERS = (
    *("n_embd", "n_head", "n_layer", "num_heads", "num_layers", "shared_intermediate_size"),
    *("d_model", "n_heads", "n_layers"),
)


def class_default(family: str, **given: Any) -> tuple[dict[str, Any], ModelConfig]:
    """(the sizes that a class has by default, the config that the class means)."""
    kind = getattr(transformers, f"{FAMILIES[family][0]}Config")
    more = {"layer_types": ["full_attention"] * 32, "num_local_experts": 0}
    fields = kind(**(more if family == "granite_hybrid" else {}), **given).to_dict()
    fields["architectures"] = [architecture_of(family)]
    names = (*BARE, *HEADS, *OTHERS)
    sizes = {name: fields[name] for name in names if name in fields}
    sizes["architectures"] = fields["architectures"]
    return sizes | (more if family == "granite_hybrid" else {}), parse_model_config(fields, "class")


def read_or_refusal(fields: dict[str, Any]) -> ModelConfig | str:
    """What a config means, or why it is refused."""
    try:
        return parse_model_config(fields, "it")
    except LoadError as error:
        return str(error)


TEXTS = [family for family in FAMILIES if family not in VISIONS]


@pytest.mark.parametrize("family", TEXTS)
def test_a_field_that_is_absent_has_the_value_of_the_class(family: str) -> None:
    sizes, theirs = class_default(family)
    assert parse_model_config(sizes, "sizes alone") == theirs
    for name in set(sizes) & {*BARE, *HEADS, *OTHERS}:
        some = {key: value for key, value in sizes.items() if key != name}
        found = read_or_refusal(some)
        assert name in found if isinstance(found, str) else found == theirs, name


@pytest.mark.parametrize("family", TEXTS)
def test_heads_of_keys_that_are_absent_are_as_many_as_in_the_class(family: str) -> None:
    """Not as many as of queries, unless the class says so; null is what it is in the class."""
    heads = class_default(family)[0].get("num_attention_heads")
    if heads is None:
        return
    try:
        sizes, theirs = class_default(family, num_attention_heads=2 * heads)
    except LoadError:  # neither would fit
        return
    absent = {key: value for key, value in sizes.items() if key != "num_key_value_heads"}
    assert parse_model_config(absent, "absent").num_kv_heads == theirs.num_kv_heads
    kind = getattr(transformers, f"{FAMILIES[family][0]}Config")
    try:
        null = kind(num_attention_heads=2 * heads, num_key_value_heads=None).num_key_value_heads
    except Exception:  # the class takes no null
        null = None
    if null is not None:
        found = parse_model_config({**absent, "num_key_value_heads": None}, "null").num_kv_heads
        assert found == null


@pytest.mark.parametrize("family", FAMILIES)
def test_the_architecture_may_be_absent(family: str) -> None:
    fields = copy.deepcopy(_written_once(family))
    del fields["architectures"]
    assert parse_model_config(fields, "it").architecture == architecture_of(family)


def test_every_row_has_a_model_type() -> None:
    assert set(MODEL_TYPES.values()) == set(ARCHITECTURES)


FOREIGN = {
    "clip_qkv": 8.0,
    "logit_scale": 0.75,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
    "num_local_experts": 8,
    "num_experts": 64,
    "use_parallel_residual": True,
    "qk_layernorm": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.25,
    "attn_logit_softcapping": 50.0,
    "alibi": True,
    "kv_lora_rank": 512,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "query_pre_attn_scalar": 96,
    "rotary_dim": 6,
    "q_lora_rank": 64,
    "attention_chunk_size": 8192,
    "layer_rope_theta": [0, 1e4],
    "no_rope_layers": [0, 1, 1, 0],
    "scale_attn_by_inverse_layer_idx": True,
    "attn_output_gate": True,
    "new_decoder_architecture": True,
    "attn_temperature_tuning": True,
    "apply_residual_connection_post_layernorm": True,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 64,
    "position_embedding_type": "alibi",
}
"""Fields that change the mathematics of some family."""


@pytest.mark.parametrize("family", FAMILIES)
@over("name", FOREIGN)
def test_a_field_of_another_family_is_honoured_or_refused(family: str, name: str) -> None:
    """It is never ignored: the config is another one, or the field is named."""
    fields = copy.deepcopy(_written_once(family))
    inner = fields.get("text_config", fields)
    before = parse_model_config(fields, "it")
    inner[name] = FOREIGN[name]
    rope = inner.get("rope_parameters")
    if name in ("partial_rotary_factor", "rotary_pct") and isinstance(rope, dict):
        rope.pop("partial_rotary_factor", None)
    found = outcome(fields)
    names = (name, "partial_rotary_factor")
    ignored = found == before and before.rope.rotary_size is None
    assert not ignored
    assert not isinstance(found, str) or any(each in found for each in names)


def outcome(fields: dict[str, Any]) -> ModelConfig | str:
    """What a config means, or why it is refused."""
    try:
        return parse_model_config(fields, "it")
    except LoadError as error:
        return str(error)


NEEDS = {
    "Qwen3MoeForCausalLM": ("it needs a mixture of experts,", "near it: Qwen3ForCausalLM"),
    "Qwen3_5ForCausalLM": ("it needs a recurrent state,", "near it: Qwen3ForCausalLM"),
    "DeepseekV3ForCausalLM": ("it needs latent attention and a mixture of experts,",),
    "BertModel": ("it needs an encoder,",),
    "T5ForConditionalGeneration": ("it needs an encoder,",),
    "LLamaForCausalLm2": ("is not supported (near it: LlamaForCausalLM",),
    "FooBarModel": ("'FooBarModel' is not supported (`infer models` lists the",),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_refusal_says_what_is_needed_and_what_is_near(name: str) -> None:
    with pytest.raises(LoadError) as caught:
        parse_model_config({"architectures": [name]}, "it")
    for text in NEEDS[name]:
        assert text in str(caught.value)
