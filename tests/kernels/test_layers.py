"""Tests of `LayerStack`: one call for all layers gives the same bits as the decoder's own loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infer.attention.cpu import NativeBackend
from infer.attention.layout import BatchLayout
from infer.kernels import linear, loader
from infer.models.decoder import Decoder
from infer.models.model import build_model
from infer.models.registry import parse_model_config
from infer.models.weights import dummy_source
from infer.runner.kv_storage import KVStorage

CPU = torch.device("cpu")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
FAMILIES: list[dict[str, Any]] = [
    {"architectures": ["LlamaForCausalLM"]},
    {"architectures": ["Qwen2ForCausalLM"]},  # with biases
    {"architectures": ["Qwen3ForCausalLM"]},  # with head norms
    {"architectures": ["MistralForCausalLM"], "sliding_window": 20},
]


def make(family: dict[str, Any], quantization: str | None) -> Decoder:
    source = dummy_source(torch.bfloat16, CPU).with_layers(quantization)
    model = build_model(parse_model_config({**SHAPE, **family}, "test"), source, 256)
    assert isinstance(model, Decoder)
    return model


def run(model: Decoder, held: torch.dtype, *, as_stack: bool) -> list[Tensor]:
    """Results of a prompt of 70 tokens, of a second one of 17, and of a decode of both."""
    config = model.config
    storage = KVStorage(config, 16, 16, dtype=held, device=CPU)
    backend = NativeBackend(
        storage.keys,
        storage.values,
        num_heads=config.num_heads,
        scale=config.attention_scale,
        windows=[config.window(layer) for layer in range(config.num_layers)],
    )
    calls = []

    def attend(*arguments: Any) -> Tensor:
        calls.append(arguments[0])
        return backend(*arguments)

    tables = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])
    tokens = torch.arange(200) % 300
    results = []
    for spans in ([(0, 70), (0, 17)], [(70, 71), (17, 18)]):
        starts = [0, spans[0][1] - spans[0][0]]
        starts.append(starts[1] + spans[1][1] - spans[1][0])
        positions = torch.cat([torch.arange(*span) for span in spans])
        rows = torch.tensor([0] * starts[1] + [1] * (starts[2] - starts[1]))
        slots = tables[rows, positions // 16] * 16 + positions % 16
        backend.plan(BatchLayout(starts, [end for _, end in spans], slots, tables))
        results.append(model.forward(tokens[positions], positions, backend if as_stack else attend))
    assert len(calls) == (0 if as_stack else 2 * config.num_layers)
    return results


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["architectures"][0])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_stack_is_its_layers(family: dict[str, Any], quantization: str | None) -> None:
    model = make(family, quantization)
    assert model.stack is not None
    for held in (torch.bfloat16, torch.int8):
        if held == torch.int8 and loader.int8_cache_obstacle(64, 16):
            continue
        ours, theirs = (run(model, held, as_stack=as_stack) for as_stack in (True, False))
        assert all(map(torch.equal, ours, theirs))


def test_other_layers_are_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(linear.VARIABLE, "onednn")
    assert make(FAMILIES[0], None).stack is None
