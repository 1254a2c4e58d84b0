"""Log-probabilities and logits of prompt tokens, for requests that ask for them

The runners use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.runner.sampler import score
from infer.schedule.sequence import Chunk, Plan

_SCORED_ROWS = 64
"""Number of rows of logits that are in memory at a time."""


def wants_prompt_rows(chunk: Chunk) -> bool:
    """Whether a chunk has tokens whose log-probabilities or logits its request asks for."""
    request, num_prompt = chunk.sequence.request, chunk.sequence.num_prompt
    scored = request.sampling.prompt_logprobs is not None and chunk.start < num_prompt - 1
    return scored or (bool(request.logits_at) and chunk.start < num_prompt)


def score_prompts(plan: Plan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Compute log-probabilities and logits of prompts from the hidden states [T, E] of a step.

    They are stored in `Sequence.prompt_scores` and `Sequence.logits` of the sequences whose
    requests ask for them. `logits_of` gives the logits [n, V] of hidden states [n, E].
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
                scores = score(logits_of(rows), following, count)
                sequence.prompt_scores.update(enumerate(scores, at + 1))
        if sequence.request.logits_at:
            _keep_logits(chunk, hidden[begin : begin + chunk.num_tokens], logits_of)
        begin += chunk.num_rows


def _keep_logits(chunk: Chunk, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Store the logits of a chunk at the positions that its request asks for. `hidden`: [n, E]."""
    start, end = chunk.start, chunk.start + chunk.num_tokens
    wanted = [at for at in chunk.sequence.request.logits_at if start <= at < end]
    for first in range(0, len(wanted), _SCORED_ROWS):
        positions = wanted[first : first + _SCORED_ROWS]
        rows = torch.tensor([at - start for at in positions], device=hidden.device)
        logits = logits_of(hidden.index_select(0, rows)).float().cpu().numpy()
        chunk.sequence.logits.update(zip(positions, logits, strict=True))
