"""`sample`: the engine's sampler for rows of logits that a `Context` gives.

A token is a pure function of its row, the tokens before it, the parameters and the seed, as in the
engine: the same arguments give the token that the engine would choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from infer.errors import RequestError
from infer.runner import sampler
from infer.schedule.sequence import Sampled
from infer.schedule.sequence import Sequence as EngineSequence
from infer.types import Request
from infer.types.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How the token of one row is chosen."""

    tokens: Sequence[int]
    """Token ids before the one that is chosen, prompt and output; at least one."""
    sampling: Sampling = Sampling(temperature=0.0)  # noqa: RUF009 - frozen
    """Parameters. What ends a request has no effect here: stop strings, `max_tokens`."""
    seed: int = 0
    """Seed of the draw, 64-bit signed; `sampling.seed` goes before it."""
    num_prompt: int | None = None
    """Number of prompt tokens; penalties count the tokens after them. None: all are prompt."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that are not chosen before `sampling.min_tokens` tokens of output."""


def sample(logits: NDArray[np.float32], rows: Sequence[RowSampling]) -> list[Sampled]:
    """One result for each row of `logits` [R, V], which are not changed.

    A row that gives no token has an `error` in its result: its logits are not finite, or no token
    is allowed. Raises `RequestError` if the numbers of rows differ, for an empty history, and for
    a grammar or bad words, which need the engine's tokenizer.
    """
    if logits.ndim != 2 or len(logits) != len(rows):
        raise RequestError(
            f"logits must be [{len(rows)}, vocabulary], a row for each of `rows`, not"
            f" {list(logits.shape)}",
            param="logits",
        )
    sequences = [_sequence(index, row) for index, row in enumerate(rows)]
    with torch.inference_mode():
        return sampler.sample(torch.from_numpy(np.array(logits, np.float32)), sequences)


def _sequence(index: int, row: RowSampling) -> EngineSequence:
    sampling = row.sampling
    for name in ("grammar", "bad_words"):
        if getattr(sampling, name):
            raise RequestError(
                f"row {index}: {name} needs the engine, which knows the tokenizer; leave it out,"
                " or use allowed_token_ids",
                param=name,
            )
    tokens = tuple(row.tokens)
    num_prompt = len(tokens) if row.num_prompt is None else row.num_prompt
    if not 1 <= num_prompt <= len(tokens):
        raise RequestError(
            f"row {index}: num_prompt must be 1 to {len(tokens)}, the number of its tokens, not"
            f" {num_prompt}",
            param="num_prompt",
        )
    request = Request(
        request_id=str(index),
        prompt_token_ids=tokens[:num_prompt],
        output_token_ids=tokens[num_prompt:],
        sampling=sampling,
        seed=row.seed if sampling.seed is None else sampling.seed,
        max_tokens=len(tokens) + 1,
        eos_token_ids=row.eos_token_ids,
    )
    return EngineSequence.from_request(request, index)
