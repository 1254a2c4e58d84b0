"""Frequencies of rotary position embedding, and the tables of their cosines and sines.

A model makes its `RopeTables` once, which know the RoPE of each layer. Each step takes the rows of
its positions from each distinct table once, and every layer uses its own. `kernels.rotary` rotates
the heads. RoPE: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.rotary import Angles
from infer.models.model_config import ModelConfig, RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """The angle of each pair of dimensions, in radians per position, [D/2], float32.

    Where only a part of the head rotates, that of the other pairs is 0.
    """
    rotary = head_dim if config.rotary_size is None else config.rotary_size
    freqs = _rotary_frequencies(config, rotary)
    return F.pad(freqs, (0, (head_dim - rotary) // 2))


def _rotary_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freqs: Tensor = 1.0 / (config.theta**exponents)
    if config.frequency_divisors:
        freqs = freqs / torch.tensor(config.frequency_divisors)
    if config.kind == "linear":
        return freqs / config.factor
    if config.kind == "llama3":
        return _llama3(freqs, config)
    if config.kind == "yarn":
        return _yarn(freqs, config, head_dim)
    return freqs


def _llama3(freqs: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: low frequencies are divided by `factor` and high ones are kept.

    Frequencies in between are interpolated linearly in the number of rotations that they make
    within the original context length.
    """
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_max_position * freqs / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * freqs + (1.0 - keep) * freqs / config.factor


def _yarn(freqs: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """YaRN's scaling (Peng et al. 2023, arXiv:2309.00071).

    As in Llama 3's scaling, high frequencies are kept and low ones divided by `factor`. Frequencies
    in between are interpolated linearly in the index of the dimension.
    """

    def dimension(turns: float) -> float:
        """The pair of dimensions that rotates `turns` times within the original length."""
        wave = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return slowed * freqs / config.factor + (1.0 - slowed) * freqs


class RopeTable:
    """Cosines and sines of the positions below `max_seq_len`."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device
    ) -> None:
        """`head_dim`: size of a head, D; `max_seq_len`: number of positions."""
        freqs = inverse_frequencies(config, head_dim)
        angles = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * freqs
        factors = torch.full_like(freqs, config.attention_factor)
        if config.rotary_size is not None:
            factors[config.rotary_size // 2 :] = 1.0  # the rest of the head stays as it is
        self._cos = (angles.cos() * factors).to(device)
        self._sin = (angles.sin() * factors).to(device)

    def at(self, positions: Tensor) -> Angles:
        """Cosines and sines, [T, D/2] each, float32, of the positions [T]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


class RopeTables:
    """The `RopeTable` of each layer of a model; layers with the same RoPE share theirs."""

    def __init__(self, config: ModelConfig, max_seq_len: int, device: torch.device) -> None:
        """`max_seq_len`: number of positions."""
        self._of_layer = [
            None if layer.rope is None else (layer.rope, layer.head_dim)
            for layer in config.layers()
        ]
        self._tables = {
            kind: RopeTable(*kind, max_seq_len, device)
            for kind in dict.fromkeys(self._of_layer)
            if kind is not None
        }
        growth = config.rope.query_growth
        self._growth = growth if max_seq_len > config.rope.original_max_position else 0.0
        self._original = config.rope.original_max_position

    def query_factors(self, positions: Tensor) -> Tensor | None:
        """Factors of the rotated queries at positions [T], [T] float32; None: they have none."""
        if not self._growth:
            return None
        turns = (positions // self._original).float()
        return 1.0 + self._growth * torch.log1p(turns)

    def at(self, positions: Tensor) -> list[Angles | None]:
        """The angles of the positions [T] in each layer; None: the layer does not rotate."""
        angles = {kind: table.at(positions) for kind, table in self._tables.items()}
        return [None if kind is None else angles[kind] for kind in self._of_layer]
