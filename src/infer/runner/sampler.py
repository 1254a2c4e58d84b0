"""`sample`: logits become tokens and log-probabilities.

The order of operations is: logit bias and penalties → forbidden tokens (minimum length, bad words,
allowed ids, grammar) → temperature → top-k → top-p and min-p → draw. Log-probabilities come from
the raw logits. An operation that no row needs is skipped, so an all-greedy step is one argmax.
Tokens are ranked by value; among equal values the lowest id comes first.

A row's token is a pure function of its logits, its parameters, its seed and its position. The
passes over whole rows are in `runner.vocab_blocks` or in a C++ kernel (draw.cpp). Top-k looks only
at k candidates. Top-p does not sort the row either. It draws a token from all tokens and accepts it
if the tokens of higher rank have less probability than p together. If not, it discards that token
and all tokens of lower rank, and draws again from the rest.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import compress, count
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from infer.kernels import loader
from infer.kernels.team import num_threads
from infer.runner import vocab_blocks
from infer.schedule.sequence import NONE_LEFT, NOT_FINITE, Sampled, Sequence
from infer.types import Request, Sampling, TokenLogprobs

_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """A pseudo-random number in [0, 1), a pure function of its arguments.

    It is made with repeated splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number
    generators").
    """
    x = _splitmix64((_splitmix64(seed & _MASK64) + position) & _MASK64)
    for _ in range(attempt):
        x = _splitmix64(x)
    return (x >> 11) * 2.0**-53


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


class SamplerRow(Protocol):
    """What the sampler reads of the sequence of a row."""

    @property
    def request(self) -> Request:
        """The request."""

    @property
    def request_id(self) -> str:
        """The id of the request."""

    @property
    def tokens(self) -> Seq[int]:
        """Ids of the tokens before the one that is sampled; where `is_plain`, only their number is
        read."""

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""

    @property
    def num_output(self) -> int:
        """Number of output tokens before the one that is sampled."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """End-of-sequence and stop tokens."""

    @property
    def num_proposed(self) -> int:
        """Number of proposed tokens at the end of `tokens`."""


Forbidden = Mapping[str, Tensor | None]
"""Tokens that a grammar forbids, bool on the CPU, by request id; None: the grammar failed.

[V]; or [n, V] where tokens are proposed, with a row for each `Sequence.num_proposed` below n.
"""
NOTHING: Forbidden = MappingProxyType({})
"""No forbidden tokens for any request."""
Draw = Callable[[Tensor, Seq[SamplerRow]], list[int]]
"""Function that takes a token for each of the adjusted rows [R, V] of sequences [R]."""
Sampler = Callable[[Tensor, Seq[SamplerRow], Forbidden], list[Sampled]]
"""Signature of `sample` and of the function that `EngineConfig.sampler` may name instead."""


def sample(
    logits: Tensor,
    sequences: Seq[SamplerRow],
    forbidden: Forbidden = NOTHING,
    draw: Draw | None = None,
) -> list[Sampled]:
    """One result per row of `logits` [R, V], float32, which belong to `sequences` [R].

    `draw` takes the tokens of all rows, greedy ones included; None: this module does. A row whose
    logits have NaN or infinity gets an error, and so does a row without an allowed token; the other
    rows are not affected. `logits` may be changed.
    """
    if not sequences:
        return []  # the recursion below passes no rows if none is finite
    rows = vocab_blocks.padded(logits)
    tops = vocab_blocks.maxima(rows)
    finite = tops.amax(dim=-1).isfinite()  # the maximum of a row with a NaN is NaN
    if not finite.all():
        those = list(compress(sequences, finite.tolist()))
        good = iter(sample(logits[finite], those, forbidden, draw))
        return [next(good) if ok else Sampled(0, error=NOT_FINITE) for ok in finite.tolist()]
    logprobs_of = _logprobs(rows, tops, sequences, logits.shape[1])
    dead: list[bool] = []
    if forbidden or any(_is_adjusted(sequence) for sequence in sequences):
        rows = rows if logprobs_of is None else rows.clone()
        adjust(rows, sequences, forbidden)
        tops = vocab_blocks.maxima(rows)
        dead = (tops.amax(dim=-1) == -torch.inf).tolist()
    if draw is None:
        tokens = _tokens(rows, tops, sequences, logits.shape[1])
    else:
        tokens = draw(rows[:, : logits.shape[1]], sequences)
    if logprobs_of is None:
        sampled = [Sampled(token) for token in tokens]
    else:
        sampled = list(map(Sampled, tokens, logprobs_of(tokens)))
    for row in compress(range(len(dead)), dead):
        sampled[row] = Sampled(0, error=NONE_LEFT, is_refused=True)
    return sampled


def sampler_for(vocab_size: int) -> Sampler:
    """`sample` over `vocab_size` logits, for a model with another number of them, as draft models
    have: logits that it lacks are -inf, and those beyond are dropped."""

    def fitted(
        logits: Tensor, sequences: Seq[SamplerRow], forbidden: Forbidden = NOTHING
    ) -> list[Sampled]:
        missing = vocab_size - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        elif missing < 0:
            logits = logits[:, :vocab_size].contiguous()
        return sample(logits, sequences, forbidden)

    return fitted


# Log-probabilities.


def _logprobs(
    rows: Tensor, tops: Tensor, sequences: Seq[SamplerRow], vocab_size: int
) -> Callable[[list[int]], list[TokenLogprobs | None]] | None:
    """A function from the sampled tokens [R] to log-probabilities; None if no row needs them.

    What the function needs of the raw logits is computed now, before they are adjusted, except
    the sampled tokens' own logits, which it reads from `rows`.
    """
    counts = {
        row: min(sequence.request.sampling.logprobs, vocab_size)
        for row, sequence in enumerate(sequences)
        if sequence.request.sampling.logprobs is not None
    }
    if not counts:
        return None
    members = _tensor(list(counts), rows, torch.int64)
    total, best = _most_probable(rows, tops, members, max(1, *counts.values()))

    def logprobs_of(tokens: list[int]) -> list[TokenLogprobs | None]:
        sampled = rows[members, _tensor(tokens, rows, torch.int64)[members]] - total[:, 0]
        result: list[TokenLogprobs | None] = [None] * len(tokens)
        for (row, num), sampled_entry, top in zip(
            counts.items(), sampled.tolist(), best, strict=True
        ):
            result[row] = TokenLogprobs(sampled_entry, tuple(zip(*top, strict=True))[:num])
        return result

    return logprobs_of


def _most_probable(
    rows: Tensor, tops: Tensor, members: Tensor, k: int
) -> tuple[Tensor, list[tuple[list[int], list[float]]]]:
    """(log Σ exp of the rows `members` [n], as [n, 1]; the k most probable tokens of each).

    The tokens of a row are a pair (ids, log-probabilities), the most probable first.
    """
    ones = torch.ones(len(members), device=rows.device)
    weights = vocab_blocks.weights(_rows_of(rows, members), tops[members], ones)
    total = vocab_blocks.running_sums(weights)[:, -1:].log() + tops[members].amax(
        dim=-1, keepdim=True
    )
    values, ids = vocab_blocks.largest(rows, tops, members, k)
    return total, list(zip(ids.tolist(), (values - total).tolist(), strict=True))


def score(logits: Tensor, tokens: Seq[int], count: int) -> list[TokenLogprobs]:
    """The log-probability of one given token per row of `logits` [n, V].

    Each has the `count` most probable tokens of its row as alternatives.
    """
    rows = vocab_blocks.padded(logits)
    members = torch.arange(len(tokens), device=rows.device)
    count = min(count, logits.shape[1])
    total, best = _most_probable(rows, vocab_blocks.maxima(rows), members, max(1, count))
    logprobs = (rows[members, _tensor(tokens, rows, torch.int64)] - total[:, 0]).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(*top, strict=True))[:count])
        for logprob, top in zip(logprobs, best, strict=True)
    ]


def is_plain(sequence: Sequence) -> bool:
    """Whether a sequence needs no more of the sampler than temperature, top-k, top-p and min-p."""
    return not sequence.is_special and not (
        sequence.num_output < sequence.request.sampling.min_tokens
    )


# Bias and penalties.


def _is_adjusted(sequence: SamplerRow) -> bool:
    params = sequence.request.sampling
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or sequence.num_output < params.min_tokens
        or params.allowed_token_ids is not None
        or sequence.request.bad_token_ids
    )


def adjust(rows: Tensor, sequences: Seq[SamplerRow], forbidden: Forbidden = NOTHING) -> None:
    """Apply logit bias, penalties and forbidden tokens to logits, in place.

    `rows` [R, ≥ V] belong to `sequences` [R]. A forbidden token's logit becomes -inf.
    """
    bias, seen, written, ends = (_Cells(rows) for _ in range(4))
    for row, sequence in enumerate(sequences):
        params = sequence.request.sampling
        if params.logit_bias:
            bias.add(row, *zip(*params.logit_bias, strict=True))
        if params.repetition_penalty != 1.0:
            seen.add(row, sequence.tokens, params.repetition_penalty)
        if (params.presence_penalty or params.frequency_penalty) and sequence.num_output:
            times = Counter(sequence.tokens[sequence.num_prompt :])
            amounts = params.frequency_penalty * np.fromiter(times.values(), np.float32)
            written.add(row, list(times), amounts + params.presence_penalty)
        if sequence.num_output < params.min_tokens:
            ends.add(row, [i for i in sequence.end_token_ids if i < rows.shape[1]], -np.inf)
        output = sequence.tokens[sequence.num_prompt :] if sequence.request.bad_token_ids else []
        for *first, last in sequence.request.bad_token_ids:
            if output[max(0, len(output) - len(first)) :] == first:
                ends.add(row, [last], -np.inf)
    flat = rows.view(-1)
    if bias.ids:
        flat.index_add_(0, *bias.tensors())
    if seen.ids:
        index, by = seen.tensors()
        before = flat[index]  # repeated ids are harmless: each writes the same result
        # What a penalty near 0 makes of a logit may be beyond float32, and stays a number.
        by = by.clamp(min=torch.finfo(by.dtype).tiny)
        after = torch.where(before > 0, before / by, before * by)
        flat[index] = after.clamp(max=torch.finfo(after.dtype).max)
    if written.ids:
        index, by = written.tensors()
        flat[index] -= by
    if ends.ids:
        index, by = ends.tensors()
        flat[index] = by
    for row, sequence in enumerate(sequences):
        allowed = sequence.request.sampling.allowed_token_ids
        if allowed is not None:
            ids = _tensor(list(allowed), rows, torch.int64)
            logits = rows[row, ids]
            rows[row] = -torch.inf
            rows[row, ids] = logits
        mask = forbidden.get(sequence.request_id)
        if mask is not None:
            if mask.dim() == 2:  # a row behind the last mask is not used
                mask = mask[min(sequence.num_proposed, len(mask) - 1)]
            rows[row, : len(mask)].masked_fill_(mask.to(rows.device), -torch.inf)


class _Cells:
    """Token ids of several rows with a number each, collected for one tensor operation."""

    def __init__(self, rows: Tensor) -> None:
        self.ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._rows = rows

    def add(self, row: int, ids: Seq[int], values: object) -> None:
        """Add ids of one row. `values`: one number per id, or one number for all."""
        numbers = np.frombuffer(array("q", ids), np.int64)
        self.ids.append(numbers + row * self._rows.shape[1])
        self._values.append(np.broadcast_to(np.asarray(values, np.float32), numbers.shape))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(indices into the flattened rows, numbers)"""
        device = self._rows.device
        ids, values = np.concatenate(self.ids), np.concatenate(self._values)
        return torch.from_numpy(ids).to(device), torch.from_numpy(values).to(device)


# Drawing.


def _tokens(rows: Tensor, tops: Tensor, sequences: Seq[SamplerRow], vocab_size: int) -> list[int]:
    """A token for each row: the greedy one, or one that is drawn."""
    drawn = [row for row, s in enumerate(sequences) if s.request.sampling.temperature > 0]
    tokens: list[int] = [0] * len(sequences)
    if len(drawn) < len(sequences):
        tokens = vocab_blocks.argmax(rows, tops).tolist()
    if drawn:
        for row, token in _draw(rows, tops, sequences, drawn, vocab_size).items():
            tokens[row] = token
    return tokens


def _draw(
    rows: Tensor, tops: Tensor, sequences: Seq[SamplerRow], drawn: list[int], vocab_size: int
) -> dict[int, int]:
    """Draw a token for each of the rows `drawn`: {row: token}.

    Rows are grouped by top-k, rounded up to a power of two; rows without top-k are a group too.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for row in drawn:
        k = max(0, min(sequences[row].request.sampling.top_k, vocab_size))
        groups[min(vocab_size, 1 << (k - 1).bit_length()) if k else 0].append(row)
    tokens: dict[int, int] = {}
    for k, group in groups.items():
        members = _tensor(group, rows, torch.int64)
        chosen = [sequences[row] for row in group]
        if k:
            values, ids = vocab_blocks.largest(rows, tops, members, k)
            drawn_tokens = _draw_from_candidates(values, ids, chosen)
        elif rows.device.type == "cpu" and not isinstance(loader.library(), str):
            drawn_tokens = _draw_natively(rows, tops, group, chosen)
        else:
            drawn_tokens = _draw_from_all(_rows_of(rows, members), tops[members], chosen)
        tokens.update(zip(group, drawn_tokens, strict=True))
    return tokens


def _draw_from_candidates(values: Tensor, ids: Tensor, sequences: list[SamplerRow]) -> list[int]:
    """Draw one token per row from its candidates `values`, `ids` [n, k], most probable first."""
    params = [sequence.request.sampling for sequence in sequences]
    top_k, top_p, min_p = (
        _tensor(column, values, torch.float64).unsqueeze(1)
        for column in zip(*((p.top_k, p.top_p, p.min_p) for p in params), strict=True)
    )
    weights = vocab_blocks.weights(values, values[:, :1], _temperatures(params, values)).double()
    weights *= torch.arange(values.shape[1], device=values.device) < top_k
    sums = weights.cumsum(dim=-1)  # sequential, so zeros after a row's own k change no bit
    weights *= (sums - weights < top_p * sums[:, -1:]) & (weights >= min_p)
    sums = weights.cumsum(dim=-1)
    index = vocab_blocks.invert(sums, _points(sequences, sums) * sums[:, -1])
    tokens: list[int] = ids.gather(1, index.unsqueeze(1)).squeeze(1).tolist()
    return tokens


def _draw_natively(
    rows: Tensor, tops: Tensor, group: list[int], sequences: list[SamplerRow]
) -> list[int]:
    """The same as `_draw_from_all` in a fifth of the time, by the C++ kernel.

    `group`: the rows of the sequences.
    """
    record, entries = loader.records()["DrawRow"], []
    for row, sequence in zip(group, sequences, strict=True):
        p, seed = sequence.request.sampling, sequence.request.seed & _MASK64
        numbers = p.temperature, p.top_p, p.min_p, row, seed, len(sequence.tokens)
        entries.append(record.pack(*numbers))
    tokens = array("q", bytes(8 * len(group)))
    loader.loaded().infer_draw(
        *(rows.data_ptr(), tops.data_ptr(), rows.stride(0), rows.shape[1], tops.shape[1]),
        *(b"".join(entries), len(entries), tokens.buffer_info()[0]),
        num_threads(),
    )
    return tokens.tolist()


def _draw_from_all(rows: Tensor, tops: Tensor, sequences: list[SamplerRow]) -> list[int]:
    """Draw one token per row [n, V] without top-k; `tops` [n, blocks]: the blocks' maxima."""
    params = [sequence.request.sampling for sequence in sequences]
    weights = vocab_blocks.weights(rows, tops, _temperatures(params, rows))
    sums = vocab_blocks.running_sums(weights)
    totals = sums[:, -1].tolist()
    for i, p in enumerate(params):
        if p.min_p > 0.0:
            vocab_blocks.at_least(weights[i], p.min_p, weights[i])
            sums[i] = vocab_blocks.running_sums(weights[i : i + 1])[0]
    tokens: list[int] = vocab_blocks.pick(weights, sums, _points(sequences, sums)).tolist()
    for i, p in enumerate(params):
        if p.top_p < 1.0:
            tokens[i] = _keep_top_p(weights[i], p.top_p * totals[i], tokens[i], sequences[i])
    return tokens


def _keep_top_p(weights: Tensor, limit: float, token: int, sequence: SamplerRow) -> int:
    """A token for which the tokens of higher rank have less weight together than `limit`.

    `token` is the first attempt.
    """
    # The loop ends: each attempt leaves fewer tokens, and none has a higher rank than the most
    # probable one.
    for attempt in count(1):
        weights = vocab_blocks.more_probable(weights, token)
        sums = vocab_blocks.running_sums(weights.unsqueeze(0))
        rest = sums[0, -1].item()
        if not (rest > 0 and rest >= limit):
            break
        points = _points([sequence], sums, attempt)
        token = int(vocab_blocks.pick(weights.unsqueeze(0), sums, points))
    return token


def _points(sequences: list[SamplerRow], like: Tensor, attempt: int = 0) -> Tensor:
    points = [uniform(s.request.seed, len(s.tokens), attempt) for s in sequences]
    return _tensor(points, like, torch.float64)


def _temperatures(params: list[Sampling], like: Tensor) -> Tensor:
    return _tensor([p.temperature for p in params], like, torch.float32)


def _tensor(numbers: Seq[float], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).to(like.device)


def _rows_of(rows: Tensor, members: Tensor) -> Tensor:
    """The rows `members`, which are ascending; without a copy if they are consecutive."""
    first, last = int(members[0]), int(members[-1])
    if last - first < len(members):
        return rows[first : last + 1]
    return rows.index_select(0, members)
