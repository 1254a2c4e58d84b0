"""Files of checkpoints with something changed: each loads or is refused, in little time and memory.

`make_bases` writes good checkpoints, `damages` makes changes to one of their files, and
`WatchedLoader` loads each of them in a process of its own, as `hostile_files` does.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from infer.models.hub import SHIPPED_FOLDER
from tests.fuzz.json_edits import JsonEdit, json_edits
from tests.support import gguf_files
from tests.support.checkpoints import make_model, write_checkpoint
from tests.support.hostile_files import LIMIT_BYTES, LIMIT_S, Loader

TEMPLATE = "chat_template.jinja"
HEAD = 4096
"""Bytes at the start of a file that are changed more often than the others."""
ALLOWED = ("loaded", "LoadError", "ConfigError")


@dataclass(frozen=True)
class ByteEdit:
    """Bytes in the place of others."""

    at: int
    """Counted round the end of the file."""
    num_old: int
    new: bytes

    def apply(self, content: bytes) -> bytes:
        """The changed content."""
        at = self.at % (len(content) + 1)
        return content[:at] + self.new + content[at + self.num_old :]


@dataclass(frozen=True)
class Damage:
    """What is done to one file of a good checkpoint."""

    base: str
    file: str
    edits: tuple[ByteEdit | JsonEdit, ...]

    def write(self, bases: Path, folder: Path) -> Path:
        """The damaged checkpoint, whose other files are links; returns what is to be loaded."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for source in (bases / self.base).iterdir():
            (folder / source.name).symlink_to(source)
        target = folder / self.file
        content = target.read_bytes() if target.exists() else b""
        for edit in self.edits:
            content = edit.apply(content)
        target.unlink(missing_ok=True)
        target.write_bytes(content)
        return target if target.suffix == ".gguf" else folder


def make_bases(folder: Path) -> None:
    """Checkpoints of several families and formats, a folder each."""
    shutil.copytree(SHIPPED_FOLDER, folder / "shipped")
    write_checkpoint(folder / "sharded", "gemma3", shard_bytes=200_000)
    write_checkpoint(folder / "gpt2", "gpt2")
    for family, kind in (("llama", gguf_files.Q.F32), ("qwen3", gguf_files.Q.Q8_0)):
        (folder / f"gguf-{family}").mkdir()
        model = make_model(family, hidden_size=64, intermediate_size=128)
        gguf_files.write(folder / f"gguf-{family}" / "m.gguf", family, model, kind)


def values() -> SearchStrategy[Any]:
    """What nobody expects in a JSON file."""
    numbers = [0, 1, -1, 2, 7, 1000, 2**31, 2**32, 2**53, 2**63, -(2**63), 10**30, 0.5, 1e308]
    odd = st.sampled_from([float("nan"), float("inf"), -0.0, "", "x" * 10_000, "\ud800", "\x00"])
    leaves = st.one_of(st.none(), st.booleans(), st.sampled_from(numbers), odd, st.text(max_size=5))
    nests = st.sampled_from([json.loads("[" * 400 + "]" * 400), [0] * 50_000, {"a": {"b": {}}}])
    few = st.one_of(st.lists(leaves, max_size=3), st.dictionaries(st.text(max_size=4), leaves,
                                                                  max_size=3))  # fmt: skip
    return st.one_of(leaves, leaves, few, nests)


def byte_edits() -> SearchStrategy[ByteEdit]:
    """Bits, numbers and texts, most of them near the start; files are cut and grow too."""
    places = st.one_of(st.integers(0, 64), st.integers(0, HEAD), st.integers(0, 1 << 24))
    widths = [struct.pack("<I", n) for n in (0, 1, 2**31 - 1, 2**31, 2**32 - 1)]
    widths += [struct.pack("<Q", n) for n in (0, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)]
    number = st.sampled_from(widths)
    over = st.builds(lambda at, new: ByteEdit(at, len(new), new), places,
                     st.one_of(number, number, st.binary(min_size=1, max_size=4)))  # fmt: skip
    grown = st.builds(lambda at, new: ByteEdit(at, 0, new), places,
                      st.one_of(st.binary(max_size=16), st.just(bytes(100_000))))  # fmt: skip
    cut = st.builds(lambda at, num: ByteEdit(at, num, b""), places,
                    st.sampled_from([1, 4, 8, 1000, 1 << 30]))  # fmt: skip
    return st.one_of(over, over, grown, cut)


def templates() -> SearchStrategy[str]:
    """Jinja of statements that loop, grow, call, and reach for what they may not have."""
    words = ["messages", "message", "x", "tools", "bos_token", "loop", "self", "namespace",
             "''.__class__", "range(99999)", "cycler", "1", "'a'", "[]", "{}", "x.y.z", "m(x)",
             "raise_exception('a')", "strftime_now('%Y')", "lipsum", "dict(a=x)"]  # fmt: skip
    filters = ["length", "tojson", "join", "list", "trim", "attr('__class__')", "map('upper')",
               "format(x)", "center(99999999)", "batch(3)", "sum", "replace('a','bb')", "first",
               "selectattr('role')", "groupby('role')", "pprint", "xmlattr", "nope"]  # fmt: skip
    operators = ["+", "*", "**", "~", "%", "//", "==", "in", "and", "is defined or"]

    def expression(inner: SearchStrategy[str]) -> SearchStrategy[str]:
        return st.one_of(
            st.builds(lambda a, it: f"({a})|{it}", inner, st.sampled_from(filters)),
            st.builds(lambda a, how, b: f"({a} {how} {b})", inner, st.sampled_from(operators),
                      inner),
            st.builds(lambda a, b: f"{a}[{b}]", inner, inner),
            st.builds(lambda a, b: f"[{a}, {b}]", inner, inner),
        )  # fmt: skip

    asked = st.recursive(st.sampled_from(words), expression, max_leaves=5)
    written = st.builds("{{{{ {} }}}}".format, asked)
    leaves = st.one_of(written, written, st.sampled_from(["a", "<|end|>", "{{", "{% if %}", "{#"]))

    def block(inner: SearchStrategy[str]) -> SearchStrategy[str]:
        return st.one_of(
            st.builds(lambda a, b: f"{{% for x in {a} %}}{b}{{% endfor %}}", asked, inner),
            st.builds(lambda a, b: f"{{% for message in messages %}}{a}{b}{{% endfor %}}", inner,
                      inner),
            st.builds(lambda a, b: f"{{% if {a} %}}{b}{{% endif %}}", asked, inner),
            st.builds(lambda a, b: f"{{% set x = {a} %}}{b}", asked, inner),
            st.builds(lambda a: f"{{% macro m(x) %}}{a}{{{{ m(x) }}}}{{% endmacro %}}", inner),
            st.builds(lambda a, b, n: (a + b) * n, inner, inner, st.sampled_from([1, 2, 60])),
        )  # fmt: skip

    return st.recursive(leaves, block, max_leaves=8)


def damages(bases: Path) -> SearchStrategy[Damage]:
    """One to three changes of one file."""
    files = [(base.name, file.name) for base in sorted(bases.iterdir()) for file in base.iterdir()]
    formats = (".json", ".safetensors", ".gguf")
    files = sorted(it for it in files if it[1].endswith(formats))

    def edits(name: str) -> SearchStrategy[tuple[ByteEdit | JsonEdit, ...]]:
        of_bytes = st.lists(byte_edits(), min_size=1, max_size=3)
        of_json = st.lists(json_edits(values()), min_size=1, max_size=3)
        some: SearchStrategy[Any] = (
            of_bytes if name.endswith(".gguf") else st.one_of(of_json, of_json, of_bytes)
        )
        return some.map(tuple)

    changed = st.sampled_from(files).flatmap(
        lambda it: edits(it[1]).map(lambda edits: Damage(it[0], it[1], edits))
    )

    def replaced(source: str) -> Damage:
        new = source.encode("utf-8", "replace")
        return Damage("shipped", TEMPLATE, (ByteEdit(0, 0, new),))

    return st.one_of(changed, changed, changed, templates().map(replaced))


class WatchedLoader:
    """Loads damaged checkpoints; counts what comes of them."""

    def __init__(self, folder: Path, count: Callable[[str], None]) -> None:
        self.bases = folder / "bases"
        self.bases.mkdir()
        make_bases(self.bases)
        self._folder = folder / "damaged"
        self._count = count
        self._loader = Loader()

    def check(self, damage: Damage) -> None:
        """Load one; `AssertionError` if it ends in a traceback, or takes too much."""
        found = self._loader.load(damage.write(self.bases, self._folder))
        self._count(found.kind)
        assert found.kind in ALLOWED, found
        assert found.cpu_s < LIMIT_S, found
        assert found.num_bytes < LIMIT_BYTES, found
        assert len(found.message) < 2000, found.message

    def close(self) -> None:
        """End the process that loads."""
        self._loader.close()
