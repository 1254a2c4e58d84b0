"""Tests of `csrc/abi.h` as Python reads it: functions, records, and libraries of other sources."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from infer.kernels import loader

pytestmark = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))


def test_functions_have_the_types_of_their_declarations() -> None:
    library, pointer, long = loader.loaded(), ctypes.c_void_p, ctypes.c_long
    product = library.infer_linear
    assert product.restype is None
    assert product.argtypes == [pointer, pointer, long, pointer, pointer, long, ctypes.c_int]
    assert library.infer_attention_new.restype is pointer
    assert library.infer_attention_new.argtypes[6] is ctypes.c_float
    assert library.infer_read.restype is ctypes.c_uint64
    assert library.infer_abi_digest.argtypes == []


def test_records_have_no_gaps() -> None:
    """static_assert holds the same sizes on the other side."""
    sizes = {name: record.size for name, record in loader.records().items()}
    assert sizes == {
        "DrawRow": 48,
        "RowNorm": 32,
        "DecoderLayer": 152,
        "CacheAddresses": 24,
        "AngleAddresses": 24,
    }
    assert loader.records()["DrawRow"].format == "dddQQQ"


def test_a_library_of_another_interface_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changed = tmp_path / "abi.h"
    changed.write_text(
        loader.ABI.read_text(encoding="utf-8") + "void infer_more(void);\n", encoding="utf-8"
    )
    monkeypatch.setattr(loader, "ABI", changed)
    loader.library.cache_clear()
    try:
        assert "built from other sources; reinstall the package" in str(loader.library())
    finally:
        monkeypatch.undo()
        loader.library.cache_clear()
        assert loader.available() is None
