"""Quantised safetensors: each layout's numbers, as what they are held, and what is refused.

The files are made by `tests.support.quantized_files`, which shares no code with the readers. The
truth is transformers' model with the numbers that the file means.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer import LLM, SamplingParams
from infer.config import EngineConfig
from infer.engine.build.checkpoint import find_checkpoint
from infer.engine.build.memory_plan import make_plan
from infer.engine.build.planner import plan_for
from infer.errors import LoadError
from infer.kernels.blocks import ZEROED, BlockWeight, packed_bytes
from infer.kernels.int8_weight import Int8Weight
from infer.kernels.invariance import batch_invariance_problem, linears
from infer.kernels.linear.native_linear import NativeLinear, PackedEmbedding
from infer.kernels.native import native_obstacle
from infer.models.quantized_config import FILES, METHODS, REFUSED
from infer.models.quantized_layouts import LAYOUTS
from infer.models.registry import parse_model_config
from tests.support.cases import one_of, over
from tests.support.checkpoints import make_model, written_config
from tests.support.parity import WAYS, Bench
from tests.support.quantized_files import (
    FORMATS,
    Format,
    compressed,
    gptq,
    matrices,
    pack_quantized,
    w8a8,
    with_config,
    write_as,
    write_quantized,
)

TOLERANCE = 2e-4
"""Maximum difference of logits in float32, relative to their scale."""
PAGE = 16
native = pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
FAMILY_OF = {
    "W8A8": "phi3",
    "W4A16": "qwen3",
    "W4A16 with zero points": "gemma3",
    "W4A16 in another order": "phi3",
    "GPTQ": "gpt2",
    "GPTQ in another order": "gpt_neox",
    "GPTQ, 3 bits": "glm4",
    "AWQ": "qwen2",
    "FP8 in blocks": "qwen3",
    "MXFP4": "phi3",
    "nf4, doubly quantised": "gemma3",
}
"""A second family for some formats: packed projections, tied heads, biases, turned matrices."""
CASES = [*((name, "llama") for name in FORMATS), *FAMILY_OF.items()]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 2},
    "qwen3": {"tie_word_embeddings": True, "num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "tie_word_embeddings": True},
}


def written(folder: Path, name: str, family: str) -> Any:
    shape = {**SHAPES.get(family, {}), **FORMATS[name].shape}
    if family == "gpt2":
        shape |= {"n_inner": 96}
        kind = FORMATS[name]
        return write_as(folder, kind, make_model(family, **shape), family)
    return write_quantized(folder, name, family, **shape)


@functools.cache
def config_of_llama() -> str:
    return json.dumps(written_config("llama"))


def config_with(quantization: Any) -> dict[str, Any]:
    """The config of a small model that has this `quantization_config`."""
    return {**json.loads(config_of_llama()), "quantization_config": quantization}


Files = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Function that returns a folder in a format, which is written once and is not to be changed,
    and transformers' model of it. It has one layer."""

    @functools.cache
    def whole(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, write_quantized(folder, name, num_hidden_layers=1)

    return whole


def test_every_method_and_layout_has_an_example() -> None:
    assert {kind.config["quant_method"] for kind in FORMATS.values()} == METHODS.keys()
    used: set[str] = set()
    for kind in FORMATS.values():
        config = parse_model_config(config_with(dict(kind.config)), "config")
        assert config.quantization is not None
        used |= {scheme.layout for scheme in config.quantization.schemes}
        assert {scheme.held() for scheme in config.quantization.schemes} == {kind.held}
    assert used == LAYOUTS.keys()


@pytest.mark.parametrize(("name", "family"), one_of(2, CASES, first=1))
def test_the_numbers_are_those_of_the_file(name: str, family: str, tmp_path: Path) -> None:
    theirs = written(tmp_path, name, family)
    bench = Bench(tmp_path, PAGE)
    for way in ("prefill", "decode"):
        assert WAYS[way](bench.emptied("auto"), theirs) <= TOLERANCE


@native
@pytest.mark.parametrize(("name", "family"), one_of(2, CASES))
def test_what_serves_is_as_near_as_the_reference_loop(
    name: str, family: str, tmp_path: Path
) -> None:
    theirs = written(tmp_path, name, family)
    bench = Bench(tmp_path, PAGE, torch.bfloat16)
    for way in ("mixed batch", "decode"):
        served = WAYS[way](bench.emptied("auto"), theirs)
        loop = WAYS[way](bench.emptied("sdpa"), theirs)
        assert loop <= 0.25
        assert served <= 2 * loop + TOLERANCE, (served, loop)


@native
@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind.held])
def test_weights_are_held_without_rounding(
    name: str, whole_files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """What the kernels get is, number by number, what the file means. The native stack computes
    the layers: how the weights are stored is no property that it has to know."""
    caplog.set_level(logging.INFO)
    kind, (folder, theirs) = FORMATS[name], whole_files(name)
    checkpoint = find_checkpoint(str(folder))
    assert checkpoint.blocks is not None
    assert checkpoint.blocks.kinds == (kind.held,)
    checked = 0
    for module, layer in matrices(theirs, head=kind.head).items():
        shape = tuple(layer.weight.shape)
        held = checkpoint.blocks.read({f"{module}.weight": shape}, False)
        assert held is not None
        assert torch.equal(numbers(held[0]), layer.weight.double()), module
        checked += 1
    assert checked >= 7
    model: Any = Bench(folder, PAGE, torch.bfloat16, attention="auto").model
    assert model.stack is not None
    lines = [each.message for each in caplog.records if "weights held in" in each.message]
    assert len(lines) == 1
    assert f"held in {kind.held}" in lines[0]
    assert "widened" not in lines[0]


def numbers(weight: BlockWeight | Int8Weight) -> Tensor:
    """The numbers of a weight, float64: those of blocks as the `gguf` package reads them."""
    if isinstance(weight, Int8Weight):
        assert weight.rows is not None
        assert weight.scales is not None
        return (weight.rows.double() * weight.scales.double()[:, None]).float().double()
    assert weight.rows is not None
    if weight.kind in ZEROED:
        return numbers_with_zeros(weight)
    kind = gguf.GGMLQuantizationType[weight.kind]
    decoded = gguf.quants.dequantize(weight.rows, kind)
    return torch.from_numpy(np.array(decoded))[:, : weight.shape[1]].double()


def numbers_with_zeros(weight: BlockWeight) -> Tensor:
    """Those of blocks of a scale, a zero point, a byte without meaning, and codes."""
    assert weight.rows is not None
    bits, size = (int(part) for part in weight.kind[1:].split("_"))
    rows = torch.from_numpy(weight.rows).view(weight.shape[0], -1, 4 + size * bits // 8)
    scales = rows[:, :, :2].contiguous().view(torch.float16).double()
    zeros = rows[:, :, 2:3].contiguous().view(torch.int8).double()
    codes = rows[:, :, 4:]
    if bits == 4:
        halves = codes.reshape(*rows.shape[:2], -1, 16)
        codes = torch.stack([halves & 15, halves >> 4], 3).reshape(*rows.shape[:2], -1)
    found = (codes.double() - (128 if bits == 8 else 0) - zeros) * scales
    return found.view(weight.shape[0], -1)[:, : weight.shape[1]]


@native
@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind.held])
def test_a_weight_takes_the_room_of_its_file(name: str) -> None:
    """2 and 3 bits take those of 4, for which there are kernels. A scale for each output is
    repeated for 128 inputs."""
    kind = FORMATS[name]
    tensors, _ = kind.write(torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)))
    in_file = sum(tensor.nbytes for each, tensor in tensors.items() if each != "g_idx")
    config = parse_model_config(config_with(dict(kind.config)), "config")
    assert config.quantization is not None
    (scheme,) = config.quantization.schemes
    held = scheme.held(1024)
    if held in (None, "int8"):
        return
    limit = 1.05 if scheme.inputs or scheme.bits > 4 else 1.06
    limit *= max(1, 4.5 / (scheme.bits + 0.5))
    assert packed_bytes([held] * 2, 1024) <= limit * in_file, (held, in_file)


@native
@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind.held])
def test_int4_keeps_what_has_4_bits(name: str, whole_files: Files) -> None:
    folder, _ = whole_files(name)
    held, has_8_bits = FORMATS[name].held, FORMATS[name].held in ("int8", "Q8_0", "U8_128")
    products = plan_for(EngineConfig(model=str(folder), device="cpu", dtype="int4")).products
    assert held is not None
    assert (f"in the file's own {held}" in products) == (not has_8_bits)
    assert ("blocks of 4 bits" in products) == has_8_bits


@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if not kind.held])
def test_what_is_widened_is_said_in_one_line(
    name: str, whole_files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """And the native stack computes the layers."""
    caplog.set_level(logging.INFO)
    model: Any = Bench(whole_files(name)[0], PAGE, torch.bfloat16, attention="auto").model
    assert (model.stack is not None) == (native_obstacle() is None)
    lines = [each.message for each in caplog.records if "widened" in each.message]
    assert len(lines) == 1
    assert "7 weights widened to bfloat16 (" in lines[0]
    assert lines[0].startswith(FORMATS[name].config["quant_method"])


@native
@pytest.mark.parametrize(
    "name", ["W8A8", "W4A16", "GPTQ with zero points", "AWQ, groups of 128", "FP8 in blocks"]
)
def test_a_row_is_the_same_in_any_company(name: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, name)
    bench = Bench(tmp_path, PAGE, torch.bfloat16, attention="auto")
    assert batch_invariance_problem(bench.model) is None
    prompts = ["one", "two three", "four " * 20]
    together = LLM(str(tmp_path))
    try:
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
        answers = together.generate(prompts, params)
        alone = [together.generate([prompt], params)[0] for prompt in prompts]
        assert [each.text for each in answers] == [each.text for each in alone]
    finally:
        together.close()


@native
@pytest.mark.parametrize("name", ["W8A8", "W4A16", "W4A16, groups of 128", "AWQ"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama"])
def test_the_plan_counts_what_is_held(name: str, family: str, tmp_path: Path) -> None:
    """Bytes within 2 %, from the config and headers, and from the config alone."""
    kind = FORMATS[name]
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    write_as(tmp_path, kind, make_model(family, **shape), family)
    config = EngineConfig(model=str(tmp_path), max_seq_len=64)
    checkpoint = find_checkpoint(str(tmp_path))
    plan = make_plan(config, checkpoint.config, "m", blocks=checkpoint.blocks)
    assert kind.held is not None
    assert kind.held in plan.products
    model: Any = Bench(tmp_path, PAGE, torch.bfloat16, attention="auto").model
    held = sum(each.packed.nbytes for each in linears(model) if isinstance(each, NativeLinear))
    rest = load_file(tmp_path / "model.safetensors")
    ends = ["norm.weight"]
    if not isinstance(model.embedding, PackedEmbedding):  # else it is the head's memory
        ends.append("embed_tokens.weight")
    held += sum(tensor.nbytes for key, tensor in rest.items() if key.endswith(tuple(ends)))
    assert plan.weight_bytes == pytest.approx(held, rel=0.02)
    (tmp_path / "model.safetensors").unlink()
    alone = find_checkpoint(str(tmp_path))
    of_config = make_plan(config, alone.config, "m", blocks=alone.blocks)
    assert of_config.weight_bytes == plan.weight_bytes
    assert of_config.num_parameters == plan.num_parameters


def test_layers_that_are_left_alone_stay_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Several groups, patterns, and layers that only the tensors show to be left alone."""
    caplog.set_level(logging.INFO)
    model = make_model("llama", num_hidden_layers=2, intermediate_size=96)
    eight, four = FORMATS["W8A8"].config, FORMATS["W4A16"].config
    groups = {
        "group_0": {
            **eight["config_groups"]["group_0"],
            "targets": [r"re:.*self_attn.*"],
            "format": "int-quantized",
        },
        "group_1": {**four["config_groups"]["group_0"], "format": "pack-quantized"},
    }
    config = {**four, "config_groups": groups, "format": "mixed-precision"}
    config["ignore"] = ["lm_head", "model.layers.1.mlp.down_proj"]

    def write(weight: Tensor) -> Any:
        return pack_quantized(4, 32)(weight)

    write_as(tmp_path / "four", Format(config, write), model)
    write_as(tmp_path / "eight", Format(config, w8a8), model)
    plain = {name: layer.weight for name, layer in matrices(model, head=False).items()}
    four_bits = load_file(tmp_path / "four" / "model.safetensors")
    eight_bits = load_file(tmp_path / "eight" / "model.safetensors")
    mixed = {
        name: tensor
        for name, tensor in four_bits.items()
        if "self_attn" not in name and "layers.1.mlp.down_proj" not in name
    }
    mixed |= {name: tensor for name, tensor in eight_bits.items() if "self_attn" in name}
    left = "model.layers.1.mlp.down_proj"
    mixed[f"{left}.weight"] = plain[left].bfloat16()
    save_file(mixed, tmp_path / "four" / "model.safetensors")
    bench = Bench(tmp_path / "four", PAGE, attention="auto")
    assert WAYS["prefill"](bench, model) <= 0.2
    if native_obstacle() is None:
        Bench(tmp_path / "four", PAGE, torch.bfloat16, attention="auto")
        assert "8 weights held in int8" in caplog.text
        assert "5 weights held in Q4_0" in caplog.text


def test_a_layer_of_two_forms_is_widened_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    theirs = write_quantized(tmp_path, "W8A8", num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj"
    codes, scale = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale")
    tensors[f"{name}.weight"] = (codes.float() * scale.float()).bfloat16()
    theirs.get_submodule(name).weight.data = tensors[f"{name}.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    assert WAYS["prefill"](Bench(tmp_path, PAGE, attention="auto"), theirs) <= TOLERANCE
    if native_obstacle() is None:
        caplog.clear()
        Bench(tmp_path, PAGE, torch.bfloat16, attention="auto")
        assert "4 weights held in int8" in caplog.text
        assert "2 weights widened to bfloat16" in caplog.text


@native
def test_scales_beyond_float16_are_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    theirs = write_quantized(tmp_path, "W4A16", num_hidden_layers=1)
    name = "model.layers.0.mlp.down_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{name}.weight_scale"][:] = 2.0**-30
    theirs.get_submodule(name).weight.data.zero_()
    save_file(tensors, tmp_path / "model.safetensors")
    assert WAYS["prefill"](Bench(tmp_path, PAGE, attention="auto"), theirs) <= TOLERANCE
    caplog.clear()
    Bench(tmp_path, PAGE, torch.bfloat16, attention="auto")
    assert "1 weights widened to bfloat16 (their scales are no numbers of float16)" in caplog.text


def test_a_gptq_file_whose_zeros_are_not_in_the_middle_is_read_as_stored(tmp_path: Path) -> None:
    """`sym` is what a tool was asked for; the file's zero points decide."""
    kind = with_config(FORMATS["GPTQ with zero points"], sym=True)
    theirs = write_as(tmp_path, kind, make_model("llama", intermediate_size=96))
    assert WAYS["prefill"](Bench(tmp_path, PAGE, attention="auto"), theirs) <= TOLERANCE
    if native_obstacle() is None:
        served = Bench(tmp_path, PAGE, torch.bfloat16, attention="auto")
        assert WAYS["prefill"](served, theirs) <= 0.1


def test_dynamic_bits_of_gptq(tmp_path: Path) -> None:
    config = {
        **FORMATS["GPTQ"].config,
        "dynamic": {r"-:.*\.o_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 16}},
    }
    theirs = make_model("llama", intermediate_size=96)
    write_as(tmp_path, Format(config, gptq(4, 32)), theirs)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, layer in matrices(theirs, head=False).items():
        if name.endswith(("o_proj", "down_proj")):
            for each in ("qweight", "qzeros", "scales", "g_idx"):
                del tensors[f"{name}.{each}"]
        if name.endswith("o_proj"):
            layer.weight.data = layer.weight.data.bfloat16().float()
            tensors[f"{name}.weight"] = layer.weight.data.bfloat16()
        elif name.endswith("down_proj"):
            parts, meant = gptq(8, 16)(layer.weight.data)
            layer.weight.data = meant.float()
            tensors |= {f"{name}.{each}": part.contiguous() for each, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert WAYS["prefill"](Bench(tmp_path, PAGE, attention="auto"), theirs) <= TOLERANCE


@pytest.mark.parametrize(("file", "method"), FILES.items())
def test_configs_of_older_tools_lie_beside_the_file(file: str, method: str, tmp_path: Path) -> None:
    name = {"gptq": "GPTQ", "awq": "AWQ", "modelopt": "GPTQ"}[method]
    theirs = write_quantized(tmp_path, name)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    fields = dict(raw.pop("quantization_config"))
    fields.pop("quant_method")
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    if method == "awq":
        fields = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / file).write_text(json.dumps(fields), encoding="utf-8")
    if method in REFUSED:
        with pytest.raises(LoadError, match=f"quant_method '{method}' is not supported; take"):
            Bench(tmp_path)
        return
    assert WAYS["prefill"](Bench(tmp_path, PAGE, attention="auto"), theirs) <= TOLERANCE


def test_the_text_part_has_its_config_outside_or_inside(tmp_path: Path) -> None:
    raw = make_model("gemma3_vl").config.to_dict()
    raw["architectures"] = ["Gemma3ForConditionalGeneration"]
    config = dict(FORMATS["W4A16"].config)
    outside = {**raw, "quantization_config": config}
    inside = {**raw, "text_config": {**raw["text_config"], "quantization_config": config}}
    old = {**raw, "compression_config": {"quantization_config": config}}
    for each in (outside, inside, old):
        found = parse_model_config(each, "config.json")
        assert found.quantization is not None
        assert [scheme.held() for scheme in found.quantization.schemes] == ["Q4_0"]


BAD_CONFIGS: dict[str, tuple[Any, str]] = {
    **{
        name: ({"quant_method": name}, f"quant_method '{name}' is not supported; {instead}")
        for name, instead in REFUSED.items()
    },
    "unknown": ({"quant_method": "magic"}, "'magic' is not supported; take a file of one of"),
    "no method": ({"bits": 4}, "quant_method must be one of compressed-tensors"),
    "no object": ("4 bits", "quantization_config must be a JSON object, not '4 bits'"),
    "GPTQ bits": (by := {**FORMATS["GPTQ"].config, "bits": 5}, "bits=5 is not supported"),
    "GPTQ marlin": ({**by, "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "GPTQ groups": ({**by, "bits": 4, "group_size": -3}, "group_size must be a number of inputs"),
    "GPTQ pattern": (
        {**by, "bits": 4, "dynamic": {"+:(a+)+$": {"bits": 8}}}, "repeats a group"
    ),
    "GPTQ no pattern": ({**by, "bits": 4, "dynamic": {"+:(": {}}}, "is no regular expression"),
    "AWQ gemv": ({**FORMATS["AWQ"].config, "version": "gemv"}, "version='gemv' is not supported"),
    "AWQ bits": ({**FORMATS["AWQ"].config, "bits": 8}, "bits=8 is not supported (supported: 4)"),
    "FP8 e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    "FP8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"
    ),
    "nf4 words": (
        {**FORMATS["nf4"].config, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"
    ),
    "sparse": (
        {**FORMATS["W4A16"].config, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format='sparse-24-bitmask'",
    ),
    "transformed": (
        {**FORMATS["W4A16"].config, "transform_config": {"config_groups": {"a": {}}}},
        "transform_config",
    ),
    "marlin": ({**FORMATS["W4A16"].config, "format": "marlin-24"}, "format='marlin-24'"),
    "bits of compressed-tensors": (
        compressed("pack-quantized", num_bits=3), "num_bits=3 is not supported (supported: 4, 8)"
    ),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
    "outputs": (
        {
            **FORMATS["W4A16"].config,
            "config_groups": {
                "g": {
                    **FORMATS["W4A16"].config["config_groups"]["group_0"],
                    "output_activations": {"num_bits": 8},
                }
            },
        },
        "output_activations are not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_is_not_supported_is_refused_by_name(name: str) -> None:
    config, message = BAD_CONFIGS[name]
    with pytest.raises(LoadError) as caught:
        parse_model_config(config_with(config), "config.json")
    assert message in str(caught.value)


def variants(value: Any) -> Iterator[Any]:
    """A JSON value with each of its parts replaced by what it must not be."""
    yield from (None, [], {}, "x", "re:(", -1, 1.5, True, 10**30, [[]], {"a": []})
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: each} for each in variants(inner))
    elif isinstance(value, list):
        yield from ([each, *value[1:]] for inner in value[:1] for each in variants(inner))


@pytest.mark.parametrize("name", FORMATS)
def test_any_config_is_read_or_refused(name: str) -> None:
    """And what is read can be planned with."""
    raw = config_with(None)
    refused: list[str] = []
    for config in variants(dict(FORMATS[name].config)):
        try:
            found = parse_model_config({**raw, "quantization_config": config}, "config.json")
        except LoadError as error:
            refused.append(str(error))
            continue
        if found.quantization is not None:
            assert str(found.quantization)
            assert all(each.held() in (None, *KINDS) for each in found.quantization.schemes)
            found.quantization.scheme("model.layers.0.mlp.down_proj")
    assert len(refused) > 5
    assert all("config.json: quantization_config" in each for each in refused)


KINDS = ("int8", "Q4_0", "Q8_0", "MXFP4", *ZEROED)
LAYER = "model.layers.0.mlp.down_proj"
Spoil = Callable[[dict[str, Tensor]], None]


def replaced(name: str, change: Callable[[Tensor], Tensor | None]) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        found = change(tensors.pop(f"{LAYER}.{name}"))
        if found is not None:
            tensors[f"{LAYER}.{name}"] = found.contiguous()

    return spoil


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        found = tensor.clone()
        found.view(-1)[0] = value
        return found

    return change


def cut(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) - 1] if tensor.ndim else tensor.new_zeros(3)


def gone(tensor: Tensor) -> None:
    return None


def extra(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.weight_secret"] = torch.ones(2)


def faults() -> dict[str, tuple[str, Spoil, str]]:
    """Every tensor of every format, missing, misshapen and of another type; and scales."""
    found: dict[str, tuple[str, Spoil, str]] = {}
    for name, kind in FORMATS.items():
        parts, _ = kind.write(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)))
        for part, tensor in parts.items():
            if part in ("input_scale", "input_global_scale"):
                continue
            where = f"{LAYER}.{part}"
            optional = part == "weight_format" or (part == "g_idx" and name != ORDERED)
            if not optional:
                found[f"{name}: no {part}"] = (name, replaced(part, gone), where.split("_scale")[0])
            if "quant_state" not in part and part != "weight_format":
                found[f"{name}: shorter {part}"] = (name, replaced(part, cut), LAYER)
                change = replaced(part, lambda each: each.to(torch.complex64))
                found[f"{name}: other {part}"] = (name, change, f"{where} is C64, should be")
            is_scale = "scale" in part or part in ("SCB", "weight.absmax", "weight.nested_absmax")
            if is_scale and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
                for value, what in ((float("nan"), "finite"), (float("inf"), "finite")):
                    found[f"{name}: {part} {value}"] = (name, replaced(part, first(value)), what)
                if part not in ("SCB", "weight.absmax"):
                    found[f"{name}: {part} 0"] = (name, replaced(part, first(0.0)), "zero")
            elif is_scale and tensor.dtype == torch.uint8 and "absmax" not in part:
                found[f"{name}: {part} 255"] = (name, replaced(part, first(255)), "not numbers")
            if "g_idx" in part:
                for value in (-1, 3, 10**6):
                    spoil = replaced(part, first(value))
                    found[f"{name}: {part} {value}"] = (name, spoil, "names groups from")
        found[f"{name}: more"] = (name, extra, "weight_secret")
    return found


ORDERED = "GPTQ in another order"
FAULTS = faults()


@pytest.fixture(scope="module")
def copied(whole_files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Function that returns a copy of such a folder, for tensors of one's own, and its tensors."""

    @functools.cache
    def folder(name: str) -> tuple[Path, dict[str, Tensor]]:
        copy = shutil.copytree(whole_files(name)[0], tmp_path_factory.mktemp("copied") / "it")
        return copy, load_file(copy / "model.safetensors")

    return folder


@over("fault", FAULTS)
def test_a_tensor_that_is_wrong_is_named(
    fault: str, copied: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is allocated for the model before it is known."""
    name, spoil, message = FAULTS[fault]
    folder, whole = copied(name)
    tensors = dict(whole)
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("a layer was made")

    monkeypatch.setattr("infer.kernels.linear.native_linear.NativeLinear.__init__", refuse)
    monkeypatch.setattr("infer.kernels.linear.onednn.PackedLinear.__init__", refuse)
    with pytest.raises(LoadError) as caught:
        Bench(folder, PAGE, torch.bfloat16, attention="auto")
    assert message in str(caught.value), caught.value


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    kind = with_config(FORMATS["GPTQ"], group_size=40)
    write_as(tmp_path, kind, make_model("llama", intermediate_size=96))
    with pytest.raises(LoadError, match="has 64 inputs, which groups of 40 do not divide"):
        Bench(tmp_path)


def test_a_weight_of_another_size_is_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, "GPTQ")
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    raw["intermediate_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(LoadError, match=r"down_proj.weight is \[64, 96\], should be \[64, 128\]"):
        Bench(tmp_path)
