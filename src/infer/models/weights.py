"""`WeightSource`: supplies a checkpoint's tensors by name and checks that each is used."""

from __future__ import annotations

import math
import mmap
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from infer.errors import LoadError
from infer.files import MAX_INDEX_BYTES
from infer.kernels.blocks import BlockWeight
from infer.kernels.int8_weight import Int8Weight
from infer.kernels.loader import advise
from infer.kernels.native import embedding_is_packed
from infer.models.model_config import load_json
from infer.readable_text import listing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infer.kernels.linear.native_linear import PackedEmbedding

SINGLE_FILE = "model.safetensors"
"""Name of the file of a checkpoint that has only one."""
_SHARD = re.compile(r"(.+-)\d{5}-of-(\d{5})\.safetensors")
INDEX_FILE = "model.safetensors.index.json"
"""Name of the file that maps tensor names to files, in a checkpoint of several files."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt")
HeldWeights = Sequence[BlockWeight | Int8Weight]
"""The weights of a linear layer in a form that is kept as it is."""
BlockReader = Callable[[Mapping[str, tuple[int, int]], bool], HeldWeights | None]
"""(name and shape [out, in] of each weight of a linear layer, whether it has a gate) → its weights
in blocks, or in int8; None: they are not, or not in such as go together."""

_RECENT = 4
"""Number of tensors whose mapped pages stay in memory."""
_FLOATS = tuple(f"torch.{name}" for name in ("float32", "float16", "bfloat16", "float64"))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where a model's tensor is in a checkpoint: rows of a stored tensor."""

    name: str
    """Name of the stored tensor."""
    order: np.ndarray | slice | None = None
    """The rows; None: all, as they are."""
    total: int | None = None
    """Number of rows of the stored tensor; None: as many as the model's tensor has."""
    transposed: bool = False
    """Whether a matrix is stored as [in, out]."""
    heads: int | None = None
    """Number of rows in which a vector is stored, one for each head; None: it is a vector."""

    def of(self, stored: Tensor) -> Tensor:
        """The rows of a stored tensor, in the model's order."""
        if self.order is None:
            return stored
        if isinstance(self.order, slice):
            return stored[self.order]
        if stored.device.type == "meta":  # see `joined` of kernels.linear on why
            return stored.new_empty((len(self.order), *stored.shape[1:]))
        import torch  # a plan of memory does without

        return stored.index_select(0, torch.from_numpy(self.order).to(stored.device))

    def of_blocks(self, stored: BlockWeight | Int8Weight) -> Any:
        """The same rows of a stored matrix in blocks or in int8, in the same form."""
        if self.order is None:
            return stored
        order = self.order
        if isinstance(stored, Int8Weight):
            return stored.reordered(order)
        whole = range(stored.shape[0])
        num_rows = len(whole[order] if isinstance(order, slice) else order)
        rows = None if stored.rows is None else stored.rows[order]
        return replace(stored, shape=(num_rows, stored.shape[1]), rows=rows)


class WeightSource:
    """A checkpoint's tensors by name.

    A model takes each tensor that it needs with the shape that it expects. `finish` then raises one
    `LoadError` that lists every tensor that was missing, had the wrong shape or was not used.
    `open_checkpoint` reads safetensors files, one or several with an index. The files are
    memory-mapped and a tensor is converted when it is taken, so no weight is in memory twice.
    `dummy_source` makes random tensors of the requested shapes (`load_format=dummy`).
    """

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str, tuple[int, ...]], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        complete: bool = True,
        stored: Callable[[str], Tensor] | None = None,
        quantization: str | None = None,
        batch_invariant: bool = False,
        blocks: BlockReader | None = None,
        finished: Callable[[WeightSource], None] | None = None,
    ) -> None:
        """A source of the tensors `names`, converted to `dtype` on `device`.

        `read(name, shape)` returns a tensor. `complete`: tensors outside `names` do not exist.
        `stored(name)` returns a meta tensor of the shape that the file announces. `finished` is
        called when every tensor has been read.
        """
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        """Format in which linear layers hold the weights, such as int8; None: `dtype`."""
        self.batch_invariant = batch_invariant
        """Whether a row's product on a GPU must not depend on the other rows of a batch."""
        self._blocks = blocks
        self._left = set(names)
        self._names = frozenset(self._left)
        self._rows: Callable[[str], Rows] = Rows
        self._complete = complete
        self._read = read
        self._stored = stored
        self._finished = finished
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def with_layers(
        self,
        quantization: str | None,
        batch_invariant: bool = False,
        blocks: BlockReader | None = None,
    ) -> WeightSource:
        """A source of the same tensors for linear layers of this kind.

        `blocks` reads the weights that are to stay in the blocks of their file. Call it before any
        tensor is taken.
        """
        return WeightSource(
            self._left,
            self._read,
            dtype=self.dtype,
            device=self.device,
            complete=self._complete,
            stored=self._stored,
            quantization=quantization,
            batch_invariant=batch_invariant,
            blocks=blocks,
            finished=self._finished,
        )

    def noted(self, note: Callable[[str, Tensor], None]) -> WeightSource:
        """A source of the same tensors that calls `note(name, tensor)` for each one it reads.

        Call it before any tensor is taken.
        """

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            tensor = self._read(name, shape)
            note(name, tensor)
            return tensor

        def read_blocks(parts: Mapping[str, tuple[int, int]], gated: bool) -> HeldWeights | None:
            weights = None if self._blocks is None else self._blocks(parts, gated)
            for name, weight in zip(parts, weights or (), strict=False):
                note(name, weight.content())
            return weights

        return WeightSource(
            self._left,
            read,
            dtype=self.dtype,
            device=self.device,
            complete=self._complete,
            stored=self._stored,
            quantization=self.quantization,
            batch_invariant=self.batch_invariant,
            blocks=None if self._blocks is None else read_blocks,
            finished=self._finished,
        )

    def rehearsal(self) -> WeightSource | None:
        """A source of the same tensors on the meta device; None if their shapes are not known.

        A model built from it takes no memory and fails for the same reasons. So a small file that
        announces large tensors is refused before any memory is allocated.
        """
        if self._stored is None:
            return None
        import torch

        stored, meta = self._stored, torch.device("meta")
        return WeightSource(
            self._left, lambda name, shape: stored(name), dtype=self.dtype, device=meta
        )

    @property
    def rehearses(self) -> bool:
        """Whether the tensors have no memory: a model made of them is thrown away."""
        return self.device.type == "meta"

    def arrange(self, rows: Callable[[str], Rows]) -> None:
        """From now on, find the tensors that are asked for as `rows` says, by the model's names."""
        self._rows = rows

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, converted to `dtype`, on the device.

        If it is missing or has another shape, that is noted for `finish` and the result is zeros.
        """
        import torch

        rows = self._rows(name)
        if not self._complete:
            return self._converted(rows.name, self._read(rows.name, shape))
        if rows.name not in self._names:
            if rows.name not in self._missing:
                self._missing.append(rows.name)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._left.discard(rows.name)
        stored = shape if rows.total is None else (rows.total, *shape[1:])
        turned = rows.transposed and len(shape) == 2
        stored = stored[::-1] if turned else stored
        if rows.heads is not None:
            stored = (rows.heads, math.prod(shape) // rows.heads)
        tensor = self._read(rows.name, stored)
        if tuple(tensor.shape) != stored:
            problem = f"{rows.name} is {list(tensor.shape)}, should be {list(stored)}"
            if problem not in self._misshapen:
                self._misshapen.append(problem)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        tensor = tensor.T.contiguous() if turned else tensor
        tensor = tensor if rows.heads is None else tensor.flatten()
        # Rows are taken before they are converted, so that of a packed tensor each is once.
        return self._converted(rows.name, rows.of(tensor))

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        if str(tensor.dtype) not in _FLOATS:
            self._misshapen.append(f"{name} is stored as {tensor.dtype}, which is not supported")
        return tensor.to(device=self.device, dtype=self.dtype)

    def take_linear(
        self, parts: Mapping[str, tuple[int, int]], *, gated: bool = False
    ) -> Sequence[Tensor] | HeldWeights:
        """The weights of one linear layer, by name and shape [out, in].

        `gated`: the layer has a gate.
        """
        blocks = self._in_blocks(parts, gated=gated)
        return blocks or [self.take(name, shape) for name, shape in parts.items()]

    def _in_blocks(
        self, parts: Mapping[str, tuple[int, int]], *, gated: bool = False
    ) -> HeldWeights | None:
        """The weights in blocks or int8; None if they are not."""
        if self._blocks is None:
            return None
        arranged = {name: self._rows(name) for name in parts}
        stored = {
            rows.name: (rows.total or parts[name][0], parts[name][1])
            for name, rows in arranged.items()
        }
        if self._complete and not self._names.issuperset(stored):
            return None
        weights = self._blocks(stored, gated and len(stored) > 1)
        if weights is None:
            return None
        self._left.difference_update(stored)
        of_name = dict(zip(stored, weights, strict=True))
        return [rows.of_blocks(of_name[rows.name]) for rows in arranged.values()]

    def keep_embedding(
        self, name: str, shape: tuple[int, int], *, is_head: bool
    ) -> Tensor | PackedEmbedding:
        """Like `keep`, for an embedding [V, E], which may be in blocks.

        `is_head`: it is the output head's weight, too, which then shares the memory if it can.
        """
        from infer.kernels.linear.native_linear import PackedEmbedding

        blocks = self._in_blocks({name: shape})
        if blocks and isinstance(blocks[0], BlockWeight):
            return PackedEmbedding(blocks[0])
        dtype = str(self.dtype).removeprefix("torch.")
        if is_head and self.device.type == "cpu" and embedding_is_packed(dtype, self.quantization):
            return PackedEmbedding(self.take(name, shape))
        return self.keep(name, shape)

    def keep(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Like `take`, for a tensor that the model keeps: never in the file's mapped memory."""
        tensor = self.take(name, shape)
        # Files are mapped on the CPU. On another device the tensor is a copy already.
        return tensor.clone() if tensor.device.type == "cpu" else tensor

    def has_prefix(self, prefix: str) -> bool:
        """Whether the name of any tensor that has not been taken begins with `prefix`."""
        return any(name.startswith(prefix) for name in self._left)

    def drop_prefix(self, *prefixes: str) -> None:
        """Ignore all tensors whose names begin with one of `prefixes`."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def drop(self, *names: str) -> None:
        """Ignore these tensors, whether they exist or not."""
        self._left.difference_update(names)

    def finish(self) -> None:
        """Raise `LoadError` if any tensor was missing, unused, or of a wrong shape or dtype."""
        problems = [
            _listed("missing", self._missing),
            _listed("unexpected", sorted(self._left)),
            _listed("misshapen", self._misshapen),
        ]
        if any(problems):
            raise LoadError(
                "the checkpoint does not fit the model: " + "; ".join(filter(None, problems))
            )
        if self._finished is not None:
            self._finished(self)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {what}: {listing(names)}"


class TensorFiles:
    """The tensors in the safetensors files of a folder, by their usual names."""

    def __init__(self, folder: Path) -> None:
        """Raises `LoadError` if the folder has no such files."""
        files = _files_of_names(folder)
        self._folder = folder
        self._stored_names = _stored_names(files)
        self._files = {name: files[stored] for name, stored in self._stored_names.items()}
        self._opened: dict[str, Any] = {}
        # The weights of a fused layer are read one after the other and then used together. So the
        # pages of the last tensors stay in memory.
        self._recent: deque[Tensor] = deque()
        # Old checkpoints store RoPE's frequencies as a buffer. They follow from the config.
        self.names = {name for name in self._files if not name.endswith("rotary_emb.inv_freq")}

    def path(self, name: str) -> Path:
        """The file that has a tensor."""
        return self._folder / self._files[name]

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """What the file announces of a tensor: dtype, such as BF16, and shape."""
        part = self._use(name, lambda file, stored: file.get_slice(stored))
        return str(part.get_dtype()), tuple(part.get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor in the file's mapped memory."""
        if len(self._recent) >= _RECENT:
            _release_pages(self._recent.popleft())
        tensor: Tensor = self._use(name, lambda file, stored: file.get_tensor(stored))
        self._recent.append(tensor)
        return tensor

    def _use(self, name: str, use: Callable[[Any, str], Any]) -> Any:
        path = self._files[name]
        if path not in self._opened:
            self._opened[path] = _open(self.path(name))
        try:
            return use(self._opened[path], self._stored_names[name])
        except SafetensorError as error:
            raise LoadError(f"{self.path(name)}: cannot read {name} ({error})") from None


def open_checkpoint(folder: Path, dtype: torch.dtype, device: torch.device) -> WeightSource:
    """A source of the tensors in the safetensors files of `folder`; `LoadError` if it has none."""
    files = TensorFiles(folder)

    def stored(name: str) -> Tensor:
        import torch

        # `take` checks the dtype when the values are read; here only the shape matters.
        return torch.empty(files.header(name)[1], dtype=torch.bfloat16, device="meta")

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        return files.read(name)

    return WeightSource(files.names, read, dtype=dtype, device=device, stored=stored)


_WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "language_model.")
"""Prefixes that tools put before all names of a model."""


def _stored_names(names: Iterable[str]) -> dict[str, str]:
    """The usual names of a checkpoint's tensors, each with the name that the files have.

    A prefix that all names have is left out; a decoder that was saved without its head lacks the
    usual `model.`.
    """
    usual = {name: name for name in names}
    while prefix := next(
        (
            wrapper
            for wrapper in _WRAPPERS
            if usual and all(name.startswith(wrapper) for name in usual)
        ),
        None,
    ):
        usual = {name.removeprefix(prefix): stored for name, stored in usual.items()}
    if "embed_tokens.weight" in usual:
        heads = ("lm_head.", "model.")
        usual = {
            name if name.startswith(heads) else f"model.{name}": stored
            for name, stored in usual.items()
        }
    return usual


def _release_pages(tensor: Tensor) -> None:
    """Release the memory-mapped pages of a tensor that has been read.

    The system reads a page again from the file if it is used again, so this is always safe. Without
    it a checkpoint would take its size twice while it is loaded.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        advise(tensor, mmap.MADV_DONTNEED)


def _files_of_names(folder: Path) -> Mapping[str, str]:
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = load_json(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise LoadError(f"{index}: weight_map must map tensor names to files")
        values = list(weight_map.values())
        if wrong := [file for file in values if not isinstance(file, str)]:
            raise LoadError(f"{index}: weight_map must map to names of files, not {wrong[0]!r:.80}")
        files = {file: _in_folder(folder, file) for file in sorted(set(values))}
        if None not in files.values():
            return {name: str(files[file]) for name, file in weight_map.items()}
        if not (folder / SINGLE_FILE).is_file():  # else the index is of shards that were joined
            if outside := next((f for f in files if Path(f).name != f or len(f) > 255), None):
                problem = f"{outside!r:.80} is not the name of a file in this folder"
                raise LoadError(f"{index}: {problem}")
            absent = [file for file, name in files.items() if name is None]
            raise LoadError(f"{index} names files that are not there: {listing(absent)}")
    for names in ([SINGLE_FILE], _shards(folder)):
        if names and all((folder / name).is_file() for name in names):
            opened = ((name, _open(folder / name)) for name in names)
            return {key: name for name, file in opened for key in file.keys()}  # noqa: SIM118
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        raise LoadError(
            f"{folder} holds {pickles[0]}, a pickle file, which can run code when it is read and"
            " is not loaded here; convert it once with transformers:"
            " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise LoadError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _in_folder(folder: Path, file: str) -> str | None:
    """The name of a file of the folder that an index names, perhaps with the folders where it was
    written; None if there is none."""
    name = re.split(r"[\\/]", file)[-1]
    is_there = 0 < len(name) <= 255 and "\0" not in name and (folder / name).is_file()
    return name if is_there else None


def _shards(folder: Path) -> list[str]:
    """The files of a checkpoint without an index: all parts of one, or its only file."""
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    parts = [shard for name in files if (shard := _SHARD.fullmatch(name))]
    if parts:
        return [
            f"{parts[0][1]}{i + 1:05}-of-{parts[0][2]}.safetensors" for i in range(int(parts[0][2]))
        ]
    return files if len(files) == 1 and not files[0].startswith("adapter") else []


def _open(path: Path) -> Any:
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise LoadError(
            f"{path}: the path is not UTF-8, and the safetensors library takes no other; rename the"
            " folder"
        ) from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: not a safetensors file, or cut short ({error})") from None


def dummy_source(dtype: torch.dtype, device: torch.device) -> WeightSource:
    """A source of random weights with standard deviation 1/√(input size), equal in every run.

    The scale keeps activations near one. A tensor's name is the seed of its generator.
    """
    import torch

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            bias = name.endswith(".bias")
            return torch.zeros(shape) if bias else torch.ones(shape)
        # The device makes the numbers: the host's generator takes a minute for billions of them.
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    return WeightSource((), read, dtype=dtype, device=device, complete=False)
