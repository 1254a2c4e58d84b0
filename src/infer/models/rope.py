"""Rotary position embedding: the frequencies of a config and their table.

`RopeTable` is made once per model; a step takes the rows of its positions from it once and every
layer uses them. `kernels.rotary` turns the heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from infer.models.model_config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] radians per position, float32."""
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
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_max_position * freqs / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * freqs + (1.0 - keep) * freqs / config.factor


def _yarn(freqs: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Like llama3, but blended evenly over the dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        """The pair of dimensions that makes so many turns within the original length."""
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
    """Cosines and sines of every position up to `max_seq_len`."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device
    ) -> None:
        freqs = inverse_frequencies(config, head_dim)
        angles = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * freqs
        self._cos = (angles.cos() * config.attention_factor).to(device)
        self._sin = (angles.sin() * config.attention_factor).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D/2], float32, for the positions [T] of a step."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
