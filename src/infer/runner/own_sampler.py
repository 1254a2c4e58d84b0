"""`find_sampler`: the sampler of a setting; what a function of the user returns is checked"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from infer.config import own_function
from infer.errors import EngineError
from infer.runner.sampler import Forbidden, Sampler, SamplerRow, sample
from infer.schedule.sequence import Sampled


def find_sampler(name: str) -> Sampler:
    """The engine's own sampler for "default", or the function `module:function`; raises
    `ConfigError` if there is none."""
    return sample if name == "default" else _OwnSampler(name, own_function("sampler", name))


class _OwnSampler:
    """A function of the user as a sampler. A row whose token the model does not have fails alone:
    as a row of the next step's embedding it would be read from any place in memory."""

    def __init__(self, name: str, function: Callable[..., Iterable[Sampled]]) -> None:
        """`name`: what the setting calls it."""
        self._name, self._function = name, function

    def __call__(
        self, logits: Tensor, sequences: Seq[SamplerRow], forbidden: Forbidden
    ) -> list[Sampled]:
        """The results of the function; `EngineError` if they are not one `Sampled` for each row."""
        num_rows, vocab = logits.shape
        returned = self._function(logits, sequences, forbidden)
        results = list(returned) if isinstance(returned, Iterable) else [returned]
        if len(results) != num_rows or not all(isinstance(result, Sampled) for result in results):
            kinds = ", ".join(dict.fromkeys(type(result).__name__ for result in results))
            raise EngineError(
                f"sampler {self._name!r} must return one Sampled for each of {num_rows} rows, not"
                f" {len(results)} of {kinds or 'nothing'}"
            )
        return [self._checked(result, vocab) for result in results]

    def _checked(self, result: Sampled, vocab: int) -> Sampled:
        chosen: object = result.token_id
        try:
            token_id = operator.index(result.token_id)  # an int, also of NumPy or torch
        except TypeError:
            token_id = -1
        if not 0 <= token_id < vocab:
            message = f"sampler {self._name!r} chose {chosen!r}, which is none of {vocab} token ids"
            return Sampled(0, error=message)
        return replace(result, token_id=token_id, following=())
