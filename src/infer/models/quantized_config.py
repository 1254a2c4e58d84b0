"""Reads `quantization_config`: one table of readers by `quant_method`, and one of refusals.

A method without a reader is refused by name with what to take instead. Like other configs, every
field that changes what the numbers mean is honoured or refused. The module imports the standard
library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.models.model_config import ConfigReader, load_json
from infer.models.quantization import Quantization, Rule, Scheme, pattern_problem

FILES: Mapping[str, str] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files in which older tools wrote what belongs into `config.json`, each with its method."""
_MAX_GROUP = 1 << 20
_MAX_RULES = 4096


@dataclass(frozen=True)
class Method:
    """A way to quantise checkpoints."""

    read: Callable[[str, ConfigReader], Quantization]
    """Function that reads its fields: (name of the method, reader) → what they say."""
    formats: str
    """What is read, for users."""
    held: str
    """As what linear layers hold it, for users."""


def read_quantization(raw: Mapping[str, Any], problems: list[str]) -> Quantization | None:
    """What a `config.json` says about quantisation; None if it says nothing.

    All that is wrong or not supported is added to `problems`.
    """
    field = _fields(raw)
    if field is None:
        return None
    name, value = field
    if not isinstance(value, dict):
        problems.append(f"{name} must be a JSON object, not {value!r:.80}")
        return None
    reader = ConfigReader(value, name)
    method = value.get("quant_method")
    if method is None and (value.get("load_in_4bit") or value.get("load_in_8bit")):
        method = "bitsandbytes"  # transformers did not write the method once
    known = ", ".join(METHODS)
    if not isinstance(method, str):
        problems.append(f"{name}: quant_method must be one of {known}, not {method!r:.80}")
        return None
    method = method.strip().lower()
    method = {"sparseml": "compressed-tensors", "compressed_tensors": "compressed-tensors"}.get(
        method, method
    )
    if method not in METHODS:
        instead = REFUSED.get(method, f"take a file of one of {known}, or the one that is not"
                              " quantised with --dtype int8")  # fmt: skip
        problems.append(f"{name}: quant_method {method!r:.80} is not supported; {instead}")
        return None
    result = METHODS[method].read(method, reader)
    problems += [f"{name}: {problem}" for problem in reader.problems]
    return result if not reader.problems and result.schemes else None


def _fields(raw: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The name and the value of the first field that has anything to say."""
    text = raw.get("text_config")
    for place, fields in (("", raw), ("text_config.", text)):
        for name in ("quantization_config", "compression_config"):
            if isinstance(fields, Mapping) and fields.get(name):
                value = fields[name]
                inner = value.get("quantization_config") if isinstance(value, dict) else None
                return f"{place}{name}", inner if isinstance(inner, dict) and inner else value
    return None


def with_quantization_file(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the `config.json` in `folder`, with those that an older tool wrote beside it.

    `LoadError` if there is such a file and it cannot be read.
    """
    if _fields(raw) is None:
        for file, method in FILES.items():
            if (folder / file).is_file():
                fields = {"quant_method": method, **load_json(folder / file)}
                return {**raw, "quantization_config": fields}
    return raw


def _ignored(reader: ConfigReader, *names: str, prefix: str) -> list[Rule]:
    """Rules for the layers that a list of names leaves alone."""
    rules: list[Rule] = []
    for name in names:
        for pattern in _texts(reader, name):
            whole_name = pattern if pattern.startswith("re:") else f"{prefix}{pattern}"
            rules += _rule(reader, name, whole_name, None)
    return rules


def _texts(reader: ConfigReader, name: str) -> list[str]:
    value = reader.get(name, list, [])
    if any(not isinstance(text, str) for text in value) or len(value) > _MAX_RULES:
        reader.problems.append(f"{name} must be a list of at most {_MAX_RULES} names")
        return []
    return list(value)


def _rule(reader: ConfigReader, name: str, pattern: str, scheme: Scheme | None) -> list[Rule]:
    if pattern.startswith("re:") and (reason := pattern_problem(pattern[3:])):
        reader.problems.append(f"{name}: the pattern {pattern:.80} {reason}")
        return []
    return [Rule(pattern, scheme)]


def _group(reader: ConfigReader, name: str, default: Any = ...) -> dict[str, Any]:
    """`strategy` and `group` of a scheme, from a group's size; -1: all inputs of an output."""
    size = reader.get(name, int, default)
    if size in (-1, 0, None):
        return {"strategy": "channel"}
    if not 1 <= size <= _MAX_GROUP:
        reader.problems.append(f"{name} must be a number of inputs, or -1 for all, not {size}")
    return {"strategy": "group", "group": max(1, size)}


def _bits(reader: ConfigReader, name: str, supported: tuple[int, ...]) -> int:
    value = reader.get(name, int)
    if value not in supported:
        known = ", ".join(map(str, supported))
        reader.problems.append(f"{name}={value!r:.80} is not supported (supported: {known})")
        return supported[0]
    return int(value)


# compressed-tensors

_INTEGERS, _FLOATS = "int", "float32"  # as `ConfigReader.only` has "float"
_CT_FORMATS: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    "int-quantized": ("int8", _INTEGERS, (8,)),
    "naive-quantized": ("int8", _INTEGERS, (8,)),
    "pack-quantized": ("packed", _INTEGERS, (4, 8)),
    "float-quantized": ("fp8", _FLOATS, (8,)),
    "mxfp4-pack-quantized": ("mxfp4", _FLOATS, (4,)),
    "nvfp4-pack-quantized": ("nvfp4", _FLOATS, (4,)),
}
"""Format → (layout, type of the numbers, numbers of bits)."""


def _read_compressed_tensors(method: str, reader: ConfigReader) -> Quantization:
    groups = reader.get("config_groups", dict, {})
    rules = _ignored(reader, "ignore", prefix="")
    sparsity = reader.get("sparsity_config", dict, {})
    if sparsity.get("format", "dense") not in ("dense", None):
        reader.problems.append(
            f"sparsity_config.format={sparsity['format']!r:.80} is not supported (supported: dense)"
        )
    if reader.get("transform_config", dict, {}).get("config_groups"):
        reader.problems.append("transform_config: transformed weights are not supported")
    usual = reader.get("format", str, None)
    if not groups:
        reader.problems.append("config_groups is missing")
    last: list[Rule] = []
    for name, group in list(groups.items())[:_MAX_RULES]:
        inner = ConfigReader(group if isinstance(group, dict) else {}, name)
        scheme = _compressed(inner, usual)
        targets = _texts(inner, "targets")
        if not targets:
            inner.problems.append("targets must name layers")
        for target in targets:
            # A class of modules; the table of ours has linear layers only.
            if target in ("Linear", "Embedding"):
                last += [] if target == "Embedding" else [Rule("", scheme)]
            else:
                rules += _rule(inner, "targets", target, scheme)
        reader.problems.extend(
            [f"config_groups.{name:.80}: {problem}" for problem in inner.problems]
        )
    return Quantization(method, (*rules, *last))


def _compressed(reader: ConfigReader, usual: str | None) -> Scheme | None:
    """The scheme of one group of layers."""
    fields = reader.get("weights", dict, None)
    if fields is None:
        return None  # only activations are rounded, which is no property of the file
    weights = ConfigReader(fields, "weights")
    kind = weights.only("type", (_INTEGERS, _FLOATS), _INTEGERS)
    num_bits = weights.get("num_bits", int, 8)
    rows = reader.get("input_activations", dict, None)
    name = reader.get("format", str, None) or usual
    if name is None or name in ("dense", "mixed-precision"):
        name = _usual_format(kind, num_bits, has_rows=rows is not None)
    if name not in _CT_FORMATS:
        known = ", ".join(_CT_FORMATS)
        reader.problems.append(f"format={name!r:.80} is not supported (supported: {known})")
        return None
    layout, wanted, supported = _CT_FORMATS[name]
    if name == "naive-quantized" and kind == _FLOATS:
        layout, wanted = "fp8", _FLOATS
    if kind != wanted:
        weights.problems.append(f"type={kind!r:.80} does not go with format={name!r}")
    bits = _bits(weights, "num_bits", supported)
    sharing = _sharing(weights)
    if layout in ("mxfp4", "nvfp4"):
        sharing = {"strategy": "group", "group": 32 if layout == "mxfp4" else 16}
    if reader.get("output_activations", dict, None):
        weights.problems.append("output_activations are not supported")
    order = weights.only("actorder", (None, "group", "weight", "static", "dynamic", False), None)
    symmetric = weights.get("symmetric", bool, True) or kind == _FLOATS
    reader.problems.extend([f"weights: {problem}" for problem in weights.problems])
    return Scheme(
        layout=layout,
        bits=bits,
        symmetric=symmetric,
        any_order=order in ("group", "dynamic"),
        int8_rows=rows is not None and rows.get("num_bits") == 8 and rows.get("type") != "float",
        **sharing,
    )


def _usual_format(kind: str, num_bits: int, *, has_rows: bool) -> str:
    """The format of a group that names none."""
    if kind == _FLOATS:
        return "float-quantized" if num_bits == 8 else "nvfp4-pack-quantized"
    return "int-quantized" if has_rows and num_bits == 8 else "pack-quantized"


def _sharing(weights: ConfigReader) -> dict[str, Any]:
    """What has a scale of its own."""
    strategy = weights.only(
        "strategy", ("tensor", "channel", "group", "block", "tensor_group"), None
    ) if weights.raw.get("strategy") else None  # fmt: skip
    size = weights.get("group_size", int, None)
    if strategy is None:
        strategy = "group" if size and size > 0 else "channel" if size == -1 else "tensor"
    if strategy == "group":
        return _group(weights, "group_size")
    if strategy == "block":
        return {"strategy": "block", "block": _block(weights, "block_structure")}
    return {"strategy": strategy}


def _block(reader: ConfigReader, name: str) -> tuple[int, int] | None:
    value = reader.get(name, (list, str), None)
    if isinstance(value, str):
        value = [int(side) if side.isdecimal() else 0 for side in value.lower().split("x")]
    good = isinstance(value, list) and len(value) == 2
    if not good or any(type(side) is not int or not 1 <= side <= _MAX_GROUP for side in value):
        reader.problems.append(f"{name} must be two positive numbers, not {value!r:.80}")
        return (128, 128)
    return value[0], value[1]


# GPTQ, AWQ


def _read_gptq(method: str, reader: ConfigReader) -> Quantization:
    form = reader.only("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    reader.only("pack_dtype", ("int32",), "int32")
    reader.only("is_marlin_format", (False,), False)
    shape = {
        "layout": "gptq",
        "bits": _bits(reader, "bits", (2, 3, 4, 8)),
        "symmetric": reader.get("sym", bool, True),
        "zero_offset": 0 if form == "gptq_v2" else 1,
        "any_order": reader.get("desc_act", bool, False),
        **_group(reader, "group_size", -1),
    }
    usual = Scheme(**shape)
    rules = _ignored(reader, "modules_to_not_convert", prefix="part:")
    for pattern, changes in list(reader.get("dynamic", dict, {}).items())[:_MAX_RULES]:
        sign = pattern[:2] if pattern[:2] in ("+:", "-:") else "+:"
        inner = ConfigReader(changes if isinstance(changes, dict) else {}, pattern)
        special = None if sign == "-:" else Scheme(**{**shape, **_changed(inner)})
        rules += _rule(reader, "dynamic", f"re:{pattern.removeprefix(sign)}", special)
        reader.problems.extend([f"dynamic.{pattern:.80}: {problem}" for problem in inner.problems])
    if not reader.get("lm_head", bool, False):
        rules.append(Rule("lm_head", None))
    return Quantization(method, (*rules, Rule("", usual)))


def _changed(reader: ConfigReader) -> dict[str, Any]:
    """What is different for some layers."""
    changed: dict[str, Any] = {}
    if reader.raw.get("bits") is not None:
        changed["bits"] = _bits(reader, "bits", (2, 3, 4, 8))
    if reader.raw.get("group_size") is not None:
        changed |= {"group": None, **_group(reader, "group_size")}
    for name, field in (("sym", "symmetric"), ("desc_act", "any_order")):
        if reader.raw.get(name) is not None:
            changed[field] = reader.get(name, bool)
    return changed


def _read_awq(method: str, reader: ConfigReader) -> Quantization:
    reader.only("version", ("gemm",), "gemm")
    reader.only("format", ("gemm",), "gemm")
    scheme = Scheme(
        layout="awq",
        bits=_bits(reader, "w_bit" if "bits" not in reader.raw else "bits", (4,)),
        symmetric=not reader.get("zero_point", bool, True),
        **_group(reader, "q_group_size" if "group_size" not in reader.raw else "group_size", 128),
    )
    ignored = _ignored(reader, "modules_to_not_convert", prefix="part:")
    return Quantization(method, (*ignored, Rule("lm_head", None), Rule("", scheme)))


# FP8, MXFP4


def _read_fp8(method: str, reader: ConfigReader) -> Quantization:
    reader.only("activation_scheme", ("dynamic", "static"), "dynamic")
    reader.only("fmt", ("e4m3", "float8_e4m3fn", "e4m3fn"), "e4m3")
    reader.only("scale_fmt", ("ue8m0", "float32", "float"), "float32")
    has_blocks = reader.raw.get("weight_block_size") is not None
    scheme = Scheme(
        layout="fp8",
        bits=8,
        strategy="block" if has_blocks else "channel",
        block=_block(reader, "weight_block_size") if has_blocks else None,
    )
    ignored = _ignored(reader, "modules_to_not_convert", "ignored_layers", prefix="part:")
    return Quantization(method, (*ignored, Rule("lm_head", None), Rule("", scheme)))


def _read_mxfp4(method: str, reader: ConfigReader) -> Quantization:
    scheme = Scheme(layout="mxfp4 of transformers", bits=4, group=32)
    ignored = _ignored(reader, "modules_to_not_convert", prefix="part:")
    return Quantization(method, (*ignored, Rule("lm_head", None), Rule("", scheme)))


# bitsandbytes


def _read_bitsandbytes(method: str, reader: ConfigReader) -> Quantization:
    ignored = _ignored(reader, "llm_int8_skip_modules", "modules_to_not_convert", prefix="part:")
    if reader.get("load_in_8bit", bool, False):
        scheme = Scheme(layout="int8 of bitsandbytes", bits=8, strategy="channel")
    else:
        if not reader.get("load_in_4bit", bool, False):
            reader.problems.append("load_in_4bit or load_in_8bit must be true")
        reader.only("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        reader.only("bnb_4bit_quant_storage", ("uint8",), "uint8")
        scheme = Scheme(layout="nf4", bits=4, strategy="tensor")
    return Quantization(method, (*ignored, Rule("lm_head", None), Rule("", scheme)))


_BLOCKS = "the smallest blocks with the same numbers"
METHODS: Mapping[str, Method] = {
    "compressed-tensors": Method(
        _read_compressed_tensors,
        "`int-quantized` (W8A8), `pack-quantized` (W4A16, W8A16; also with zero points and"
        " `actorder`), `float-quantized` (FP8), `mxfp4-pack-quantized`, `nvfp4-pack-quantized`;"
        " several groups, `ignore`",
        f"W8A8: int8 with the file's scales; W4A16, W8A16, MXFP4: {_BLOCKS}; else bfloat16",
    ),
    "gptq": Method(
        _read_gptq,
        "2, 3, 4 and 8 bits, `gptq` and `gptq_v2`, `desc_act`, `dynamic`",
        f"{_BLOCKS}; with inputs in another order: bfloat16",
    ),
    "awq": Method(_read_awq, "4 bits, `gemm`", _BLOCKS),
    "fp8": Method(
        _read_fp8,
        "e4m3 with a scale for blocks, outputs or the tensor, also `ue8m0`",
        "bfloat16",
    ),
    "mxfp4": Method(_read_mxfp4, "`…_blocks` and `…_scales` of matrices", "MXFP4 blocks"),
    "bitsandbytes": Method(
        _read_bitsandbytes,
        "nf4 and fp4, also doubly quantised; int8",
        "bfloat16",
    ),
}
"""The methods that are read, by their `quant_method`."""

_PLAIN = "take the repository that is not quantised, with --dtype int8 or int4"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("auto-round", "auto_round", "autoround", "intel/auto-round"),
        "take the model's GPTQ or AWQ file, which auto-round also writes (format auto_gptq or"
        " auto_awq)",
    ),
    **dict.fromkeys(("hqq", "aqlm", "quanto", "vptq", "higgs", "spqr", "fp_quant", "eetq"), _PLAIN),
    **dict.fromkeys(("quip", "quark", "fbgemm_fp8", "torchao"),
                    "take the model's compressed-tensors or FP8 file"),
    **dict.fromkeys(("modelopt", "modelopt_fp4"),
                    "take the model's compressed-tensors or FP8 file (llm-compressor writes them)"),
    "bitnet": "take the repository with its weights in bfloat16",
    **dict.fromkeys(("exl2", "exl3"), "take the model's GPTQ, AWQ or GGUF file"),
    **dict.fromkeys(("gguf", "ggml"), "give the path of the GGUF file itself"),
}  # fmt: skip
"""The methods that are known and not read, each with what to take instead."""
