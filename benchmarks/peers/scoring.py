"""`scores_of`: what logits say of a text, as `benchmarks/quality.py` wants it. Needs numpy."""

from __future__ import annotations

from typing import Any

import numpy as np


def scores_of(logits: np.ndarray, ids: list[int]) -> dict[str, Any]:
    """Log-probabilities of all `ids` but the first, and the best token there.

    `logits`: [len(ids) - 1, vocabulary], float32, each before its token.
    """
    top = logits.max(axis=1, keepdims=True).astype(np.float64)
    total = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    found = logits[np.arange(len(logits)), ids[1:]] - total
    return {"logprobs": found.tolist(), "best": logits.argmax(axis=1).tolist()}
