"""Reading a model's RoPE from its `config.json`.

Most checkpoints have `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`. Both
are read. Every number is checked, and an unknown kind of scaling is refused by name. The module
imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from infer.models.model_config import MAX_NUMBER, ConfigReader, RopeConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
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
_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}
_FIELDS = {"original_max_position_embeddings": "original_max_position"}


def read_rope(
    reader: ConfigReader,
    *,
    max_position: int,
    head_dim: int = 2,
    theta: float = 10000.0,
    share: float | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """The RoPE of a config that has the same RoPE in all layers.

    `max_position`: the model's maximum number of positions; `theta`: the class's base. `share`: the
    class's part of a head that rotates; None: the whole head, in every model of the family.
    `renamed`: kinds of scaling that the family calls otherwise.
    """
    raw = reader.raw
    spec = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(spec, Mapping):
        reader.problems.append(f"rope_scaling must be an object, not {spec!r:.80}")
        spec = {}
    kind = spec.get("rope_type") or spec.get("type") or "default"
    if isinstance(kind, str) and kind in renamed:
        spec = {**spec, "rope_type": renamed[kind]}
    theta = next(
        (fields["rope_theta"] for fields in (spec, raw) if fields.get("rope_theta") is not None),
        theta,
    )
    rotary = head_dim
    if share is None:
        _refuse(reader, spec, "partial_rotary_factor", (None, 1))
    else:
        rotary = _rotary_size(reader, spec, head_dim, share)
    rope = read_rope_spec(reader, spec, theta, max_position=max_position, rotary=rotary)
    return rope if rotary == head_dim else replace(rope, rotary_size=rotary)


def _refuse(
    reader: ConfigReader, spec: Mapping[str, Any], name: str, neutral: tuple[Any, ...]
) -> None:
    if spec.get(name) not in neutral:
        reader.problems.append(
            f"{name}={spec[name]!r:.80} of RoPE has no meaning in this architecture"
        )


def _rotary_size(reader: ConfigReader, spec: Mapping[str, Any], head_dim: int, share: float) -> int:
    """The number of a head's elements that rotate."""
    given = reader.positive("partial_rotary_factor", reader.positive("rotary_pct", share))
    if spec.get("partial_rotary_factor") is not None:
        part = ConfigReader(spec, reader.where)
        given = part.positive("partial_rotary_factor", share)
        reader.problems.extend(part.problems)
    rotary = int(head_dim * given)
    if not 0 < rotary <= head_dim or rotary % 2:
        reader.problems.append(
            f"partial_rotary_factor={given!r:.80} rotates {rotary} of a head's {head_dim} elements;"
            " it must be an even number of them"
        )
        return head_dim
    return rotary


def read_rope_spec(
    reader: ConfigReader,
    spec: Mapping[str, Any],
    theta: Any,
    *,
    max_position: int,
    rotary: int = 2,
) -> RopeConfig:
    """The RoPE that one specification `{"rope_type": …, "factor": …}` describes.

    `rotary`: the number of a head's elements that rotate."""
    kind = spec.get("rope_type") or spec.get("type") or "default"
    kind = kind.strip().lower() if isinstance(kind, str) else kind
    if kind not in KINDS:
        reader.problems.append(
            f"rope_scaling type {kind!r:.80} is not supported (supported: {', '.join(KINDS)})"
        )
        return RopeConfig()
    for name in ("alpha", "llama_4_scaling_beta"):
        if name not in reader.asked:
            _refuse(reader, spec, name, (None, 0))
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
    if kind == "longrope":
        return _longrope(reader, spec, numbers, max_position=max_position, count=rotary // 2)
    if kind == "yarn":
        numbers.setdefault("original_max_position", max_position)
        numbers["attention_factor"] = _yarn_attention_factor(reader, spec, numbers["factor"])
        numbers["truncate"] = bool(spec.get("truncate", True))
    if kind == "dynamic":
        # Dynamic scaling starts beyond max_position_embeddings. This engine allows no position
        # beyond it, so dynamic equals default.
        return RopeConfig(theta=numbers["theta"])
    return RopeConfig(kind=kind, **numbers)


def _longrope(
    reader: ConfigReader,
    spec: Mapping[str, Any],
    numbers: Mapping[str, Any],
    *,
    max_position: int,
    count: int,
) -> RopeConfig:
    """Phi-3's scaling: a divisor for each of `count` frequencies, others for longer contexts."""
    both: list[tuple[float, ...]] = []
    for name in ("short_factor", "long_factor"):
        values = spec.get(name)
        divisors = values if isinstance(values, list) else []
        if len(divisors) != count or not all(
            isinstance(divisor, (int, float)) and 0 < divisor < MAX_NUMBER for divisor in divisors
        ):
            reader.problems.append(
                f"rope_scaling {name} must be {count} positive numbers, not {values!r:.80}"
            )
            divisors = [1.0] * count
        both.append(tuple(float(divisor) for divisor in divisors))
    original = reader.size("original_max_position_embeddings", max_position)
    original = numbers.get("original_max_position", original)
    factor = numbers.get("factor") or max_position / original
    attention_factor = spec.get("attention_factor")
    if not isinstance(attention_factor, (int, float)):
        is_longer = factor > 1 and original > 1
        ratio = math.log(factor) / math.log(original) if is_longer else 0.0
        attention_factor = math.sqrt(1 + ratio)
    return RopeConfig(
        kind="longrope",
        theta=numbers["theta"],
        factor=factor,
        original_max_position=int(original),
        attention_factor=float(attention_factor),
        frequency_divisors=both[0],
        long_divisors=both[1],
    )


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
