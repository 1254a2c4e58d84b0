"""`Batch`: tokens to compute in one decode, each with a position and a set of sequences.

A batch is a caller's own object: flat arrays that a caller fills, and may fill again. A `Context`
checks it when it decodes it (`CheckedBatch`), because sequences, positions and sizes are the
context's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from infer.cells.cell_table import CellTable, Int64
from infer.errors import RequestError

NO_POSITION = -1
"""Value of `Batch.pos` for a token that comes after the last one of its sequences."""


class Batch:
    """Tokens to compute, in arrays of `capacity` entries, of which `num_tokens` are used."""

    def __init__(self, capacity: int) -> None:
        """Raises `RequestError` if `capacity` is not positive."""
        if _integer("capacity", capacity) < 1:
            raise RequestError(f"capacity must be at least 1, not {capacity}", param="capacity")
        self.capacity = capacity
        """Number of tokens that the arrays have room for."""
        self.num_tokens = 0
        """Number of tokens in the batch, T."""
        self.token = np.zeros(capacity, np.int64)
        """Token ids, [capacity]."""
        self.pos = np.full(capacity, NO_POSITION, np.int64)
        """Positions in the sequences, [capacity]; `NO_POSITION`: greatest of its sequences + 1."""
        self.seq_id: list[tuple[int, ...]] = [()] * capacity
        """Set of sequences of each token, [capacity]; ascending, none twice."""
        self.logits = np.zeros(capacity, np.bool_)
        """Whether the decode outputs the token's logits, [capacity]."""

    @classmethod
    def of(cls, tokens: Sequence[int], seq_id: int = 0) -> Batch:
        """A batch of the next tokens of one sequence; the last one has logits."""
        batch = cls(max(1, len(tokens)))
        for token in tokens:
            batch.add(token, seq_ids=(seq_id,))
        if tokens:
            batch.logits[len(tokens) - 1] = True
        return batch

    @property
    def n_seq_id(self) -> Int64:
        """Number of sequences of each token, [T]."""
        return np.array([len(ids) for ids in self.seq_id[: self.num_tokens]], np.int64)

    def add(
        self,
        token: int,
        pos: int | None = None,
        seq_ids: int | Iterable[int] = (0,),
        logits: bool = False,
    ) -> int:
        """Append a token; returns its index in the batch.

        `pos` None: the position after the last one of its sequences. `seq_ids`: the sequences that
        the token belongs to, one or several. Raises `RequestError` if the batch is full or a value
        is not an integer; the batch is then unchanged.
        """
        index = self.num_tokens
        if index == self.capacity:
            raise RequestError(
                f"the batch is full: it has room for {self.capacity} tokens; make it with a"
                " larger capacity, or decode it and clear it",
                param="capacity",
            )
        id_, position = _integer("token", token), NO_POSITION
        if pos is not None and (position := _integer("pos", pos)) < 0:
            raise RequestError(
                f"pos must be at least 0, or None for the next position, not {pos}", param="pos"
            )
        if isinstance(seq_ids, Iterable):
            members = tuple(sorted({_integer("seq_id", seq_id) for seq_id in seq_ids}))
        else:
            members = (_integer("seq_id", seq_ids),)
        self.token[index], self.pos[index] = id_, position
        self.seq_id[index], self.logits[index] = members, bool(logits)
        self.num_tokens += 1
        return index

    def clear(self) -> None:
        """Remove all tokens; the arrays stay."""
        self.num_tokens = 0
        self.pos.fill(NO_POSITION)
        self.logits.fill(False)


def _integer(name: str, value: SupportsIndex) -> int:
    if type(value) is int and abs(value) < 1 << 62:  # the usual case, in a tenth of the time
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = -(2**63) - 1
    if isinstance(value, bool) or not -(2**63) <= number < 2**63:
        what = f"{value!r:.80}" if isinstance(value, int) else type(value).__name__
        raise RequestError(f"{name} must be an integer of 64 bits, not {what}", param=name)
    return number


@dataclass(frozen=True, slots=True, eq=False)
class CheckedBatch:
    """A batch whose every value is possible in a context, with all positions resolved."""

    token: Int64
    """Token ids, [T]."""
    pos: Int64
    """Positions, [T]."""
    seq_ids: list[tuple[int, ...]]
    """Sets of sequences, [T]."""
    flagged: Int64
    """Indices of the tokens whose logits are wanted, ascending; [num_outputs]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What a context allows in a batch."""

    vocab_size: int
    """Number of token ids."""
    max_seq_len: int
    """Number of positions."""
    n_batch: int
    """Maximum number of tokens in a batch."""
    max_outputs: int
    """Maximum number of tokens with logits in a batch."""


def check_batch(batch: Batch, limits: BatchLimits, cells: CellTable) -> CheckedBatch:
    """The batch with its positions resolved; `RequestError` names the field that is wrong.

    Within a sequence, a batch's tokens must have consecutive positions in their order, and the
    first one must follow the sequence's last cell. A sequence without cells may begin anywhere.
    """
    num = batch.num_tokens
    if not 1 <= num <= limits.n_batch:
        wanted = f"1 to n_batch={limits.n_batch} tokens"
        raise RequestError(f"a batch must have {wanted}, not {num}", param="n_tokens")
    token, seq_ids = batch.token[:num].copy(), list(batch.seq_id[:num])
    if ((token < 0) | (token >= limits.vocab_size)).any():
        index = int(np.flatnonzero((token < 0) | (token >= limits.vocab_size))[0])
        raise RequestError(
            f"token {index} of the batch has the id {token[index]}; the model's ids are 0 to"
            f" {limits.vocab_size - 1}",
            param="token",
        )
    flagged = np.flatnonzero(batch.logits[:num])
    if len(flagged) > limits.max_outputs:
        raise RequestError(
            f"{len(flagged)} tokens of the batch are flagged for logits; the context has room for"
            f" max_outputs={limits.max_outputs}",
            param="logits",
        )
    pos = _positions(batch.pos[:num].tolist(), seq_ids, limits.max_seq_len, cells)
    return CheckedBatch(token, np.array(pos, np.int64), seq_ids, flagged)


def _positions(
    pos: list[int], seq_ids: list[tuple[int, ...]], max_seq_len: int, cells: CellTable
) -> list[int]:
    """The position of each token; `RequestError` if one leaves a gap or is there twice."""
    next_pos: dict[int, int] = {}
    for index, members in enumerate(seq_ids):
        if not members:
            raise RequestError(
                f"token {index} of the batch is in no sequence; give it at least one of 0 to"
                f" {cells.max_seqs - 1}",
                param="seq_id",
            )
        wanted = None
        for seq in members:
            if not 0 <= seq < cells.max_seqs:
                raise RequestError(
                    f"token {index} of the batch is in sequence {seq}; a context of"
                    f" max_seqs={cells.max_seqs} has the sequences 0 to {cells.max_seqs - 1}",
                    param="seq_id",
                )
            after = next_pos.get(seq)
            if after is None and (last := cells.pos_max(seq)) >= 0:
                after = last + 1
            if after is None:
                continue
            if wanted is not None and wanted != after:
                raise RequestError(
                    f"token {index} of the batch is in several sequences whose next positions"
                    f" differ ({wanted} and {after}); put it there once for each position",
                    param="pos",
                )
            wanted = after
        if pos[index] == NO_POSITION:
            pos[index] = wanted or 0
        elif wanted is not None and pos[index] != wanted:
            raise RequestError(
                f"token {index} of the batch is at position {pos[index]} of sequence {members[0]},"
                f" whose next position is {wanted}: positions have no gap, and none is there twice",
                param="pos",
            )
        if not 0 <= pos[index] < max_seq_len:
            raise RequestError(
                f"token {index} of the batch is at position {pos[index]}; the model was loaded"
                f" for the positions 0 to {max_seq_len - 1} (max_seq_len)",
                param="pos",
            )
        for seq in members:
            next_pos[seq] = pos[index] + 1
    return pos
