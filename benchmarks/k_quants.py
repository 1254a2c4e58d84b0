"""Weights in K-quants as llama.cpp's Q4_K_M mixes them, which the `gguf` package only reads.

The rounding is the plain one: each block's range is divided evenly. llama.cpp searches for better
factors, so its files lose less. What is compared here is one file's numbers computed in two ways,
for which the rounding does not matter.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def q4_k(rows: Array) -> Array:
    """Rows [n, k] in float32 as bytes [n, k / 256 · 144]; k: a multiple of 256."""
    x = rows.astype(np.float32).reshape(-1, 8, 32)
    low = np.minimum(x.min(-1), 0)
    scales, minima = (x.max(-1).clip(0) - low) / 15, -low
    d, multiples = _factor(scales, 63)
    dmin, offsets = _factor(minima, 63)
    step = (d.astype(np.float32) * multiples)[..., None]
    shifted = x + (dmin.astype(np.float32) * offsets)[..., None]
    codes = np.rint(_divided(shifted, step)).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    m, n = multiples.astype(np.uint8), offsets.astype(np.uint8)
    six_bits = np.concatenate(
        [
            m[:, :4] | m[:, 4:] >> 4 << 6,
            n[:, :4] | n[:, 4:] >> 4 << 6,
            (m[:, 4:] & 15) | n[:, 4:] << 4,
        ],
        axis=1,
    )
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    found = np.concatenate([d.view(np.uint8), dmin.view(np.uint8), six_bits, nibbles], axis=1)
    return found.reshape(len(rows), -1)


def q6_k(rows: Array) -> Array:
    """Rows [n, k] in float32 as bytes [n, k / 256 · 210]; k: a multiple of 256."""
    x = rows.astype(np.float32).reshape(-1, 16, 16)
    d, multiples = _factor(np.abs(x).max(-1) / 31, 127)
    step = (d.astype(np.float32) * multiples)[..., None]
    codes = (np.rint(_divided(x, step)).clip(-32, 31) + 32).astype(np.uint8)
    parts = codes.reshape(-1, 2, 4, 32)
    lower, upper = parts & 15, parts >> 4
    lows = lower[:, :, :2] | lower[:, :, 2:] << 4
    highs = upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6
    pieces = [
        *(lows.reshape(-1, 128), highs.reshape(-1, 64)),
        *(multiples.astype(np.uint8), d.view(np.uint8)),
    ]
    return np.concatenate(pieces, axis=1).reshape(len(rows), -1)


def kind_of(name: str, num_layers: int) -> str:
    """The type in which llama.cpp's Q4_K_M holds a matrix, by its name on the Hugging Face hub."""
    if "layers." not in name:  # embedding and head
        return "Q6_K"
    layer = int(name.partition("layers.")[2].partition(".")[0])
    eighth = num_layers // 8
    is_finer = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if is_finer and ("v_proj" in name or "down_proj" in name) else "Q4_K"


def _factor(steps: Array, most: int) -> tuple[Array, Array]:
    """Factors [n, 1] in float16 and whole multiples of them, `most` at most, for steps [n, m]."""
    factor = (steps.max(-1, keepdims=True) / most).astype(np.float16)
    return factor, np.rint(_divided(steps, factor.astype(np.float32))).clip(0, most)


def _divided(x: Array, by: Array) -> Array:
    return np.divide(x, by, out=np.zeros_like(x), where=by != 0)
