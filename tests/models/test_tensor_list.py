"""Tests of the list of a decoder's tensors: it has what decoders of all families take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.engine.build.memory_plan import count_weights
from infer.engine.build.processors import Cpu
from infer.kernels.blocks import BlockWeight
from infer.kernels.invariance import linears
from infer.kernels.linear.native_linear import NativeLinear, PackedEmbedding
from infer.kernels.native import native_obstacle
from infer.models.arrangement import stored_rows
from infer.models.gguf_file import GGUFFile
from infer.models.model import build_model
from infer.models.registry import parse_model_config, read_model_config
from infer.models.tensor_list import tensors_of
from infer.models.weights import HeldWeights, WeightSource, open_checkpoint
from tests.support.checkpoints import make_model, write_checkpoint, written_config
from tests.support.gguf_files import Q, write
from tests.support.model_shapes import SHAPES

CASES = [(family, shape) for family, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_it_has_what_a_decoder_takes(family: str, shape: str) -> None:
    config = parse_model_config(written_config(family, **SHAPES[family][shape]), "it")
    taken: Counter[tuple[str, tuple[int, ...]]] = Counter()
    products: Counter[tuple[frozenset[str], bool]] = Counter()

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        taken[name, shape] += 1
        return torch.empty(shape, device="meta")

    def blocks(parts: Mapping[str, tuple[int, int]], gated: bool) -> list[BlockWeight] | None:
        products[frozenset(parts), gated] += 1
        return None

    source = WeightSource(
        (), read, dtype=torch.float32, device=torch.device("meta"), complete=False
    )
    build_model(config, source.with_layers(None, blocks=blocks), 1)
    tensors, rows = tensors_of(config), stored_rows(config)
    shapes = [tensors.embedding, *tensors.others.items()]
    shapes += [part for each in tensors.products for part in each.weights.items()]
    assert taken == Counter((rows(name).name, shape) for name, shape in shapes)
    stored = [(frozenset(rows(n).name for n in each.weights), each) for each in tensors.products]
    stored_names = {frozenset([rows(tensors.embedding[0]).name]): False}
    assert products == Counter(
        [(names, each.gated and len(names) > 1) for names, each in stored]
        + list(stored_names.items())
    )


WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_are_those_that_are_held(
    quantization: str | None, tied: bool, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "llama", **WIDE, tie_word_embeddings=tied)
    config = read_model_config(tmp_path)
    source = open_checkpoint(tmp_path, torch.bfloat16, torch.device("cpu"))
    model = build_model(config, source.with_layers(quantization), 16)
    embedding = model.embedding  # type: ignore[attr-defined]
    assert isinstance(embedding, PackedEmbedding) == (tied and quantization is None)
    apart = 0 if isinstance(embedding, PackedEmbedding) else embedding.nbytes
    held = apart + _packed_bytes(model)
    planned = count_weights(config, "bfloat16", Cpu(), quantization)
    assert planned.num_bytes == pytest.approx(held, rel=0.02)


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
def test_the_bytes_of_blocks(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", make_model("llama", **WIDE), Q.Q2_K, Q.Q6_K)
    file = GGUFFile(tmp_path / "m.gguf")
    source = file.source(torch.bfloat16, torch.device("cpu"))
    model = build_model(file.config, source.with_layers(None, blocks=file.block_reader()), 16)
    embedding = model.embedding  # type: ignore[attr-defined]
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.packed is not None
    held = embedding.packed.nbytes + _packed_bytes(model)
    reader = file.block_reader(planned=True)
    planned = count_weights(file.config, "bfloat16", Cpu(), None, reader)
    assert planned.num_bytes == pytest.approx(held, rel=0.02)
    assert planned.block_forms == ["in the file's own Q2_K, Q6_K"]


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
def test_what_is_rounded_is_said(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", make_model("llama", **WIDE), Q.IQ4_XS, Q.Q6_K)
    file = GGUFFile(tmp_path / "m.gguf")
    reader = file.block_reader(planned=True)
    parts = {"blk.0.attn_q.weight": (256, 256), "output.weight": (1024, 256)}
    found = reader(parts, True)
    assert found is not None  # panels of a gate cannot be of both types
    held = [(each.kind, each.stored) for each in found if isinstance(each, BlockWeight)]
    assert held == [("Q8_0", "IQ4_XS"), ("Q8_0", "Q6_K")]

    def one_in_others(parts: Mapping[str, tuple[int, int]], gated: bool) -> HeldWeights | None:
        found = reader(parts, gated)
        if found is None or not gated:
            return found
        kinds = zip(found, ("IQ4_NL", "IQ3_S"), strict=True)
        return [BlockWeight("Q8_0", each.shape, None, stored) for each, stored in kinds]

    assert count_weights(file.config, "bfloat16", Cpu(), None, one_in_others).block_forms == [
        "in the file's own IQ4_XS, Q6_K",
        "IQ4_NL held as Q8_0",
        "IQ3_S held as Q8_0, rounded",
    ]


def _packed_bytes(model: object) -> int:
    layers = list(linears(model))
    assert all(isinstance(layer, NativeLinear) for layer in layers)
    unique = {
        layer.packed.data_ptr(): layer.packed for layer in layers if isinstance(layer, NativeLinear)
    }
    return sum(packed.nbytes for packed in unique.values())
