"""Tests of reading the header of a GGUF file: values of each type, and headers that cannot be."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.config import EngineConfig
from infer.engine.build.planner import plan_for
from infer.errors import LoadError
from infer.models.gguf_reader import read_gguf
from infer.models.hub import locate
from infer.text.gguf_vocab import text_files
from tests.support.checkpoints import make_model
from tests.support.gguf_files import write

LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}  # fmt: skip


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def value(kind: int, one: Any) -> bytes:
    return text(one) if kind == 8 else struct.pack(f"<{LETTERS[kind]}", one)


def pair(key: bytes, kind: int, one: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, one)


def array(key: bytes, kind: int, many: list[Any]) -> bytes:
    count = struct.pack("<IIQ", 9, kind, len(many))
    return text(key) + count + b"".join(value(kind, one) for one in many)


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def make(
    path: Path,
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes = bytes(256),
    version: int = 3,
    alignment: int = 32,
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join([*pairs, *tensors])
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def test_values_of_every_type(tmp_path: Path) -> None:
    numbers = {0: 200, 1: -3, 2: 60_000, 3: -4, 4: 1 << 31, 5: -5, 6: 0.5, 7: True, 10: 1 << 63,
               11: -6, 12: 0.1}  # fmt: skip
    pairs = [pair(f"one{kind}".encode(), kind, one) for kind, one in numbers.items()]
    pairs += [array(f"many{kind}".encode(), kind, [one] * 3) for kind, one in numbers.items()]
    words = ["", "Grüße", "👋 a"]
    pairs += [array(b"words", 8, [word.encode() for word in words]), array(b"none", 8, [])]
    read = read_gguf(make(tmp_path / "m.gguf", [*pairs, pair(b"word", 8, b"a\xc3\xbc")], []))
    for kind, one in numbers.items():
        assert read.metadata[f"one{kind}"] == one
        assert type(read.metadata[f"one{kind}"]) is type(one)
        assert read.metadata[f"many{kind}"] == [one] * 3
    assert (read.metadata["words"], read.metadata["word"]) == (words, "aü")
    assert (read.metadata["none"], len(read.metadata)) == ([], 2 * len(numbers) + 3)
    assert "absent" not in read.metadata


def test_tensors(tmp_path: Path) -> None:
    """Offsets count from the first multiple of the alignment behind the header."""
    infos = [tensor(b"a", [2, 3], 0, 0), tensor(b"b", [32, 2], 8, 64)]
    infos.append(tensor(b"c", [2, 3, 2], 0, 192))
    data = np.arange(6, dtype=np.float32).tobytes().ljust(64, b"\0") + bytes(range(68))
    data = data.ljust(192, b"\0") + np.arange(12, dtype=np.float32).tobytes()
    pairs = [pair(b"general.alignment", 4, 64)]
    path = make(tmp_path / "m.gguf", pairs, infos, data, version=2, alignment=64)
    found = read_gguf(path).tensors
    assert (found["a"].shape, found["a"].kind.name) == ((3, 2), "F32")
    assert found["a"].rows.view(np.float32).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (found["b"].shape, found["b"].rows.shape) == ((2, 32), (2, 34))
    assert found["b"].rows.ravel().tolist() == list(range(68))
    assert found["b"].num_elements == 64
    assert (found["c"].shape, found["c"].rows.shape) == ((2, 3, 2), (6, 8))
    assert found["c"].rows.view(np.float32).ravel().tolist() == list(range(12))


A = tensor(b"a", [8])
LONG = struct.pack("<IQ", 8, 1 << 63)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a version to come": ({"version": 4}, "it is of version 4 of the format; 2 and 3 are read"),
    "version 1": ({"version": 1}, "has version 1 of the format, which is not read"),
    "the other byte order": ({"version": 3 << 24}, "another byte order"),
    "a key twice": ({"pairs": [pair(b"k", 4, 1)] * 2}, "it has the key k twice"),
    "a tensor twice": ({"tensors": [A, A]}, "it has the tensor a twice"),
    "tensors on each other": (
        {"tensors": [tensor(f"{i}".encode(), [64]) for i in range(4)]},
        "its tensors 0 and 1 lie over each other",
    ),
    "tensors on each other in part": (
        {"tensors": [tensor(b"a", [4], 0, 64), tensor(b"b", [17]), tensor(b"c", [1], 0, 128)]},
        "its tensors b and a lie over each other",
    ),
    "a tensor between two places": (
        {"tensors": [tensor(b"a", [4], 0, 36)]},
        "a begins 36 bytes behind the first one; that must be a multiple of 32",
    ),
    "a type of values to come": ({"pairs": [text(b"k") + struct.pack("<I", 13)]}, "type 13"),
    "an array of arrays": ({"pairs": [text(b"k") + struct.pack("<IIQ", 9, 9, 1)]},
                           "it has an array of arrays"),
    "an array of nothing known": ({"pairs": [text(b"k") + struct.pack("<IIQ", 9, 77, 1)]},
                                  "unknown type 77"),
    "many items": ({"pairs": [text(b"k") + struct.pack("<IIQ", 9, 0, 1 << 62)]},
                   "its arrays have more than 2,000,000 items"),
    "items behind the end": ({"pairs": [text(b"k") + struct.pack("<IIQ", 9, 12, 1 << 20)]},
                             "it is shorter than its metadata says"),
    "words behind the end": ({"pairs": [text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 20)]},
                             "it is shorter than its metadata says"),
    "a long word": ({"pairs": [text(b"k") + LONG]}, "it is shorter than its metadata says"),
    "a long last word": ({"pairs": [text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 63)]},
                         "it is shorter than its metadata says"),
    "a long key": ({"pairs": [text(b"k" * 65_536)]}, "a key has 65,536 bytes; at most 65,535"),
    "a key that is no text": ({"pairs": [pair(b"\xff", 4, 1)]}, "is cut short or damaged: 'utf-8'"),
    "an alignment of 0": ({"pairs": [pair(b"general.alignment", 4, 0)]}, "a power of two"),
    "an alignment of 24": ({"pairs": [pair(b"general.alignment", 4, 24)]}, "a power of two"),
    "an alignment as text": ({"pairs": [pair(b"general.alignment", 8, b"32")]}, "a power of two"),
    "five sizes": ({"tensors": [tensor(b"a", [1] * 5)]}, "a has 5 dimensions; it must have 1 to 4"),
    "no size": ({"tensors": [tensor(b"a", [])]}, "a (F32, ) must have 1 to 4 dimensions"),
    "a size of 0": ({"tensors": [tensor(b"a", [4, 0])]}, "none of them 0"),
    "sizes that overflow": ({"tensors": [tensor(b"a", [1 << 63, 1 << 63])]}, "ends at byte"),
    "an offset behind the end": ({"tensors": [tensor(b"a", [8], 0, 1 << 63)]}, "ends at byte"),
    "a type of tensors that is gone": ({"tensors": [tensor(b"a", [32], 4)]}, "unknown type 4"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_headers_that_cannot_be(what: str, tmp_path: Path) -> None:
    given, message = BAD[what]
    path = make(tmp_path / "m.gguf", **{"pairs": [], "tensors": [A], **given})
    with pytest.raises(LoadError) as error:
        read_gguf(path)
    assert message in str(error.value)
    assert len(str(error.value)) < 600


def test_a_header_cut_anywhere(tmp_path: Path) -> None:
    pairs = [pair(b"k", 4, 1), array(b"words", 8, [b"a", b"bc"]), array(b"many", 6, [0.5] * 4)]
    whole = make(tmp_path / "m.gguf", pairs, [A, tensor(b"b", [4], 0, 32)], bytes(48)).read_bytes()
    for length in range(4, len(whole)):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(LoadError, match="is cut short or damaged"):
            read_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(whole)
    assert len(read_gguf(tmp_path / "m.gguf").tensors) == 2


COUNTS = [(4, 33), (4, 2**32 - 1), (8, 2**16), (8, 2**62), (8, 2**64 - 1)]
"""(bytes, number)."""


def test_a_header_damaged_anywhere(tmp_path: Path) -> None:
    """Whatever stands in a byte, or in place of a count, is refused in one sentence or read within
    the file."""
    pairs = [pair(b"k", 4, 1), array(b"words", 8, [b"a", b"bc"]), array(b"many", 6, [0.5] * 4),
             pair(b"general.alignment", 4, 32)]  # fmt: skip
    tensors = [A, tensor(b"b", [2, 2, 2], 1, 32), tensor(b"c", [32, 2], 12 - 4, 64)]
    path = make(tmp_path / "m.gguf", pairs, tensors, bytes(132))
    whole = path.read_bytes()
    end = len(whole) - 132
    damaged = [
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        for at in range(4, end)
        for bit in (0, 7)
    ]
    damaged += [
        whole[:at] + count.to_bytes(width, "little") + whole[at + width :]
        for at in range(4, end - 8)
        for width, count in COUNTS
    ]
    refused = []
    for content in damaged:
        path.write_bytes(content)
        try:
            found = read_gguf(path)
            dict(found.metadata)
        except LoadError as error:
            refused.append(str(error))
            continue
        assert sum(each.rows.size for each in found.tensors.values()) <= len(content)
    assert len(refused) > len(damaged) // 2
    assert all(each.startswith(str(path)) and len(each) < 700 for each in refused)


def test_a_plan_takes_no_vocabulary(tmp_path: Path) -> None:
    """A token that is no text is noticed by what needs the vocabulary, and by nothing else."""
    path = tmp_path / "m.gguf"
    write(path, "llama", make_model("llama"))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(text(b"Z"), text(b"\xff"), 1))
    assert path.read_bytes() != whole
    assert plan_for(EngineConfig(model=str(path), device="cpu")).weight_bytes > 0
    metadata = read_gguf(locate(str(path))[0]).metadata
    assert metadata["general.architecture"] == "llama"
    with pytest.raises(LoadError, match=r"m\.gguf is cut short or damaged: 'utf-8'"):
        text_files(metadata, str(path))


def test_values_outlive_the_file(tmp_path: Path) -> None:
    """They are taken when a model starts, and a file may be written anew meanwhile."""
    words = [f"word {i}".encode() for i in range(5000)]
    path = make(tmp_path / "m.gguf", [array(b"words", 8, words)], [A])
    metadata = read_gguf(path).metadata
    path.write_bytes(b"GGUF")
    assert metadata["words"] == [word.decode() for word in words]
