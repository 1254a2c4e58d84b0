"""`PlainRows`: rows of logits whose tokens the C++ kernel finds alone, in one pass (draw.cpp)

They are those of sequences that need no more than temperature, top-p and min-p, greedy ones
included. The numbers that a sequence's request gives are written once; from step to step only the
positions change. The tokens are those of `runner.sampler.sample`, bit for bit. The CPU's runners
use it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from infer.kernels import loader
from infer.kernels.loader import NativeCall
from infer.kernels.team import num_threads
from infer.runner.sampler import is_plain
from infer.schedule.sequence import NOT_FINITE, Sampled, Sequence

_MASK64 = (1 << 64) - 1
LANES = 16
"""Number of which a row's length must be a multiple."""
DRAW_ROW = np.dtype(
    [
        *((name, np.float64) for name in ("temperature", "top_p", "min_p")),
        *((name, np.uint64) for name in ("row", "seed", "position")),
    ]
)
"""The record `DrawRow` of `abi.h`."""


class PlainRows:
    """The rows of one step."""

    __slots__ = ("_wanted",)

    def __init__(self, wanted: np.ndarray) -> None:
        """`wanted` [R]: records of `DRAW_ROW`, which nobody changes any more."""
        self._wanted = wanted

    def sample(self, logits: Tensor) -> list[int]:
        """The token of each row of logits [R, V] float32; -1: the row is not finite."""
        tokens = np.empty(len(self._wanted), np.int64)
        self.call(tokens, logits)()
        return tokens.tolist()

    def call(self, tokens: np.ndarray, logits: Tensor) -> NativeCall:
        """The call that writes `tokens`, [R] int64; see `sample`."""
        return NativeCall(
            loader.loaded().infer_sample,
            *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
            *(self._wanted.ctypes.data, len(tokens), tokens.ctypes.data, num_threads()),
            kept=(self._wanted, tokens, logits),
        )


class PlainSampling:
    """Makes `PlainRows`, and remembers the sequences of the last step."""

    def __init__(self) -> None:
        self._is_possible = loader.available() is None
        self._sequences: list[Sequence] = []
        self._wanted = np.zeros(0, DRAW_ROW)

    def rows(self, sequences: list[Sequence], positions: np.ndarray) -> PlainRows | None:
        """The rows of these sequences, whose tokens will stand at these positions [R]; None if
        one of them needs more than the kernel does."""
        if sequences != self._sequences:
            if not (self._is_possible and sequences and all(map(_is_drawn_natively, sequences))):
                return None
            self._wanted = _columns(sequences)
            self._sequences = sequences
        wanted = self._wanted.copy()
        wanted["position"] = positions
        return PlainRows(wanted)


def as_results(tokens: Seq[int]) -> list[Sampled]:
    """The results of rows that were sampled by `PlainRows`."""
    if min(tokens) >= 0:
        return list(map(Sampled, tokens))
    return [Sampled(0, error=NOT_FINITE) if token < 0 else Sampled(token) for token in tokens]


def _is_drawn_natively(sequence: Sequence) -> bool:
    sampling = sequence.request.sampling
    return is_plain(sequence) and (sampling.top_k <= 0 or sampling.temperature <= 0)


def _columns(sequences: list[Sequence]) -> np.ndarray:
    wanted = np.zeros(len(sequences), DRAW_ROW)
    params = [sequence.request.sampling for sequence in sequences]
    wanted["temperature"] = [p.temperature for p in params]
    wanted["top_p"] = [p.top_p for p in params]
    wanted["min_p"] = [p.min_p for p in params]
    wanted["row"] = np.arange(len(sequences))
    wanted["seed"] = [sequence.request.seed & _MASK64 for sequence in sequences]
    return wanted
