"""Reading a model's RoPE from its `config.json`.

Most checkpoints have `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`. Both
are read. Every number is checked, and an unknown kind of scaling is refused by name. The module
imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from infer.models.model_config import MAX_NUMBER, ConfigReader, RopeConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""Kinds of RoPE scaling that are supported."""
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "original_max_position_embeddings")}
_FIELDS = {"original_max_position_embeddings": "original_max_position"}


def read_rope(reader: ConfigReader, *, max_position: int) -> RopeConfig:
    """The RoPE of a config that has the same RoPE in all layers.

    `max_position`: the model's maximum number of positions.
    """
    raw = reader.raw
    spec = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(spec, Mapping):
        reader.problems.append(f"rope_scaling must be an object, not {spec!r:.80}")
        spec = {}
    theta = next(
        (each["rope_theta"] for each in (raw, spec) if each.get("rope_theta") is not None), 10000.0
    )
    return read_rope_spec(reader, spec, theta, max_position=max_position)


def read_rope_spec(
    reader: ConfigReader, spec: Mapping[str, Any], theta: Any, *, max_position: int
) -> RopeConfig:
    """The RoPE that one specification `{"rope_type": …, "factor": …}` describes."""
    kind = spec.get("rope_type") or spec.get("type") or "default"
    kind = kind.strip().lower() if isinstance(kind, str) else kind
    if kind not in KINDS:
        reader.problems.append(
            f"rope_scaling type {kind!r:.80} is not supported (supported: {', '.join(KINDS)})"
        )
        return RopeConfig()
    numbers: dict[str, Any] = {"theta": theta}
    for name in _REQUIRED.get(kind, ()):
        if spec.get(name) is None:
            reader.problems.append(f"rope_scaling of type {kind!r} lacks {name}")
            numbers[_FIELDS.get(name, name)] = 1.0
    for name in (*_REQUIRED.get(kind, ()), *_OPTIONAL.get(kind, ())):
        if spec.get(name) is not None:
            numbers[_FIELDS.get(name, name)] = spec[name]
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < MAX_NUMBER:  # neither NaN nor infinite
            reader.problems.append(f"RoPE {name} must be a positive number, not {value!r:.80}")
            numbers[name] = 1.0
    if kind == "yarn":
        numbers.setdefault("original_max_position", max_position)
        numbers["attention_factor"] = _yarn_attention_factor(reader, spec, numbers["factor"])
        numbers["truncate"] = bool(spec.get("truncate", True))
    if kind == "dynamic":
        # Dynamic scaling starts beyond max_position_embeddings. This engine allows no position
        # beyond it, so dynamic equals default.
        return RopeConfig(theta=numbers["theta"])
    return RopeConfig(kind=kind, **numbers)


def _yarn_attention_factor(reader: ConfigReader, spec: Mapping[str, Any], factor: float) -> float:
    """The factor of cosines and sines, by which YaRN sharpens attention for longer contexts."""
    scales: dict[str, float | None] = {}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        value = scales[name] = spec.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < MAX_NUMBER):
            reader.problems.append(f"RoPE {name} must be a number of 0 or more, not {value!r:.80}")
            scales[name] = None

    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    given = scales["attention_factor"]
    if given is not None:
        return float(given)
    mscale, all_dim = scales["mscale"], scales["mscale_all_dim"]
    if mscale and all_dim:
        return sharpening(mscale) / sharpening(all_dim)
    return sharpening(1.0)
