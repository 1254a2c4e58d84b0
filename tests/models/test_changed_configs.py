"""Each value of a family's config.json becomes something else: it is read, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.errors import LoadError
from infer.models.registry import parse_model_config
from infer.models.tensor_list import tensors_of
from tests.support.checkpoints import FAMILIES, architecture_of, make_config
from tests.support.json_changes import changes_of

QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
    "mxfp4": {"modules_to_not_convert": ["a"]},
    "compressed-tensors": {
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                },
                "input_activations": None,
            }
        },
    },
}


def config_of(family: str) -> Any:
    config = json.loads(make_config(family).to_json_string())
    return {**config, "architectures": [architecture_of(family)]}


def is_read(raw: Any) -> bool:
    """Whether a config is read; otherwise it is refused."""
    try:
        tensors_of(parse_model_config(raw, "config.json"))
    except LoadError:
        return False
    return True


def walk(raw: Any, changes: list[Any], told: str) -> None:
    assert is_read(raw)
    for change in changes:
        if isinstance(change, dict):
            try:
                is_read(change)
            except Exception as error:
                error.add_note(f"{told}: {json.dumps(change)}")
                raise


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_config_is_read_or_refused(family: str, every: int) -> None:
    raw = config_of(family)
    first = sum(map(ord, family)) % every
    walk(raw, [*changes_of(raw)][first::every], family)


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_changed_quantization_is_read_or_refused(method: str) -> None:
    said = {"quant_method": method, **QUANTIZED[method]}
    raw = config_of("llama")
    changes = [{**raw, "quantization_config": change} for change in changes_of(said)]
    walk(raw, changes, method)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("mistral3", {"text_config": {"model_type": []}}),
        ("granite_hybrid", {"layer_types": True}),
        ("gpt_neo", {"attention_types": [[["global", []], 1]]}),
        ("gpt_neo", {"attention_types": [[["global"], 2**70]]}),
        ("gpt_neo", {"attention_types": [[[], 2**70]]}),
        ("gpt_neo", {"attention_types": 5}),
    ],
)
def test_what_was_no_load_error(family: str, changed: dict[str, Any]) -> None:
    raw = config_of(family)
    for name, value in changed.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    assert not is_read(raw)
