"""`ModelConfig`: what a checkpoint's `config.json` says, in one vocabulary for all families.

`read_model_config` refuses by name what it does not support: a field that changes the mathematics
is honoured or is an error, never ignored. Stdlib only, so that planning and the server can read a
config without torch. `models.registry` says which architectures exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import LoadError
from infer.files import MAX_CONFIG_BYTES, parse_json, read_text

MAX_SIZE = 2**31 - 1
"""Of any size in a config; what is larger is no number of a model."""
MAX_NUMBER = 1e30
"""Of any other number: its powers and products stay finite."""
MAX_LAYERS = 1024
"""The deepest published models have 126."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base and how it is stretched."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, llama3, yarn"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """multiplies cosines and sines (yarn)"""
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()
    """[D/2] what each frequency is divided by first (GGUF files); () = nothing"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool
    dtype: str
    """the checkpoint's: bfloat16, float16 or float32"""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head"""
    windows: tuple[int | None, ...] = ()
    """per layer: how many positions, itself included, a query sees; None = all; () = all, all"""
    query_scale: float | None = None
    """what attention scores are multiplied by; None = 1/√head_dim"""
    local_rope: RopeConfig | None = None
    """RoPE of the layers that have a window, where it is another one"""
    final_softcap: float | None = None
    """logits are c · tanh(logits / c)"""

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer."""
        return self.windows[layer] if self.windows else None


class ConfigReader:
    """Reads fields of one `config.json`, collecting everything that is wrong with it."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.problems: list[str] = []

    def use(self, raw: Mapping[str, Any]) -> None:
        """Read these fields from now on, in the place of the file's own."""
        self.raw = raw

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The field's value; `null` counts as absent. Without a default it is required."""
        value = self.raw.get(name)
        if value is None:
            if default is ...:
                self.problems.append(f"{name} is missing")
                return 1
            return default
        wanted = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(k.__name__ for k in wanted)
            self.problems.append(f"{name} must be {names}, not {value!r:.80}")
            return 1 if default is ... else default
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(f"{name} must be a finite number, not {value}")
            return 1 if default is ... else default
        return value

    def positive(self, name: str, default: float | None) -> Any:
        """A field that must be a finite number above 0, or None where it may be left out."""
        value = self.get(name, (int, float), default)
        if value is not None and not 0 < value < MAX_NUMBER:
            self.problems.append(f"{name} must be a positive number, not {value!r:.80}")
            return 1.0
        return value

    def size(self, name: str, default: Any = ..., *, most: int = MAX_SIZE) -> int:
        """A field that must be a positive integer, `most` at most."""
        value = self.get(name, int, default)
        if isinstance(value, int) and not 1 <= value <= most:
            wanted = "positive" if value < 1 else f"at most {most}"
            self.problems.append(f"{name} must be {wanted}, not {value!r:.80}")
            return 1
        return value  # type: ignore[no-any-return]

    def only(self, name: str, supported: tuple[Any, ...], default: Any) -> Any:
        """A field for which only some values are supported."""
        value = self.raw.get(name, default)
        if value is None:
            value = default
        if value not in supported:
            known = ", ".join(repr(v) for v in supported)
            self.problems.append(f"{name}={value!r:.80} is not supported (supported: {known})")
        return value

    def finish(self) -> None:
        """Raise `LoadError` with everything that was wrong."""
        if self.problems:
            raise LoadError(f"{self.where}: " + "; ".join(self.problems))


def load_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file; `LoadError` names the file if there is none."""
    try:
        value = parse_json(read_text(path, max_bytes))
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must hold a JSON object")
    return value
