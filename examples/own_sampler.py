"""A custom sampler: greedy, but never the same token twice in a row.

A sampler gets the logits of the step, one row for each sequence that samples, and returns a
`Sampled` for each row. If a row's token depends on that row alone, a request's tokens do not depend
on the other requests. A sampler is named as `module:function`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infer import LLM, SamplingParams
from infer.schedule.sequence import Sampled

PROMPT = "the the the the"


def never_twice(
    logits: torch.Tensor, sequences: Sequence[Any], forbidden: Mapping[str, Any]
) -> list[Sampled]:
    """The sampler. `logits`: [R, V] float32. `forbidden`: masks [V] of grammars by request id."""
    for row, sequence in enumerate(sequences):
        logits[row, sequence.tokens[-1]] = -torch.inf
        mask = forbidden.get(sequence.request_id)
        if mask is not None:
            logits[row, mask] = -torch.inf
    return [Sampled(token_id) for token_id in logits.argmax(dim=-1).tolist()]


def main() -> None:
    """Complete a prompt that leads to repetition with the default sampler and with this one."""
    for sampler in ("default", "own_sampler:never_twice"):
        with LLM(sampler=sampler) as llm:
            [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
            ids = [*output.prompt_token_ids[-1:], *output.token_ids]
            repeats = sum(a == b for a, b in itertools.pairwise(ids))
            print(f"{sampler}: {repeats} repeats in {output.text!r}")


if __name__ == "__main__":
    main()
