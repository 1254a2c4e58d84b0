"""Reading a GGUF file's header: `read_gguf` finds its keys and tensors, and decodes what is asked.

The file is memory-mapped. Opening it notes where each value and each tensor lies; a vocabulary of
262,000 tokens stays bytes until it is taken. Nothing is allocated that the file's own
length does not pay for, and whatever a header announces is checked against that length. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from infer.errors import LoadError
from infer.models.gguf_names import SPLIT_NAME
from infer.readable_text import listing

_MAX_ITEMS = 2_000_000
"""Maximum number of items of all arrays of a file; the largest vocabularies take 850,000."""
_MAX_ENTRIES = 65_536
"""Maximum number of keys, and maximum number of tensors."""
_MAX_METADATA_BYTES = 256 << 20
"""Maximum size of all keys and values; the largest vocabularies take 20 MB."""
_MAX_NAME_BYTES = 65_535
"""Maximum length of a key or of a tensor's name in the format."""
_MAX_DIMENSIONS = 4
"""Maximum number of dimensions of a tensor in the format."""
_MAX_PARTS = 10_000
"""Maximum number of parts of a file."""
_VERSIONS = (2, 3)
"""Versions of the format that are read; they differ in what may be stored in other byte orders."""
_ALIGNMENT = 32
"""Alignment of the tensors in bytes, if the file has no `general.alignment`."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
"""Number of a type of values of fixed size → its letter in `struct`."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A type of tensors: its numbers are stored in blocks of a fixed size."""

    name: str
    block: int
    """Numbers in a block."""
    block_bytes: int


TENSOR_KINDS = {
    number: TensorKind(name, block, size)
    for number, name, block, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2),
        (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8), (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip
"""Types of tensors by their number in files."""
KINDS = {kind.name: kind for kind in TENSOR_KINDS.values()}
"""Types of tensors by name."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor in a file."""

    kind: TensorKind
    shape: tuple[int, ...]
    """Sizes, the length of a row last."""
    rows: np.ndarray
    """Bytes in the mapped file: [number of rows, bytes of a row]."""

    @property
    def num_elements(self) -> int:
        """The number of its numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFContent:
    """What a file, or all parts of one, holds."""

    path: Path
    """The file, or its first part."""
    metadata: Metadata
    tensors: dict[str, StoredTensor]
    """The tensors by name."""


class Metadata(Mapping[str, Any]):
    """A file's keys and their values as plain Python objects, which are made when they are asked
    for; `LoadError` if a text is not UTF-8."""

    def __init__(self, path: Path, values: Mapping[str, _Value]) -> None:
        """`values` by key; `path` is named in errors."""
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key].decoded()
        except UnicodeDecodeError as error:
            raise _damaged(self._path, str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a value lies in the metadata."""

    content: memoryview
    """The file's begin, up to the last value."""
    kind: int
    """Number of its type, or of its items' type."""
    start: int
    """First byte of the value, or of an array's first item."""
    count: int | None
    """Number of an array's items; None: it is no array."""

    def decoded(self) -> Any:
        """The value as a plain Python object."""
        if self.kind == _STRING:
            return list(self._texts()) if self.count is not None else next(self._texts())
        letter = _SCALARS[self.kind]
        if self.count is None:
            return struct.unpack_from(f"<{letter}", self.content, self.start)[0]
        dtype = np.dtype(letter).newbyteorder("<")
        return np.frombuffer(self.content, dtype, self.count, self.start).tolist()

    def _texts(self) -> Iterator[str]:
        length_at, at, content = struct.Struct("<Q").unpack_from, self.start, self.content
        for _ in range(1 if self.count is None else self.count):
            end = at + 8 + length_at(content, at)[0]
            yield str(content[at + 8 : end], "utf-8")
            at = end


class _Header:
    """Reads a file's header from its start to its end; `ValueError` if it cannot be one."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 4
        self._num_items = 0

    def version(self) -> int:
        """The version of the format; it is the first number after the file's mark."""
        return int(self._number("I"))

    def entries(self) -> tuple[dict[str, _Value], dict[str, StoredTensor]]:
        """The values by their keys, and the tensors by their names."""
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        _check_count(num_keys, "keys")
        _check_count(num_tensors, "tensors")
        keys: dict[str, tuple[int, int, int | None]] = {}
        for _ in range(num_keys):
            key = self._name("a key")
            if key in keys:
                raise ValueError(f"it has the key {key[:200]} twice")
            keys[key] = self._place()
        if self._at > _MAX_METADATA_BYTES:
            raise ValueError(f"its keys take {self._at:,} bytes; at most {_MAX_METADATA_BYTES:,}"
                             " are read")  # fmt: skip
        # A copy: values are decoded later, when another program may have cut the file.
        content = memoryview(bytes(self._content[: self._at]))
        values = {key: _Value(content, *place) for key, place in keys.items()}
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = _alignment_of(values)
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        places: list[tuple[int, int, str]] = []
        for name, dims, number, offset in infos:
            if name in tensors:
                raise ValueError(f"it has the tensor {name[:200]} twice")
            if offset % alignment:
                raise ValueError(
                    f"{name[:200]} begins {offset:,} bytes behind the first one; that must be a"
                    f" multiple of {alignment}"
                )
            tensors[name] = self._tensor(name, dims, number, start + offset)
            places.append((offset, offset + tensors[name].rows.size, name))
        places.sort()
        for (_, end, name), (begin, _, other) in pairwise(places):
            if begin < end:
                raise ValueError(f"its tensors {name[:200]} and {other[:200]} lie over each other")
        return values, tensors

    def _number(self, letter: str) -> int:
        size = struct.calcsize(letter)
        if self._at + size > len(self._content):
            raise _Short
        (number,) = struct.unpack_from(f"<{letter}", self._content, self._at)
        self._at += size
        return int(number)

    def _skip(self, num_bytes: int) -> int:
        """Go on behind so many bytes; returns where they begin."""
        start = self._at
        if start + num_bytes > len(self._content):
            raise _Short
        self._at += num_bytes
        return start

    def _name(self, what: str) -> str:
        length = self._number("Q")
        if length > _MAX_NAME_BYTES:
            raise ValueError(f"{what} has {length:,} bytes; at most {_MAX_NAME_BYTES:,} are read")
        start = self._skip(length)
        return str(self._content[start : self._at], "utf-8")

    def _place(self) -> tuple[int, int, int | None]:
        """Of the value that comes next, what `_Value` has: kind, start and count."""
        kind, count = self._number("I"), None
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind == _ARRAY:
                raise ValueError("it has an array of arrays, which no model needs")
            self._num_items += count
            if self._num_items > _MAX_ITEMS:
                raise ValueError(f"its arrays have more than {_MAX_ITEMS:,} items")
        start = self._at
        if kind == _STRING:
            self._skip_texts(1 if count is None else count)
        elif kind in _SCALARS:
            self._skip(struct.calcsize(_SCALARS[kind]) * (1 if count is None else count))
        else:
            raise ValueError(f"it has a value of the unknown type {kind}")
        return kind, start, count

    def _skip_texts(self, count: int) -> None:
        length_at, at, content = struct.Struct("<Q").unpack_from, self._at, self._content
        last = len(content) - 8
        for _ in range(count):
            if at > last:
                raise _Short
            at += 8 + length_at(content, at)[0]
        if at > len(content):
            raise _Short
        self._at = at

    def _tensor_info(self) -> tuple[str, list[int], int, int]:
        """A tensor's name, its sizes (the length of a row first), its type and its offset."""
        name, num_dims = self._name("a tensor's name"), self._number("I")
        if num_dims > _MAX_DIMENSIONS:
            raise ValueError(
                f"{name[:200]} has {num_dims:,} dimensions; it must have 1 to {_MAX_DIMENSIONS}"
            )
        dims = [self._number("Q") for _ in range(num_dims)]
        return name, dims, self._number("I"), self._number("Q")

    def _tensor(self, name: str, dims: list[int], number: int, start: int) -> StoredTensor:
        if number not in TENSOR_KINDS:
            raise ValueError(
                f"{name[:200]} is of the unknown type {number} (known are 0 to {max(TENSOR_KINDS)},"
                f" such as {', '.join(list(KINDS)[:4])})"
            )
        kind, shape = TENSOR_KINDS[number], tuple(reversed(dims))
        what = f"{name[:200]} ({kind.name}, {' x '.join(map(str, shape))})"
        if not dims or 0 in dims:
            raise ValueError(f"{what} must have 1 to {_MAX_DIMENSIONS} dimensions, none of them 0")
        if dims[0] % kind.block:
            raise ValueError(f"{what} must have rows of a multiple of {kind.block} numbers")
        num_rows, row_bytes = math.prod(dims[1:]), dims[0] // kind.block * kind.block_bytes
        end = start + num_rows * row_bytes
        if end > len(self._content):
            raise ValueError(
                f"{what} ends at byte {end:,}, but the file has {len(self._content):,}"
            )
        rows = np.frombuffer(self._content, np.uint8, num_rows * row_bytes, start)
        return StoredTensor(kind, shape, rows.reshape(num_rows, row_bytes))


class _Short(ValueError):
    """The file ends before its metadata does."""

    def __str__(self) -> str:
        return "it is shorter than its metadata says"


def read_gguf(path: Path) -> GGUFContent:
    """The content of a GGUF file, or of all parts of the one of which `path` is a part.

    Raises `LoadError` if the file, or a part of it, is missing, damaged or of another format.
    """
    metadata, tensors = _read(path)
    if metadata.get("split.count") in (None, 0, 1):
        return GGUFContent(path, metadata, tensors)
    return _read_parts(path, metadata)


def _check_count(count: int, what: str) -> None:
    if count > _MAX_ENTRIES:
        raise ValueError(f"it announces {count:,} {what}; at most {_MAX_ENTRIES:,} are read")


def _alignment_of(values: Mapping[str, _Value]) -> int:
    if (value := values.get("general.alignment")) is None:
        return _ALIGNMENT
    alignment = value.decoded() if value.kind == 4 and value.count is None else None
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError("general.alignment must be a power of two, stored as uint32")
    return alignment


def _damaged(path: Path, problem: str) -> LoadError:
    return LoadError(f"{path} is cut short or damaged: {problem:.300}")


def _read(path: Path) -> tuple[Metadata, dict[str, StoredTensor]]:
    """The metadata and the tensors of one file; `LoadError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    header = _Header(np.memmap(path, dtype=np.uint8, mode="r").data)
    try:
        version = header.version()
        if version & 0xFFFF == 0:
            raise LoadError(
                f"{path} is big-endian, another byte order than this machine's; convert it with"
                " gguf-convert-endian of the gguf package"
            )
        if version == 1:
            raise LoadError(
                f"{path} has version 1 of the format, which is not read; convert it again"
            )
        if version not in _VERSIONS:
            raise ValueError(f"it is of version {version} of the format; 2 and 3 are read")
        values, tensors = header.entries()
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    return Metadata(path, values), tensors


def _read_parts(path: Path, metadata: Metadata) -> GGUFContent:
    """The content of all parts of a file; `path` is one of them.

    The parts are beside it, as NAME-00001-of-00003.gguf.
    """
    name = SPLIT_NAME.fullmatch(path.name)
    count = metadata["split.count"]
    if not isinstance(count, int) or not 1 < count <= _MAX_PARTS:
        raise LoadError(f"{path}: split.count = {count!r:.80} is not a number of parts")
    if name is None or int(name[3]) != count:
        raise LoadError(
            f"{path} is one part of {count}, and its name is not that of a part: all parts must lie"
            f" in one folder as NAME-00001-of-{count:05}.gguf and so on"
        )
    paths = [path.with_name(f"{name[1]}-{i + 1:05}-of-{name[3]}.gguf") for i in range(count)]
    if absent := [part.name for part in paths if not part.is_file()]:
        raise LoadError(f"{path} is one part of {count}; these are missing: {listing(absent)}")
    first: Metadata | None = None
    tensors: dict[str, StoredTensor] = {}
    for i, part in enumerate(paths):
        fields_of_part, own_tensors = _read(part)
        if (fields_of_part.get("split.count"), fields_of_part.get("split.no")) != (count, i):
            raise LoadError(
                f"{part} says that it is part {fields_of_part.get('split.no')!r:.80} of"
                f" {fields_of_part.get('split.count')!r:.80}, counted from 0, not {i} of {count}"
            )
        if twice := sorted(tensors.keys() & own_tensors.keys()):
            raise LoadError(f"{part} holds tensors that a part before holds: {listing(twice)}")
        first = fields_of_part if first is None else first
        tensors |= own_tensors
    assert first is not None
    if (announced := first.get("split.tensors.count")) not in (None, len(tensors)):
        raise LoadError(f"{paths[0]} announces {announced!r:.80} tensors in all parts; there are"
                        f" {len(tensors)}")  # fmt: skip
    return GGUFContent(paths[0], first, tensors)
