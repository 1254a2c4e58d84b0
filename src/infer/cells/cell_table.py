"""`CellTable`: which token, position and sequences each cell of a cache has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer.errors import RequestError

Int64 = NDArray[np.int64]
FREE = -1
"""Position and token of a free cell."""


class CellRecord(NamedTuple):
    """One cell in use."""

    cell: int
    """Number of the cell."""
    pos: int
    """Position of its token."""
    seq_ids: tuple[int, ...]
    """Sequences that hold it."""
    token: int
    """Id of its token."""


@dataclass(frozen=True, slots=True)
class SequenceCells:
    """The cells of one sequence, counted."""

    num_cells: int
    """Number of its cells."""
    pos_min: int
    """Smallest position."""
    pos_max: int
    """Greatest position."""


@dataclass(frozen=True, slots=True)
class CellStatus:
    """The cells of a context, counted."""

    num_cells: int
    """Number of all cells."""
    num_used: int
    """Number of cells that some sequence holds."""
    num_shared: int
    """Number of cells that several sequences hold."""
    num_shifted: int
    """Number of cells whose keys the next decode rotates to their new positions."""
    sequences: dict[int, SequenceCells]
    """Counts of each sequence that has cells."""

    @property
    def num_free(self) -> int:
        """Number of cells that no sequence holds."""
        return self.num_cells - self.num_used


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Tokens of a batch that have got cells."""

    cells: Int64
    """Cell of each token, [T]."""
    index: Int64
    """Place of each token's cell in the row of its sequence, if it has only one; [T]."""
    sequences: list[int]
    """Sequences that have got cells."""


class CellTable:
    """The table knows no keys and values: it only says where they are. A cell is free when no
    sequence holds it. Each sequence's cells in the order of their positions are kept as a row of
    page numbers (cell + 1, because page 0 is padding), which is the page table of that sequence for
    attention. The row grows with each token; other changes mark it, and it is made again when it is
    next used."""

    def __init__(self, num_cells: int, max_seqs: int) -> None:
        """`num_cells` cells, all free, for sequences 0 to `max_seqs` - 1."""
        self.num_cells, self.max_seqs = num_cells, max_seqs
        self.pos = np.full(num_cells, FREE, np.int64)
        """Position of each cell's token; `FREE`."""
        self.token = np.full(num_cells, FREE, np.int64)
        """Token id of each cell; `FREE`."""
        self.shift = np.zeros(num_cells, np.int64)
        """Positions by which each cell's key is still to be rotated."""
        self.batch = np.full(num_cells, FREE, np.int64)
        """Index in the last batch of the token that got each cell; `FREE` for the others."""
        self.held = np.zeros((max_seqs, num_cells), np.bool_)
        """Whether a sequence holds a cell."""
        self._num_seqs = np.zeros(num_cells, np.int32)
        self._rows = np.zeros((max_seqs, 64), np.int64)
        self._lengths = np.zeros(max_seqs, np.int64)
        self._last = np.full(max_seqs, FREE, np.int64)
        self._gapless = np.ones(max_seqs, np.bool_)
        self._stale = np.zeros(max_seqs, np.bool_)

    # Reading.

    @property
    def num_free(self) -> int:
        """Number of cells that no sequence holds."""
        return self.num_cells - int(np.count_nonzero(self._num_seqs))

    def pos_min(self, seq: int) -> int:
        """Smallest position of a sequence; -1 if it has no cells."""
        row = self.row(seq)
        return int(self.pos[row[0] - 1]) if len(row) else FREE

    def pos_max(self, seq: int) -> int:
        """Greatest position of a sequence; -1 if it has no cells."""
        if self._stale[seq]:
            self._make_row(seq)
        return int(self._last[seq])

    def row(self, seq: int) -> Int64:
        """Page numbers of a sequence's cells, in the order of their positions; [n]."""
        if self._stale[seq]:
            self._make_row(seq)
        return self._rows[seq, : self._lengths[seq]]

    def rows(self, seqs: Int64, width: int) -> Int64:
        """The first `width` page numbers of several sequences, [len(seqs), width].

        Entries after a sequence's last cell have no meaning.
        """
        if len(seqs) and (np.diff(seqs) == 1).all():
            return self._rows[seqs[0] : seqs[-1] + 1, :width]
        return self._rows[seqs, :width]

    def is_gapless(self, seq: int) -> bool:
        """Whether a sequence's positions are consecutive, none twice."""
        if self._stale[seq]:
            self._make_row(seq)
        return bool(self._gapless[seq])

    def seen_by(self, seqs: Iterable[int]) -> Int64:
        """Page numbers of the cells that any of the sequences holds, in the order of positions."""
        cells = np.flatnonzero(self.held[list(seqs)].any(axis=0))
        return cells[np.argsort(self.pos[cells], kind="stable")] + 1

    def records(self) -> list[CellRecord]:
        """All cells in use, in the order of their numbers."""
        return [
            CellRecord(
                int(cell),
                int(self.pos[cell]),
                tuple(np.flatnonzero(self.held[:, cell]).tolist()),
                int(self.token[cell]),
            )
            for cell in np.flatnonzero(self._num_seqs)
        ]

    def status(self) -> CellStatus:
        """The counts of now."""
        sequences = {
            seq: SequenceCells(len(self.row(seq)), self.pos_min(seq), self.pos_max(seq))
            for seq in np.flatnonzero(self.held.any(axis=1)).tolist()
        }
        return CellStatus(
            self.num_cells,
            int(np.count_nonzero(self._num_seqs)),
            int(np.count_nonzero(self._num_seqs > 1)),
            int(np.count_nonzero(self.shift)),
            sequences,
        )

    # Placing tokens, and taking that back.

    def place(self, token: Int64, pos: Int64, seq_ids: list[tuple[int, ...]]) -> Placed:
        """Give each of T tokens the free cell of the lowest number. There must be enough.

        The positions of a sequence's tokens ascend, from the one after its last cell.
        """
        num = len(token)
        counts = np.fromiter(map(len, seq_ids), np.int64, num)
        seqs = np.fromiter((s for ids in seq_ids for s in ids), np.int64, int(counts.sum()))
        which = np.arange(num) if len(seqs) == num else np.repeat(np.arange(num), counts)
        # The entries of one sequence follow one another here, in the order of the batch.
        order = np.argsort(seqs, kind="stable")
        seqs, which = seqs[order], which[order]
        distinct, first, added = np.unique(seqs, return_index=True, return_counts=True)
        for seq in distinct[self._stale[distinct]].tolist():
            self._make_row(seq)
        cells = np.flatnonzero(self._num_seqs == 0)[:num]
        assert len(cells) == num, "too few free cells"
        at = self._lengths[seqs] + np.arange(len(seqs)) - np.repeat(first, added)
        self._widen(int(at.max()) + 1)  # may fail for want of memory, so it goes first
        self.pos[cells], self.token[cells], self._num_seqs[cells] = pos, token, counts
        self.held[seqs, cells[which]] = True
        self._rows[seqs, at] = cells[which] + 1
        self._lengths[distinct] += added
        self._last[distinct] = pos[which[first + added - 1]]
        index = np.empty(num, np.int64)
        index[which] = at
        return Placed(cells, index, distinct.tolist())

    def commit(self, placed: Placed) -> None:
        """Remember the cells of a batch that has been computed as those of the last one."""
        self.batch[:] = FREE
        self.batch[placed.cells] = np.arange(len(placed.cells))

    def take_back(self, placed: Placed) -> None:
        """Free the cells of `place`, after which nothing was changed."""
        self._free(placed.cells)
        self._stale[placed.sequences] = True

    def put(self, token: Int64, pos: Int64, shift: Int64, seq_ids: list[tuple[int, ...]]) -> Int64:
        """Fill free cells with cells of a saved state, which may have any positions.

        Returns their numbers. There must be enough.
        """
        cells = np.flatnonzero(self._num_seqs == 0)[: len(token)]
        assert len(cells) == len(token), "too few free cells"
        self.pos[cells], self.token[cells], self.shift[cells] = pos, token, shift
        for cell, members in zip(cells.tolist(), seq_ids, strict=True):
            self.held[list(members), cell] = True
            self._num_seqs[cell] = len(members)
        self._stale[sorted({seq for members in seq_ids for seq in members})] = True
        return cells

    # Changing sequences. `p0` to `p1` are half-open ranges of positions; -1 is an open end.

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let `dst` hold the cells of `src` in a range, too."""
        cells = self._cells_of(src, p0, p1)
        cells = cells[~self.held[dst, cells]]
        self.held[dst, cells] = True
        self._num_seqs[cells] += 1
        self._stale[dst] |= len(cells) > 0

    def remove(self, seq: int, p0: int, p1: int) -> int:
        """Take the cells of a range from a sequence (-1: from all); returns how many are freed."""
        if seq < 0:
            cells = self._in_range(np.flatnonzero(self._num_seqs), p0, p1)
            self._mark_holders(cells)
            self._free(cells)
            return len(cells)
        cells = self._cells_of(seq, p0, p1)
        self.held[seq, cells] = False
        self._num_seqs[cells] -= 1
        freed = cells[self._num_seqs[cells] == 0]
        self._free(freed)
        self._stale[seq] |= len(cells) > 0
        return len(freed)

    def keep(self, seq: int) -> int:
        """Take all cells from all other sequences; returns how many are freed."""
        freed = np.flatnonzero((self._num_seqs > 0) & ~self.held[seq])
        self._stale |= self.held.any(axis=1)
        self.held[:seq] = self.held[seq + 1 :] = False
        self._num_seqs[self.held[seq]] = 1
        self._free(freed)
        return len(freed)

    def add(self, seq: int, p0: int, p1: int, delta: int, max_seq_len: int) -> int:
        """Add `delta` to the positions of a sequence's cells in a range.

        A cell has one position: a shared cell moves in all sequences that hold it. A cell whose
        position would be below 0 is freed. Returns how many are freed. `RequestError` if a position
        would be `max_seq_len` or more.
        """
        cells = self._cells_of(seq, p0, p1)
        if not len(cells) or not delta:
            return 0
        moved = self.pos[cells] + delta
        if moved.max() >= max_seq_len:
            raise RequestError(
                f"delta={delta} moves position {moved.max() - delta} of sequence {seq} to"
                f" {moved.max()}; the model was loaded for the positions 0 to {max_seq_len - 1}"
                " (max_seq_len)",
                param="delta",
            )
        self._mark_holders(cells)
        self.pos[cells] = moved
        self.shift[cells] += delta
        freed = cells[moved < 0]
        self._free(freed)
        return len(freed)

    def clear(self) -> None:
        """Free all cells."""
        self._free(np.arange(self.num_cells))
        self._stale[:] = True

    def _cells_of(self, seq: int, p0: int, p1: int) -> Int64:
        return self._in_range(np.flatnonzero(self.held[seq]), p0, p1)

    def _in_range(self, cells: Int64, p0: int, p1: int) -> Int64:
        pos = self.pos[cells]
        return cells[(pos >= max(0, p0)) & ((pos < p1) | (p1 < 0))]

    def _mark_holders(self, cells: Int64) -> None:
        self._stale |= self.held[:, cells].any(axis=1)

    def _free(self, cells: Int64) -> None:
        self.held[:, cells] = False
        self.pos[cells] = self.token[cells] = self.batch[cells] = FREE
        self.shift[cells] = self._num_seqs[cells] = 0

    def _make_row(self, seq: int) -> None:
        cells = np.flatnonzero(self.held[seq])
        cells = cells[np.argsort(self.pos[cells], kind="stable")]
        pos = self.pos[cells]
        self._widen(len(cells))
        self._rows[seq, : len(cells)] = cells + 1
        self._lengths[seq] = len(cells)
        self._last[seq] = pos[-1] if len(cells) else FREE
        self._gapless[seq] = (np.diff(pos) == 1).all()
        self._stale[seq] = False

    def _widen(self, width: int) -> None:
        if width > self._rows.shape[1]:
            wider = np.zeros((self.max_seqs, max(width, 2 * self._rows.shape[1])), np.int64)
            wider[:, : self._rows.shape[1]] = self._rows
            self._rows = wider

    def check(self) -> None:
        """Assert the module's rules; for tests."""
        assert (self._num_seqs == self.held.sum(axis=0)).all(), "counts differ from the sets"
        is_free = self._num_seqs == 0
        assert ((self.pos == FREE) == is_free).all(), "a free cell has a position, or a used none"
        assert ((self.token == FREE) == is_free).all(), "a free cell has a token, or a used none"
        assert not self.shift[is_free].any(), "a free cell is to be rotated"
        assert (self.batch[is_free] == FREE).all(), "a free cell is one of the last batch"
        for seq in np.flatnonzero(~self._stale).tolist():
            cells = self.row(seq) - 1
            assert set(cells.tolist()) == set(np.flatnonzero(self.held[seq]).tolist())
            pos = self.pos[cells]
            assert (np.diff(pos) >= 0).all(), "a row is not in the order of positions"
            assert self._last[seq] == (pos[-1] if len(pos) else FREE)
            assert self._gapless[seq] == (np.diff(pos) == 1).all()

    def dump(self, text: Callable[[int], str] | None = None) -> str:
        """A table of the cells in use, for a reader; `text` gives a token's text. The column
        "batch" has the index of the token in the last batch, where the cell is one of that."""
        rows = [("cell", "pos", "batch", "sequences", "token")]
        for record in self.records():
            token = str(record.token)
            if text is not None:
                token += f" {text(record.token)!r}"
            ids = ",".join(map(str, record.seq_ids))
            index = int(self.batch[record.cell])
            batch = "" if index == FREE else str(index)
            rows.append((str(record.cell), str(record.pos), batch, ids, token))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            f"{row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}"
            f"  {row[3]:<{widths[3]}}  {row[4]}"
            for row in rows
        )
