"""Files that an operator names, where something else stands in their place."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import infer
from infer.bench.report import write_report
from infer.bench.workloads import Draw, trace
from infer.cli.configuration import Configuration
from infer.errors import InferError
from infer.server.observe.key_usage import KeyUsage
from infer.server.tenancy.keys import Keys
from infer.server.tenancy.shared_prefixes import PublicPrefixes
from tests.support.doubles import make_hash_llm

ROOT = Path(infer.__file__).parent
OWN = {
    "control_groups.py": "the system's",
    "engine/build/diagnosis.py": "the system's",
    "main_memory.py": "the system's",
    "bench/results.py": "the system's",
    "server/observe/process_metrics.py": "the system's",
    "kernels/loader.py": "this package's",
    "extras.py": "pip's",
    "models/package.py": "pip's",
}
"""Modules that read files which no option names, and whose these are."""


def make_prefixes(path: Path) -> None:
    folder = path.parent / "prefixes"
    folder.mkdir()
    (folder / "one.txt").symlink_to(path)
    PublicPrefixes(str(folder), make_hash_llm())


READERS: dict[str, Callable[[Path], object]] = {
    "keys": Keys,
    "usage": lambda path: KeyUsage("model", path, 1.0),
    "prefixes": make_prefixes,
    "settings": lambda path: Configuration.read({}, path),
    "result": lambda path: write_report([path], path.parent / "report"),
    "trace": lambda path: trace(Draw(0, 0), trace_file=str(path)),
}
ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "without an end": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\xfd"),
    "deep": lambda path: path.write_text("[" * 100_000, encoding="utf-8"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_it_is_one_sentence(reader: str, odd: str, tmp_path: Path) -> None:
    path = tmp_path / "it.file"
    ODD[odd](path)
    if (reader, odd) == ("prefixes", "deep"):
        make_prefixes(path)  # a text like any other
        return
    with pytest.raises(InferError) as refused:
        READERS[reader](path)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 600
    # The others name their option.
    assert path.name in message or reader in ("prefixes", "trace"), message


def test_what_an_option_names_is_read_by_the_functions_that_never_wait() -> None:
    """`Path.read_text` waits for the writer of a pipe, and reads a device until memory is full."""
    found = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("read_text", "read_bytes"):
                found.add(file.relative_to(ROOT).as_posix())
    assert found - {"server/ui/page.py"} == OWN.keys()
