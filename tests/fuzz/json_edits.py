"""Changes to JSON: a value of it is another, or goes."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class JsonEdit:
    """A value of a JSON document, or of the header of safetensors, is another, or goes."""

    way: tuple[int, ...]
    """Which member is entered at each level, counted round."""
    value: Any
    is_removed: bool = False

    def apply(self, content: bytes) -> bytes:
        """The changed content; as it was, where it is no JSON any more."""
        is_header = content[8:9] == b"{"
        num_bytes = int.from_bytes(content[:8], "little") if is_header else len(content)
        text = content[8 : 8 + num_bytes] if is_header else content
        try:
            document = self._changed(json.loads(text), self.way)
        except ValueError:
            return content
        new = json.dumps(document).encode()
        return struct.pack("<Q", len(new)) + new + content[8 + num_bytes :] if is_header else new

    def changed(self, document: Any) -> Any:
        """A changed copy of a document."""
        return self._changed(copy.deepcopy(document), self.way)

    def _changed(self, value: Any, way: tuple[int, ...]) -> Any:
        if not way or not value or not isinstance(value, dict | list):
            return self.value
        names = list(value) if isinstance(value, dict) else list(range(len(value)))
        name = names[way[0] % len(names)]
        if len(way) == 1 and self.is_removed:
            del value[name]
        else:
            value[name] = self._changed(value[name], way[1:])
        return value


def json_edits(values: SearchStrategy[Any], max_depth: int = 5) -> SearchStrategy[JsonEdit]:
    """One of these values anywhere in a document, or nothing in a value's place."""
    ways = st.lists(st.integers(0, 2000), min_size=0, max_size=max_depth).map(tuple)
    return st.builds(JsonEdit, ways, values, st.integers(0, 5).map(lambda n: n == 0))


def edited(
    documents: SearchStrategy[Any], values: SearchStrategy[Any], max_depth: int = 5
) -> SearchStrategy[Any]:
    """Documents with one or two of their values changed."""

    def apply(document: Any, edits: list[JsonEdit]) -> Any:
        for edit in edits:
            document = edit.changed(document)
        return document

    edits = st.lists(json_edits(values, max_depth), min_size=1, max_size=2)
    return st.builds(apply, documents, edits)
