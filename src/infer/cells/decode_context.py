"""`Context`: decodes batches of tokens over cells that the caller manages."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.cells.batch import Batch, BatchLimits, CheckedBatch, check_batch
from infer.cells.cell_attention import CellAttention, KeyRotation, rotation_problem, stopping_at
from infer.cells.cell_model import CellModel, check_memory
from infer.cells.cell_table import CellRecord, CellStatus, CellTable
from infer.cells.state_file import SavedCells, StateHeader, read_state, write_state
from infer.cells.visibility import Visibility
from infer.errors import (
    CancelledError,
    ConfigError,
    EngineError,
    InferError,
    OverloadedError,
    RequestError,
)

Float32 = NDArray[np.float32]


class DecodeStatus(IntEnum):
    """The result of a decode. After every one but DONE nothing has changed."""

    DONE = 0
    """The tokens are in the cache, and the logits are there."""
    NO_FREE_CELLS = 1
    """There are fewer free cells than tokens in the batch."""
    ABORTED = 2
    """The callback stopped the decode."""
    INVALID_BATCH = -1
    """A value of the batch is not possible; `Context.last_error` names it."""
    OUT_OF_MEMORY = -2
    """The forward pass did not get its memory."""
    FAILED = -3
    """The forward pass raised an error."""


class _Abort(Exception):
    """The callback wants no more."""


class Context:
    """A cache of cells for a model.

    A decode goes: check the batch → give every token a cell → rotate keys whose cells were moved →
    the model's forward pass, part by part → commit. The rows of logits that the batch asked for
    replace those of the decode before. If anything fails before the commit, cells, keys and outputs
    are put back as they were. Nothing is evicted, queued or limited here: whoever calls decides
    what is kept. The forward pass, the storage and the attention are the engine's.
    """

    def __init__(
        self,
        model: CellModel,
        num_cells: int,
        max_seqs: int = 1,
        *,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        max_outputs: int = 512,
        raise_on_error: bool = False,
    ) -> None:
        """`num_cells`: tokens that the cache holds. `max_seqs`: sequences, numbered from 0.

        `n_batch`: most tokens of a batch. `n_ubatch`: most tokens of a forward pass; a larger batch
        is computed in parts. `max_outputs`: most tokens of a batch with logits. `raise_on_error`:
        a decode that fails raises `last_error`. Raises `ConfigError` for sizes below 1, and with
        the memory plan if the context does not fit into memory.
        """
        sizes = {"num_cells": num_cells, "max_seqs": max_seqs, "n_batch": n_batch}
        for name, size in {**sizes, "n_ubatch": n_ubatch, "max_outputs": max_outputs}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(name, f"must be an integer of at least 1, not {size!r:.80}")
        check_memory(model, num_cells, max_seqs, n_ubatch)
        self.model = model
        config = model.config
        self.limits = BatchLimits(
            vocab_size=config.vocab_size,
            max_seq_len=model.max_seq_len,
            n_batch=n_batch,
            max_outputs=max_outputs,
        )
        self.n_ubatch = n_ubatch
        """Most tokens of a forward pass."""
        self.cells = CellTable(num_cells, max_seqs)
        """What each cell holds."""
        self.last_error: InferError | None = None
        """Why the last decode did not succeed; None if it did."""
        self._raises = raise_on_error
        self._storage = storage = model.storage(num_cells)
        self._attention = CellAttention(config, lambda windows: model.backend(storage, windows))
        self._threads = model.threads(self._attention.backend)
        self._rotation = KeyRotation(config, storage.keys)
        self._logits: Float32 = np.zeros((0, config.vocab_size), np.float32)
        self._output_ids: list[int] = []
        self._batch_cells: list[int] = []

    # Decoding.

    def decode(self, batch: Batch, *, abort: Callable[[], bool] | None = None) -> DecodeStatus:
        """Compute the tokens of a batch and keep their keys and values in free cells.

        `abort` is called before each part and each layer; True stops the decode. An error that it
        raises is passed on, and changes nothing either.
        """
        status, self.last_error = self._try(batch, abort)
        if self.last_error is not None and self._raises:
            raise self.last_error
        return status

    def _try(
        self, batch: Batch, abort: Callable[[], bool] | None
    ) -> tuple[DecodeStatus, InferError | None]:
        try:
            checked = check_batch(batch, self.limits, self.cells)
        except RequestError as error:
            return DecodeStatus.INVALID_BATCH, error
        num, num_free = len(checked.token), self.cells.num_free
        if num > num_free:
            return DecodeStatus.NO_FREE_CELLS, OverloadedError(
                f"the batch has {num} tokens, and {num_free} of {self.cells.num_cells} cells are"
                " free: remove sequences or ranges of them (seq_rm), or decode fewer tokens"
            )
        try:
            self._compute(checked, abort)
        except RequestError as error:
            return DecodeStatus.INVALID_BATCH, error
        except _Abort:
            return DecodeStatus.ABORTED, CancelledError("the callback stopped the decode")
        except MemoryError:
            return DecodeStatus.OUT_OF_MEMORY, EngineError(
                "the forward pass did not get its memory; a smaller n_ubatch needs less"
            )
        except RuntimeError as error:
            return DecodeStatus.FAILED, EngineError(f"the forward pass failed: {error}")
        return DecodeStatus.DONE, None

    def _compute(self, batch: CheckedBatch, abort: Callable[[], bool] | None) -> None:
        placed = self.cells.place(batch.token, batch.pos, batch.seq_ids)
        rotated: tuple[Tensor, NDArray[np.int64], list[Tensor]] | None = None
        try:
            if self.cells.shift.any():
                rotated = self._rotate()
            with self._threads:
                logits = self._forward(batch, Visibility(self.cells, batch, placed), abort)
        except BaseException:
            self.cells.take_back(placed)
            if rotated is not None:
                pages, shift, before = rotated
                self._rotation.take_back(pages, before)
                self.cells.shift[:] = shift
            raise
        self._logits, self._output_ids = logits, batch.flagged.tolist()
        self.cells.commit(placed)
        self._batch_cells = placed.cells.tolist()

    def _rotate(self) -> tuple[Tensor, NDArray[np.int64], list[Tensor]]:
        """Rotate the keys of all moved cells: (their pages, all shifts before, their old keys)."""
        shift = self.cells.shift.copy()
        moved = np.flatnonzero(shift)
        pages = torch.from_numpy(moved + 1)
        before = self._rotation.apply(pages, torch.from_numpy(shift[moved]))
        self.cells.shift[:] = 0
        return pages, shift, before

    @torch.inference_mode()
    def _forward(
        self, batch: CheckedBatch, visibility: Visibility, abort: Callable[[], bool] | None
    ) -> Float32:
        """The logits of the flagged tokens, [num_outputs, V], in the order of the batch."""
        model, num = self.model.model, len(batch.token)
        logits = np.empty((len(batch.flagged), self.limits.vocab_size), np.float32)
        is_flagged = np.zeros(num, np.bool_)
        is_flagged[batch.flagged] = True

        def check() -> None:
            if abort is not None and abort():
                raise _Abort

        for first in range(0, num, self.n_ubatch):
            check()
            part = visibility.part(first, min(first + self.n_ubatch, num), self._attention.windows)
            attend = self._attention.plan(part)
            tokens = torch.from_numpy(batch.token[part.order])
            positions = torch.from_numpy(batch.pos[part.order])
            if abort is not None:
                attend = stopping_at(attend, check)
            hidden = model.forward(tokens, positions, attend)
            rows = np.flatnonzero(is_flagged[part.order])
            if len(rows):
                if len(rows) < len(hidden):
                    hidden = hidden.index_select(0, torch.from_numpy(rows))
                at = np.searchsorted(batch.flagged, part.order[rows])
                logits[at] = model.logits(hidden).float().numpy()
        return logits

    # Output.

    @property
    def num_outputs(self) -> int:
        """Number of rows of logits, R."""
        return len(self._output_ids)

    @property
    def output_ids(self) -> list[int]:
        """Index in the batch of each row of logits, [R]."""
        return list(self._output_ids)

    def logits(self) -> Float32:
        """The logits of the flagged tokens of the last decode that succeeded, [R, V].

        The array is the context's own until the next decode, which makes a new one.
        """
        return self._logits

    def logits_ith(self, i: int) -> Float32:
        """The logits [V] of token `i` of the last batch that was decoded; negative: from the end.

        Raises `RequestError` if there is no such token or it was not flagged.
        """
        num_decoded = len(self._batch_cells)
        index = i + num_decoded if i < 0 else i
        if not 0 <= index < num_decoded:
            raise RequestError(
                f"the last batch has {num_decoded} tokens, so there is no token {i}",
                param="i",
            )
        row = int(np.searchsorted(self._output_ids, index))
        if row == len(self._output_ids) or self._output_ids[row] != index:
            raise RequestError(
                f"token {index} of the last batch was not flagged for logits; flagged were"
                f" {self._output_ids[:20]}",
                param="i",
            )
        logits: Float32 = self._logits[row]
        return logits

    @property
    def batch_cells(self) -> list[int]:
        """Cell that each token of the last decode that succeeded has got, [T], in the order of the
        batch. A cell may have been freed since, or moved to another position."""
        return list(self._batch_cells)

    # Cells. Ranges of positions are half-open, and -1 is an open end.

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share the cells of `src` at the positions `p0` to `p1`."""
        self._check_seqs(src=src, dst=dst)
        self.cells.copy(src, dst, *_range(p0, p1))

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> int:
        """Remove a range from a sequence (-1: from all); returns how many cells are freed.

        A cell is freed when no sequence holds it any more.
        """
        if seq != -1:
            self._check_seqs(seq=seq)
        return self.cells.remove(seq, *_range(p0, p1))

    def seq_keep(self, seq: int) -> int:
        """Remove all other sequences; returns how many cells are freed."""
        self._check_seqs(seq=seq)
        return self.cells.keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> int:
        """Add `delta` to the positions of a range of a sequence; returns how many cells are freed.

        The keys are rotated to their new positions before the next decode. A cell has one position,
        so a shared cell moves in all sequences that hold it. A cell whose position would be below 0
        is freed. Raises `RequestError` if a position would exceed the model's, and for a model
        whose stored keys cannot be moved: one with learned positions, which are part of the stored
        keys and values, or with a rotation of its own.
        """
        self._check_seqs(seq=seq)
        if self.model.has_learned_positions:
            raise RequestError(
                f"{self.model.name} has learned positions: they were added to the embeddings, so"
                " stored keys and values cannot be moved; remove the range (seq_rm) and decode"
                " its tokens again",
                param="delta",
            )
        if self._rotation_problem is not None:
            raise RequestError(
                f"stored keys of {self.model.name} cannot be moved: {self._rotation_problem};"
                " remove the range (seq_rm) and decode its tokens again",
                param="delta",
            )
        return self.cells.add(
            seq, *_range(p0, p1), _number("delta", delta), self.limits.max_seq_len
        )

    @functools.cached_property
    def _rotation_problem(self) -> str | None:
        """Why this model's keys cannot be rotated; computed when positions change first."""
        return rotation_problem(self.model.model, self.model.max_seq_len)

    def seq_pos_min(self, seq: int) -> int:
        """Smallest position of a sequence; -1 if it has no cells."""
        self._check_seqs(seq=seq)
        return self.cells.pos_min(seq)

    def seq_pos_max(self, seq: int) -> int:
        """Greatest position of a sequence; -1 if it has no cells."""
        self._check_seqs(seq=seq)
        return self.cells.pos_max(seq)

    def seq_tokens(self, seq: int) -> list[int]:
        """Token ids of a sequence's cells, in the order of their positions."""
        self._check_seqs(seq=seq)
        tokens: list[int] = self.cells.token[self.cells.row(seq) - 1].tolist()
        return tokens

    def clear(self) -> None:
        """Free all cells. The logits of the last decode stay."""
        self.cells.clear()

    def status(self) -> CellStatus:
        """Numbers of cells used, free and shared, and of each sequence."""
        return self.cells.status()

    def records(self) -> list[CellRecord]:
        """All cells in use."""
        return self.cells.records()

    def dump(self, text: Callable[[int], str] | None = None) -> str:
        """A table of the cells in use, for a reader; `text` gives a token's text."""
        return self.cells.dump(text)

    def _check_seqs(self, **seqs: int) -> None:
        for name, seq in seqs.items():
            if not 0 <= _number(name, seq) < self.cells.max_seqs:
                raise RequestError(
                    f"{name}={seq}: a context of max_seqs={self.cells.max_seqs} has the sequences"
                    f" 0 to {self.cells.max_seqs - 1}",
                    param=name,
                )

    # State.

    def save(self, path: str | Path) -> int:
        """Write all cells to a safetensors file; returns their number. See `cells.state_file`."""
        return self._save(Path(path), np.flatnonzero(self.cells.pos >= 0), None)

    def load(self, path: str | Path) -> int:
        """Replace all cells by those of a file that `save` wrote; returns their number.

        Raises `LoadError`, and changes nothing, for a file of another model, dtype or layout, or
        one that does not fit.
        """
        saved = read_state(Path(path), self._header("context"), self.limits, self.cells)
        self.cells.clear()
        self._fill(saved)
        return len(saved.token)

    def save_seq(self, path: str | Path, seq: int) -> int:
        """Write the cells of one sequence to a safetensors file; returns their number."""
        self._check_seqs(seq=seq)
        return self._save(Path(path), self.cells.row(seq) - 1, seq)

    def load_seq(self, path: str | Path, seq: int) -> int:
        """Replace the cells of a sequence by those of a file that `save_seq` wrote.

        Returns their number. Raises `LoadError`, and changes nothing, as `load` does.
        """
        self._check_seqs(seq=seq)
        saved = read_state(Path(path), self._header("sequence"), self.limits, self.cells, seq)
        self.cells.remove(seq, -1, -1)
        self._fill(saved)
        return len(saved.token)

    def _header(self, kind: str) -> StateHeader:
        keys = self._storage.keys
        return StateHeader(kind, self.model.fingerprint, self.model.name, keys[0], len(keys))

    def _save(self, path: Path, cells: NDArray[np.int64], seq: int | None) -> int:
        seq_ids: list[tuple[int, ...]]
        if seq is None:
            held = self.cells.held[:, cells].T
            seq_ids = [tuple(np.flatnonzero(row).tolist()) for row in held]
        else:
            seq_ids = [(seq,)] * len(cells)
        pages = torch.from_numpy(cells + 1)
        caches = [
            [cache.index_select(0, pages).squeeze(1) for cache in kind]
            for kind in (self._storage.keys, self._storage.values)
        ]
        table = self.cells
        saved = SavedCells(
            table.token[cells], table.pos[cells], table.shift[cells], seq_ids, *caches
        )
        write_state(path, self._header("context" if seq is None else "sequence"), saved)
        return len(cells)

    def _fill(self, saved: SavedCells) -> None:
        cells = self.cells.put(saved.token, saved.pos, saved.shift, saved.seq_ids)
        pages = torch.from_numpy(cells + 1)
        for caches, kept in (
            (self._storage.keys, saved.keys),
            (self._storage.values, saved.values),
        ):
            for cache, tensor in zip(caches, kept, strict=True):
                cache.index_copy_(0, pages, tensor.unsqueeze(1))


def _number(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        message = f"{name} must be an integer, not {type(value).__name__}"
        raise RequestError(message, param=name) from None


def _range(p0: int, p1: int) -> tuple[int, int]:
    return _number("p0", p0), _number("p1", p1)
