"""Log-probabilities of prompt tokens, for requests that ask for them; the runners use it."""

from __future__ import annotations

from torch import Tensor

from infer.models.model import Model
from infer.runner.sampler import score
from infer.schedule.sequence import Plan

_SCORED_ROWS = 64
"""Number of rows of logits that are in memory at a time."""


def score_prompts(plan: Plan, hidden: Tensor, model: Model) -> None:
    """Compute the log-probabilities of prompt tokens from the hidden states [T, E] of a step.

    They are stored in `Sequence.prompt_scores` of the sequences whose requests ask for them.
    """
    begin = 0
    for chunk in plan:
        sequence, start = chunk.sequence, chunk.start
        count = sequence.request.sampling.prompt_logprobs
        if count is not None:
            end = min(start + chunk.num_tokens, sequence.num_prompt - 1)
            for at in range(start, end, _SCORED_ROWS):
                following = sequence.tokens[at + 1 : min(end, at + _SCORED_ROWS) + 1]
                rows = hidden[begin + at - start :][: len(following)]
                scores = score(model.logits(rows), following, count)
                sequence.prompt_scores.update(enumerate(scores, at + 1))
        begin += chunk.num_tokens
