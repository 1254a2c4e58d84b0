"""Writes transformers' models as quantised checkpoints, each layout by its plain definition.

Every function of `FORMATS` quantises one matrix: it returns the tensors that a file has, and the
numbers that they mean. Words are packed number by number, as the formats are defined, and by none
of the code that reads them. Scales are those of the largest number of a group, no better.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import UNCHATTED, make_model, write_tokenizer

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer behind its name, and the weight [out, in] that they mean, float64."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@dataclass(frozen=True)
class Format:
    """A way to write checkpoints."""

    config: Mapping[str, Any]
    """`quantization_config`."""
    write: Callable[[Tensor], Written]
    held: str | None = None
    """The form in which weights are held; None: they are widened."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """What the small shapes of families need."""
    head: bool = False
    """Whether the output head is quantised, too."""


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [n, m] as one stream of bits for each row, lowest bits first: int32 [n, words]."""
    width = numbers.shape[1] * bits
    stream = numbers.numpy()[:, :, None] >> np.arange(bits) & 1
    padded = np.zeros((len(numbers), -(-width // 32) * 32), dtype=np.uint8)
    padded[:, :width] = stream.reshape(len(numbers), width)
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@dataclass(frozen=True)
class Grouped:
    """Integers of a weight: those that are stored, from 0 on."""

    stored: Tensor
    """[out, in]."""
    zeros: Tensor
    """[out, groups]."""
    scales: Tensor
    """[out, groups], in their own dtype."""
    groups: Tensor
    """Of each input, [in]."""

    @property
    def numbers(self) -> Tensor:
        """What they mean."""
        offsets, scales = self.zeros[:, self.groups], self.scales.double()[:, self.groups]
        return (self.stored - offsets).double() * scales


def grouped(
    weight: Tensor,
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
) -> Grouped:
    """A weight [out, in] in integers with a scale for each group of inputs."""
    width = weight.shape[1]
    groups = torch.arange(width) // (group or width)
    if shuffled:
        groups = groups[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    most = (1 << bits) - 1
    scales, zeros = [], []
    for index in range(int(groups.max()) + 1):
        part = weight[:, groups == index].double()
        if symmetric:
            scale = part.abs().amax(1) / (1 << bits - 1)
            zero = torch.full_like(scale, 1 << bits - 1)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(1, most)
        scales.append(scale.to(dtype))
        zeros.append(zero.long())
    scale_of, zero_of = torch.stack(scales, 1), torch.stack(zeros, 1)
    stored = (weight.double() / scale_of.double()[:, groups]).round().long() + zero_of[:, groups]
    return Grouped(stored.clamp(0, most), zero_of, scale_of, groups)


def w8a8(weight: Tensor) -> Written:
    found = grouped(weight, 8, None, torch.bfloat16)
    tensors = {"weight": (found.stored - 128).to(torch.int8), "weight_scale": found.scales}
    return tensors, found.numbers


def pack_quantized(bits: int, group: int | None, **how: bool) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        found = grouped(weight, bits, group, torch.bfloat16, **how)
        tensors = {
            "weight_packed": packed(found.stored, bits),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        if not how.get("symmetric", True):
            tensors["weight_zero_point"] = packed(found.zeros.T, bits).T.contiguous()
        if how.get("shuffled"):
            tensors["weight_g_idx"] = found.groups.int()
        return tensors, found.numbers

    return write


def gptq(bits: int, group: int | None, offset: int = 1, **how: bool) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        found = grouped(weight, bits, group, torch.float16, **how)
        tensors = {
            "qweight": packed(found.stored, bits).T.contiguous(),
            "qzeros": packed((found.zeros - offset).T, bits),
            "scales": found.scales.T.contiguous(),
            "g_idx": found.groups.int(),
        }
        return tensors, found.numbers

    return write


def awq(group: int) -> Callable[[Tensor], Written]:
    def words(numbers: Tensor) -> Tensor:
        """[n, out] → [n, out / 8]"""
        each = numbers.view(len(numbers), -1, 8)[:, :, list(AWQ_ORDER)]
        return packed(each.reshape(len(numbers), -1), 4)

    def write(weight: Tensor) -> Written:
        found = grouped(weight, 4, group, torch.float16, symmetric=False)
        tensors = {
            "qweight": words(found.stored.T),
            "qzeros": words(found.zeros.T),
            "scales": found.scales.T.contiguous(),
        }
        return tensors, found.numbers

    return write


def fp8(
    sharing: str, name: str = "weight_scale", dtype: torch.dtype = torch.float32
) -> Callable[[Tensor], Written]:
    """`sharing`: block, channel or tensor."""

    def write(weight: Tensor) -> Written:
        rows, width = weight.shape
        high, wide = {"block": (32, 32), "channel": (1, width), "tensor": (rows, width)}[sharing]
        stored = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        scales = torch.zeros((-(-rows // high), -(-width // wide)), dtype=dtype)
        numbers = torch.zeros(weight.shape, dtype=torch.float64)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale = weight[at].abs().max() / 448
                if dtype == torch.float8_e8m0fnu:
                    scale = 2.0 ** scale.log2().ceil()
                scales[i, j] = scale
                stored[at] = (weight[at] / scales[i, j].float()).to(torch.float8_e4m3fn)
                numbers[at] = stored[at].double() * scales[i, j].double()
        kept = scales.flatten() if sharing == "tensor" else scales
        extra = {"input_scale": torch.ones(1)} if sharing == "tensor" else {}
        return {"weight": stored, name: kept, **extra}, numbers

    return write


def e2m1_codes(weight: Tensor) -> Tensor:
    """The nearest code of each number."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    nearest = (weight.abs().double()[..., None] - table).abs().argmin(-1)
    return nearest + 8 * (weight < 0)


def e2m1_numbers(codes: Tensor) -> Tensor:
    signs = torch.where(codes >= 8, -1.0, 1.0).double()
    return torch.tensor(E2M1, dtype=torch.float64)[codes % 8] * signs


def mxfp4(numbers: str, scales: str, *, inner: bool) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        rows, width = weight.shape
        each = weight.view(rows, -1, 32)
        power = (each.abs().amax(2, keepdim=True) / 6).log2().ceil()
        codes = e2m1_codes(each / 2.0**power)
        octets = (codes[:, :, ::2] | codes[:, :, 1::2] << 4).to(torch.uint8)
        tensors = {
            numbers: octets if inner else octets.view(rows, -1),
            scales: (power[:, :, 0] + 127).to(torch.uint8),
        }
        return tensors, (e2m1_numbers(codes) * 2.0 ** power.double()).view(rows, width)

    return write


def nvfp4(weight: Tensor) -> Written:
    rows, width = weight.shape
    whole = (448 * 6 / weight.abs().max()).float().reshape(1)
    each = weight.view(rows, -1, 16)
    scales = (each.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    steps = scales.double()[:, :, None] / whole.double()
    codes = e2m1_codes(each / steps)
    octets = (codes[:, :, ::2] | codes[:, :, 1::2] << 4).to(torch.uint8)
    tensors = {
        "weight_packed": octets.view(rows, -1),
        "weight_scale": scales,
        "weight_global_scale": whole,
        "input_global_scale": torch.ones(1),
    }
    return tensors, (e2m1_numbers(codes) * steps).view(rows, width)


def four_bits(*, nested: bool) -> Callable[[Tensor], Written]:
    """bitsandbytes' layout with a table of random numbers: the file's table decides."""

    def write(weight: Tensor) -> Written:
        table = torch.linspace(-1, 1, 16) ** 3
        flat = weight.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        tensors: dict[str, Tensor] = {"weight.quant_map": table}
        if nested:
            offset = float(absmax.mean())
            steps = torch.linspace(-1, 1, 256)
            shifted = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256))
            outer = shifted.view(-1, 256).abs().amax(1)
            codes = (shifted.view(-1, 256) / outer[:, None] + 1).mul(127.5).round().to(torch.uint8)
            absmax = (steps[codes.long()] * outer[:, None] + offset).flatten()[: len(absmax)]
            tensors |= {
                "weight.absmax": codes.flatten()[: len(absmax)].clone(),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": steps,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            tensors["weight.absmax"] = absmax
        codes = (blocks[:, :, None] / absmax[:, None, None] - table).abs().argmin(2)
        octets = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)
        tensors["weight"] = octets[: -(-len(flat) // 2), None].clone()
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text)).to(torch.uint8)
        numbers = table.double()[codes] * absmax.double()[:, None]
        return tensors, numbers.flatten()[: len(flat)].view(weight.shape)

    return write


def bytes_of_bitsandbytes(weight: Tensor) -> Written:
    most = weight.abs().amax(1)
    stored = (weight / most[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": stored, "SCB": most, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, stored.double() * most.double()[:, None] / 127


def compressed(
    name: str, *, rows: Mapping[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """The config of compressed-tensors with one group."""
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": {**usual, **weights}, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def by_gptq(bits: int, group: int | None, **more: Any) -> dict[str, Any]:
    usual = {"sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, **usual, **more}


TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_TOKEN = {**TOKEN, "type": "float"}
WIDE = {"intermediate_size": 96}
UNITS = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Widths for groups of 64 and 128, and for one scale an output in units of 128 inputs."""
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GROUP: dict[str, Any] = {"strategy": "group", "group_size": 32}
ORDERED: dict[str, Any] = {**GROUP, "actorder": "group"}
PACK = "pack-quantized"

FORMATS: dict[str, Format] = {
    "W8A8": Format(
        compressed("int-quantized", num_bits=8, rows=TOKEN), w8a8, "int8"
    ),
    "W4A16": Format(compressed(PACK, **GROUP), pack_quantized(4, 32), "Q4_0", WIDE),
    "W4A16, a scale for each output": Format(
        compressed(PACK), pack_quantized(4, None), "U4_128", UNITS
    ),
    "W4A16, groups of 64": Format(
        compressed(PACK, strategy="group", group_size=64), pack_quantized(4, 64), "U4_64", UNITS
    ),
    "W4A16, groups of 128": Format(
        compressed(PACK, strategy="group", group_size=128), pack_quantized(4, 128), "U4_128", UNITS
    ),
    "W8A16, a scale for each output": Format(
        compressed(PACK, num_bits=8), pack_quantized(8, None), "U8_128", UNITS
    ),
    "W8A16 with zero points, groups of 128": Format(
        compressed(PACK, num_bits=8, strategy="group", group_size=128, symmetric=False),
        pack_quantized(8, 128, symmetric=False), "U8_128", UNITS,
    ),
    "W4A16 with zero points": Format(
        compressed(PACK, **GROUP, symmetric=False),
        pack_quantized(4, 32, symmetric=False), "U4_32", WIDE,
    ),
    "W4A16 in another order": Format(
        compressed(PACK, **ORDERED), pack_quantized(4, 32, shuffled=True), None, WIDE
    ),
    "W4A16, groups of 16": Format(
        compressed(PACK, strategy="group", group_size=16), pack_quantized(4, 16)
    ),
    "W8A16": Format(compressed(PACK, num_bits=8, **GROUP), pack_quantized(8, 32), "Q8_0", WIDE),
    "W8A16 with zero points": Format(
        compressed(PACK, num_bits=8, **GROUP, symmetric=False),
        pack_quantized(8, 32, symmetric=False), None, WIDE,
    ),
    "FP8 of compressed-tensors": Format(
        compressed("float-quantized", num_bits=8, type="float", rows=FP8_TOKEN),
        fp8("channel", dtype=torch.bfloat16),
    ),
    "FP8 of compressed-tensors, a scale for the tensor": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor", rows=FP8_TOKEN),
        fp8("tensor", dtype=torch.bfloat16),
    ),
    "FP8 of compressed-tensors in blocks": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="block",
                   block_structure=[32, 32], rows=FP8_TOKEN),
        fp8("block"),
    ),
    "MXFP4 of compressed-tensors": Format(
        compressed("mxfp4-pack-quantized", type="float", **GROUP),
        mxfp4("weight_packed", "weight_scale", inner=False), "MXFP4", WIDE,
    ),
    "NVFP4": Format(
        compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        nvfp4,
    ),
    "GPTQ": Format(by_gptq(4, 32), gptq(4, 32), "Q4_0", WIDE),
    "GPTQ, one group": Format(by_gptq(4, None), gptq(4, None), "U4_128", UNITS),
    "GPTQ with zero points": Format(
        by_gptq(4, 32, sym=False), gptq(4, 32, symmetric=False), "U4_32", WIDE
    ),
    "GPTQ with zero points, groups of 128": Format(
        by_gptq(4, 128, sym=False), gptq(4, 128, symmetric=False), "U4_128", UNITS
    ),
    "GPTQ v2": Format(
        by_gptq(4, 32, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, 32, 0, symmetric=False), "U4_32", WIDE,
    ),
    "GPTQ in another order": Format(
        by_gptq(4, 32, desc_act=True), gptq(4, 32, shuffled=True), None, WIDE
    ),
    "GPTQ, 2 bits": Format(by_gptq(2, 32), gptq(2, 32), "Q4_0", WIDE),
    "GPTQ, 3 bits": Format(by_gptq(3, 32), gptq(3, 32), "Q4_0", WIDE),
    "GPTQ, 8 bits": Format(by_gptq(8, 32), gptq(8, 32), "Q8_0", WIDE, head=True),
    "AWQ": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq(32), "U4_32", WIDE,
    ),
    "AWQ, groups of 128": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        awq(128), "U4_128", UNITS,
    ),
    "FP8 in blocks": Format(FP8_BLOCKS, fp8("block", "weight_scale_inv")),
    "FP8 in blocks with powers of two": Format(
        {**FP8_BLOCKS, "scale_fmt": "ue8m0"},
        fp8("block", "weight_scale_inv", torch.float8_e8m0fnu),
    ),
    "FP8, a scale for each output": Format({"quant_method": "fp8"}, fp8("channel")),
    "FP8, a scale for the tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8("tensor")
    ),
    "MXFP4": Format(
        {"quant_method": "mxfp4"},
        mxfp4("weight_blocks", "weight_scales", inner=True), "MXFP4", WIDE,
    ),
    "nf4": Format(NF4, four_bits(nested=False)),
    "nf4, doubly quantised": Format(
        {**NF4, "bnb_4bit_use_double_quant": True}, four_bits(nested=True)
    ),
    "int8 of bitsandbytes": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, bytes_of_bitsandbytes
    ),
}  # fmt: skip
"""The layouts that are read, each with an example."""


def matrices(model: Any, *, head: bool) -> dict[str, Any]:
    """The modules of a model that are quantised, by their names."""
    import transformers

    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and (head or not name.endswith(("lm_head", "embed_out")))
    }


def write_quantized(
    folder: Path, name: str, family: str = "llama", *, seed: int = 0, **shape: Any
) -> Any:
    """Write a small random model in a format of `FORMATS`; returns transformers' model with the
    numbers that the file means, in float32. All other parameters are numbers of bfloat16."""
    kind = FORMATS[name]
    return write_as(folder, kind, make_model(family, seed=seed, **{**kind.shape, **shape}), family)


def write_as(folder: Path, kind: Format, model: Any, family: str = "llama") -> Any:
    """`write_quantized` of a model that is there."""
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    for name, module in matrices(model, head=kind.head and not tied).items():
        is_turned = not isinstance(module, torch.nn.Linear)
        weight = module.weight.data.T if is_turned else module.weight.data
        tensors, numbers = kind.write(weight.contiguous())
        stored = name if f"{name}.weight" in state else name.removeprefix("transformer.")
        del state[f"{stored}.weight"]
        state |= {f"{stored}.{each}": tensor.contiguous() for each, tensor in tensors.items()}
        module.weight.data = (numbers.T if is_turned else numbers).float().contiguous()
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw |= {"quantization_config": dict(kind.config), "dtype": "bfloat16"}
    raw["architectures"] = [type(model).__name__]
    if kind.head and kind.config["quant_method"] == "gptq":
        raw["quantization_config"]["lm_head"] = True
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(state, file, metadata={"format": "pt"})
    has_bos = family not in UNCHATTED and not family.startswith("qwen")
    write_tokenizer(folder, chat=False, add_bos=has_bos)
    return model


def with_config(kind: Format, **fields: Any) -> Format:
    """A format with other fields in its config."""
    return dataclasses.replace(kind, config={**kind.config, **fields})
