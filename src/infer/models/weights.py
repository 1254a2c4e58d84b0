"""`WeightSource`: hands out a checkpoint's tensors by name and accounts for every one of them.

A model takes each tensor it needs with the shape it expects; `finish` then raises one `LoadError`
that lists what was missing, misshapen or left over. `open_checkpoint` reads safetensors, single
or sharded by index, memory-mapped: a tensor is converted when it is taken and nothing is held
twice. `dummy_source` makes random tensors of whatever shape is asked for (`load_format=dummy`).
"""

from __future__ import annotations

import mmap
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer.errors import LoadError
from infer.files import MAX_INDEX_BYTES
from infer.kernels.loader import advise
from infer.models.model_config import load_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class WeightSource:
    """See the module's docstring."""

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
    ) -> None:
        """`read(name, shape)` gives a tensor; `complete`: names outside `names` do not exist.

        `stored(name)`: a tensor without memory, of the shape that the file announces.
        """
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        """what linear layers are to hold these weights in; None: in `dtype`"""
        self.batch_invariant = batch_invariant
        """whether linear layers on a GPU are to compute a row alike in any company"""
        self._left = set(names)
        self._complete = complete
        self._read = read
        self._stored = stored
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def with_layers(self, quantization: str | None, batch_invariant: bool = False) -> WeightSource:
        """The same tensors, for linear layers of this kind; before any has been taken."""
        return WeightSource(
            self._left,
            self._read,
            dtype=self.dtype,
            device=self.device,
            complete=self._complete,
            stored=self._stored,
            quantization=quantization,
            batch_invariant=batch_invariant,
        )

    def rehearsal(self) -> WeightSource | None:
        """A source of the same tensors without their numbers, on the meta device; None: unknown.

        A model built from it costs no memory and fails where one built from this source would, so
        a file of a few bytes that claims to be large is refused before anything is allocated.
        """
        if self._stored is None:
            return None
        stored, meta = self._stored, torch.device("meta")
        return WeightSource(
            self._left, lambda name, shape: stored(name), dtype=self.dtype, device=meta
        )

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, converted and on the device; noted if it is missing or misshapen."""
        if self._complete and name not in self._left:
            self._missing.append(name)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._left.discard(name)
        tensor = self._read(name, shape)
        if tuple(tensor.shape) != shape:
            self._misshapen.append(f"{name} is {list(tensor.shape)}, should be {list(shape)}")
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        if tensor.dtype not in _FLOATS:
            self._misshapen.append(f"{name} is stored as {tensor.dtype}, which is not supported")
        return tensor.to(device=self.device, dtype=self.dtype)

    def keep(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Like `take`, for a tensor that stays as it is: in memory of its own, not the file's."""
        tensor = self.take(name, shape)
        # What came from a file lies on the CPU; elsewhere it is a copy already.
        return tensor.clone() if tensor.device.type == "cpu" else tensor

    def has_prefix(self, prefix: str) -> bool:
        """Whether any tensor that has not been taken begins so."""
        return any(name.startswith(prefix) for name in self._left)

    def drop_prefix(self, *prefixes: str) -> None:
        """Tensors that begin so may be there and are not needed."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def drop(self, *names: str) -> None:
        """These tensors may be there and are not needed."""
        self._left.difference_update(names)

    def finish(self) -> None:
        """Raise `LoadError` with everything that was wrong, if anything was."""
        problems = [
            _listed("missing", self._missing),
            _listed("unexpected", sorted(self._left)),
            _listed("misshapen", self._misshapen),
        ]
        if any(problems):
            raise LoadError(
                "the checkpoint does not fit the model: " + "; ".join(filter(None, problems))
            )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {what}: {listing(names)}"


def listing(names: Sequence[str]) -> str:
    """The first dozen names, none longer than a line."""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(f'{name:.200}' for name in names[:12])}{more}"


def open_checkpoint(folder: Path, dtype: torch.dtype, device: torch.device) -> WeightSource:
    """A source over the safetensors files in `folder`."""
    files = _files_of_names(folder)
    opened: dict[str, Any] = {}
    # Tensors that are fused are read one after the other and used together: wait a little.
    recent: deque[Tensor] = deque()

    def file_of(name: str) -> Any:
        file = files[name]
        if file not in opened:
            opened[file] = _open(folder / file)
        return opened[file]

    def stored(name: str) -> Tensor:
        try:
            part = file_of(name).get_slice(name)
        except SafetensorError as error:
            raise LoadError(f"{folder / files[name]}: cannot read {name} ({error})") from None
        # What type it has is looked at when its numbers are read.
        return torch.empty(part.get_shape(), dtype=torch.bfloat16, device="meta")

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        file = files[name]
        if len(recent) >= 4:
            _forget_pages(recent.popleft())
        try:
            tensor: Tensor = file_of(name).get_tensor(name)
        except SafetensorError as error:
            raise LoadError(f"{folder / file}: cannot read {name} ({error})") from None
        recent.append(tensor)
        return tensor

    # Old writers stored RoPE's frequencies as a buffer; they follow from the config.
    names = {name for name in files if not name.endswith("rotary_emb.inv_freq")}
    return WeightSource(names, read, dtype=dtype, device=device, stored=stored)


def _forget_pages(tensor: Tensor) -> None:
    """Let go of the memory-mapped pages under a tensor that has been read.

    They come back from the file if somebody looks again, so this is always safe; without it, a
    checkpoint would count twice while it is loaded.
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
            raise LoadError(f"{index}: weight_map names the file {wrong[0]!r:.80}, not a text")
        files = sorted(set(values))
        if outside := next((f for f in files if Path(f).name != f or len(f) > 255), None):
            raise LoadError(f"{index}: {outside!r:.80} is outside the folder, or no name of a file")
        absent = [file for file in files if not (folder / file).is_file()]
        if absent:
            raise LoadError(f"{index} names files that are not there: {listing(absent)}")
        return dict(weight_map)
    single = folder / SINGLE_FILE
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), SINGLE_FILE)
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        raise LoadError(
            f"{folder} holds {pickles[0]}, a pickle file, which can run code when it is read and"
            " is not loaded here; convert it once with transformers:"
            " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise LoadError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: not a safetensors file, or cut short ({error})") from None


def dummy_source(dtype: torch.dtype, device: torch.device) -> WeightSource:
    """A source of random weights: scaled so that activations stay near one, the same every time."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            bias = name.endswith(".bias")
            return torch.zeros(shape) if bias else torch.ones(shape)
        # On the device itself: billions of numbers take the host's generator a minute.
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    return WeightSource((), read, dtype=dtype, device=device, complete=False)
