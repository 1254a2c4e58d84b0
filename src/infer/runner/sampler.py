"""`sample`: logits → tokens and log-probabilities.

The order, stated once: logit bias and penalties → temperature → top-k → top-p and min-p → draw.
Log-probabilities come from the raw logits. A step that is the same for no row is skipped, so an
all-greedy step is one argmax. Candidates are taken with a partial sort; the whole vocabulary is
sorted only for a row whose top-p set is larger than that.

A row's token is a pure function of its logits, its parameters, its seed and its position: rows
are grouped by their own parameters only, and each group is computed row by row in torch's last
dimension, so no row sees its neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from infer.schedule.sequence import Sampled, Sequence
from infer.types import SamplingParams, TokenLogprobs

NUM_CANDIDATES = 1024
_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a pure function of seed and position (splitmix64, twice)."""
    x = _splitmix64((_splitmix64(seed & _MASK64) + position) & _MASK64)
    return (x >> 11) * 2.0**-53


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def sample(logits: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
    """One token per row: `logits` [R, V] float32 belong to `sequences` [R]; changes `logits`."""
    logprobs = _logprob_inputs(logits, sequences)
    for row, sequence in enumerate(sequences):
        adjust(logits[row], sequence)
    drawn = [row for row, s in enumerate(sequences) if s.request.sampling.temperature > 0]
    if len(drawn) == len(sequences):
        tokens = [0] * len(sequences)
    else:
        tokens = logits.argmax(dim=-1).tolist()
    if drawn:
        for row, token in zip(drawn, _draw(logits, sequences, drawn), strict=True):
            tokens[row] = token
    return [
        Sampled(token, _logprobs_of(logprobs.get(row), token, sequences[row]))
        for row, token in enumerate(tokens)
    ]


# Log-probabilities.


def _logprob_inputs(logits: Tensor, sequences: Seq[Sequence]) -> dict[int, Tensor]:
    """Log-probabilities [V] of the rows that ask for them, before anything changes the logits."""
    rows = [i for i, s in enumerate(sequences) if s.request.sampling.logprobs is not None]
    return {row: torch.log_softmax(logits[row], dim=-1) for row in rows}


def _logprobs_of(row: Tensor | None, token: int, sequence: Sequence) -> TokenLogprobs | None:
    if row is None:
        return None
    count = sequence.request.sampling.logprobs or 0
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = row.topk(min(count, len(row)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(row[token]), top)


# Bias and penalties.


def adjust(row: Tensor, sequence: Sequence) -> None:
    """Apply logit bias, penalties and the minimum length to the logits [V] of a row, in place."""
    params = sequence.request.sampling
    if params.bias_pairs:
        ids, values = zip(*params.bias_pairs, strict=True)
        index = torch.tensor(ids, device=row.device)
        row.index_add_(0, index, torch.tensor(values, dtype=row.dtype, device=row.device))
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        values_seen = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values_seen > 0, values_seen / penalty, values_seen * penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.num_output:
        counts = Counter(sequence.tokens[sequence.num_prompt :])
        index = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[index] -= params.frequency_penalty * times + params.presence_penalty
    if sequence.num_output < params.min_tokens:
        ends = [i for i in sequence.end_token_ids if i < len(row)]
        row[ends] = float("-inf")


# Drawing.


def _candidate_class(params: SamplingParams, vocab_size: int) -> int:
    """How many candidates a row's own parameters call for; 0 = the whole row, unsorted."""
    if params.top_k > 0:
        return int(min(vocab_size, 1 << (params.top_k - 1).bit_length()))
    if params.top_p < 1.0 or params.min_p > 0.0:
        return min(vocab_size, NUM_CANDIDATES)
    return 0


def _draw(logits: Tensor, sequences: Seq[Sequence], rows: list[int]) -> list[int]:
    classes: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        classes[_candidate_class(sequences[row].request.sampling, logits.shape[1])].append(row)
    tokens: dict[int, int] = {}
    for num_candidates, members in classes.items():
        params = [sequences[row].request.sampling for row in members]
        points = [
            uniform(sequences[row].request.seed, len(sequences[row].tokens)) for row in members
        ]
        temperatures = _column([p.temperature for p in params], logits)
        scaled = logits[members] / temperatures
        if num_candidates == 0:
            drawn = _draw_from_all(scaled, points)
        else:
            drawn = _draw_from_top(scaled, params, points, num_candidates)
        tokens.update(zip(members, drawn, strict=True))
    return [tokens[row] for row in rows]


def _column(values: Seq[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _draw_from_all(scaled: Tensor, points: list[float]) -> list[int]:
    """Invert the distribution function, in order of token ids; no sort."""
    return _invert(scaled.softmax(dim=-1), points)


def _draw_from_top(
    scaled: Tensor, params: list[SamplingParams], points: list[float], num_candidates: int
) -> list[int]:
    values, ids = scaled.topk(num_candidates, dim=-1)
    ranks = torch.arange(num_candidates, device=scaled.device)
    limits = [p.top_k if p.top_k > 0 else num_candidates for p in params]
    inside = ranks < torch.tensor(limits, device=scaled.device).unsqueeze(1)
    # Top-p counts the probability among what top-k left; without top-k, among everything.
    open_ended = torch.tensor([p.top_k <= 0 for p in params], device=scaled.device).unsqueeze(1)
    among_top = values.masked_fill(~inside, float("-inf")).logsumexp(dim=-1, keepdim=True)
    total = torch.where(open_ended, scaled.logsumexp(dim=-1, keepdim=True), among_top)
    probs = (values - total).exp() * inside
    before = probs.double().cumsum(dim=-1) - probs
    keep = before < _column([p.top_p for p in params], before)
    keep &= probs >= _column([p.min_p for p in params], probs) * probs[:, :1]
    picked = _invert(probs * keep, points)
    tokens = ids.gather(1, torch.tensor(picked, device=ids.device).unsqueeze(1)).squeeze(1)
    result: list[int] = tokens.tolist()
    if num_candidates < scaled.shape[1]:
        # Where every candidate was kept, there may be more to keep: sort that row whole.
        reached = keep[:, -1].tolist()
        for i, p in enumerate(params):
            if p.top_k <= 0 and reached[i]:
                whole = slice(i, i + 1)
                result[i] = _draw_from_top(
                    scaled[whole], params[whole], points[whole], scaled.shape[1]
                )[0]
    return result


def _invert(weights: Tensor, points: list[float]) -> list[int]:
    """Per row the first index at which the running sum of the weights passes point · sum."""
    sums = weights.double().cumsum(dim=-1)
    targets = torch.tensor(points, dtype=torch.float64, device=weights.device).unsqueeze(1)
    index = torch.searchsorted(sums, targets * sums[:, -1:], right=True).squeeze(1)
    # Rounding may put the target on the last sum: stay on the last index that has a weight.
    last = (sums < sums[:, -1:]).sum(dim=-1)
    result: list[int] = torch.minimum(index, last).tolist()
    return result
