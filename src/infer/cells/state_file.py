"""Cells on disk: safetensors files with the tokens, positions, sequences, keys and values of cells.

The header of a file names the model's fingerprint, the dtype and the layout of keys and values. A
file is read only by a context of the same three, and everything in it is checked before any cell
changes. Keys of cells that were moved and not yet rotated are stored with the shift that they
still need. A file is written beside its place and then renamed, so a full disk leaves an old file
as it was.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infer.cells.batch import BatchLimits
from infer.cells.cell_table import CellTable, Int64
from infer.errors import LoadError

FORMAT = "infer.cells 1"
"""Name and version of the format."""
_DTYPES = {"I64": "int64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, eq=False)
class StateHeader:
    """What a file and a context must agree on."""

    kind: str
    """"context" or "sequence"."""
    fingerprint: str
    """Fingerprint of the model."""
    model_name: str
    """Name of the model, for messages."""
    cache: Tensor
    """Keys of one layer, [pages, 1, G, D], for dtype and layout."""
    num_layers: int
    """Number of layers."""

    def fields(self) -> dict[str, str]:
        """The fields as a file stores them."""
        _, _, heads, size = self.cache.shape
        return {
            "format": FORMAT,
            "kind": self.kind,
            "model": self.fingerprint,
            "dtype": str(self.cache.dtype).removeprefix("torch."),
            "layout": f"{self.num_layers} layers, {heads} heads of {size}",
            "model_name": self.model_name,
        }


@dataclass(frozen=True, slots=True, eq=False)
class SavedCells:
    """The content of n cells."""

    token: Int64
    """Token ids, [n]."""
    pos: Int64
    """Positions, [n]."""
    shift: Int64
    """Positions by which the keys are still to be rotated, [n]."""
    seq_ids: list[tuple[int, ...]]
    """Sets of sequences, [n]."""
    keys: Sequence[Tensor]
    """Keys of each layer, [n, G, D]."""
    values: Sequence[Tensor]
    """Values of each layer, [n, G, D]."""


def write_state(path: Path, header: StateHeader, saved: SavedCells) -> None:
    """Write a file; `OSError` if that is not possible."""
    ends = np.cumsum([0, *map(len, saved.seq_ids)])
    ids = [seq for members in saved.seq_ids for seq in members]
    tensors = {
        "token": torch.from_numpy(saved.token),
        "pos": torch.from_numpy(saved.pos),
        "shift": torch.from_numpy(saved.shift),
        "seq_ends": torch.from_numpy(ends.astype(np.int64)),
        "seq_ids": torch.tensor(ids, dtype=torch.int64),
    }
    for layer, (key, value) in enumerate(zip(saved.keys, saved.values, strict=True)):
        tensors[f"keys.{layer}"], tensors[f"values.{layer}"] = key, value
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(number)
    try:
        save_file(tensors, name, metadata=header.fields())
        os.replace(name, path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from None
    finally:
        Path(name).unlink(missing_ok=True)


def read_state(
    path: Path, header: StateHeader, limits: BatchLimits, cells: CellTable, seq: int | None = None
) -> SavedCells:
    """The content of a file for a context. `seq`: the sequence that gets the cells of a file of
    one sequence.

    Raises `LoadError` if the file cannot be read, is of another model, dtype or layout, or does not
    fit into the context.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return _read(path, file, header, limits, cells, seq)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: cannot be read as saved cells ({error})") from None


def _read(
    path: Path,
    file: Any,
    header: StateHeader,
    limits: BatchLimits,
    cells: CellTable,
    seq: int | None,
) -> SavedCells:
    wanted, stored = header.fields(), file.metadata() or {}
    for name in ("format", "kind", "model", "dtype", "layout"):
        if stored.get(name) != wanted[name]:
            of = f", of the model {stored.get('model_name')!r:.80}" if name == "model" else ""
            raise LoadError(
                f"{path}: its {name} is {stored.get(name)!r:.80}{of}; this context reads"
                f" {wanted[name]!r}{' (' + header.model_name + ')' if of else ''}"
            )
    num, dtype = _shape(path, file, "token")[0], wanted["dtype"]
    _, _, heads, size = header.cache.shape
    shapes = {name: ("int64", [num]) for name in ("token", "pos", "shift")}
    shapes["seq_ends"] = ("int64", [num + 1])
    for layer in range(header.num_layers):
        shapes[f"keys.{layer}"] = shapes[f"values.{layer}"] = (dtype, [num, heads, size])
    for name, (kind, shape) in shapes.items():
        if (found_shape := _shape(path, file, name)) != shape:
            raise LoadError(f"{path}: the tensor {name!r} is {found_shape}, should be {shape}")
        if (found_kind := _DTYPES.get(file.get_slice(name).get_dtype())) != kind:
            raise LoadError(f"{path}: the tensor {name!r} is {found_kind}, should be {kind}")
    token, pos, shift, ends, ids = (
        file.get_tensor(name).numpy() for name in ("token", "pos", "shift", "seq_ends", "seq_ids")
    )
    room = cells.num_cells
    if seq is not None:  # cells that another sequence shares with this one stay
        of_seq = cells.held[seq] & (cells.held.sum(axis=0) == 1)
        room = cells.num_free + int(of_seq.sum())
    if num > room:
        raise LoadError(f"{path}: it has {num} cells, and there is room for {room}")
    bad = (token < 0) | (token >= limits.vocab_size) | (pos < 0) | (pos >= limits.max_seq_len)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise LoadError(
            f"{path}: token {token[at]} at position {pos[at]} is not possible: ids are below"
            f" {limits.vocab_size}, positions below {limits.max_seq_len}"
        )
    if (np.abs(shift) > limits.max_seq_len).any():
        raise LoadError(f"{path}: a shift is larger than the {limits.max_seq_len} positions")
    members: tuple[int, ...] = () if seq is None else (seq,)
    seq_ids = [members] * num if members else _sets(path, ends, ids, num, cells.max_seqs)
    keys, values = (
        [file.get_tensor(f"{kind}.{layer}") for layer in range(header.num_layers)]
        for kind in ("keys", "values")
    )
    return SavedCells(token, pos, shift, seq_ids, keys, values)


def _shape(path: Path, file: Any, name: str) -> list[int]:
    try:
        shape: list[int] = file.get_slice(name).get_shape()
    except SafetensorError:
        raise LoadError(f"{path}: the tensor {name!r} is missing") from None
    return shape or [0]


def _sets(path: Path, ends: Int64, ids: Int64, num: int, max_seqs: int) -> list[tuple[int, ...]]:
    """The set of each cell; `LoadError` if one is empty or names a sequence that is not there."""
    if ((ids < 0) | (ids >= max_seqs)).any():
        raise LoadError(
            f"{path}: it has the sequence {int(ids.max())}; this context has 0 to {max_seqs - 1}"
        )
    if ends[0] != 0 or ends[-1] != len(ids) or (np.diff(ends) < 1).any():
        raise LoadError(f"{path}: its sets of sequences are not whole")
    return [
        tuple(sorted(set(ids[begin:end].tolist())))
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
