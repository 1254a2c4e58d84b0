"""Reading files that others wrote: regular files up to a size, with `LoadError` for all others.

A checkpoint may come from anywhere, and an option may name anything. `read_text` never waits for a
pipe and never reads without an end. `parse_json` limits the depth of a JSON text. `reading` turns
whatever a library raises over the contents of a file into a `LoadError`, so that no start ends in a
traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infer.errors import InferError, LoadError

log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 16 << 20
"""The most bytes of a settings file. The largest published ones, with thousands of added tokens,
have 1 MB."""
MAX_INDEX_BYTES = 64 << 20
"""The most bytes of a sharded checkpoint's index. The index of 200,000 tensors has 20 MB."""
MAX_TOKENIZER_BYTES = 128 << 20
"""The most bytes of a tokenizer.json. Those of 262,000 tokens have 33 MB."""
MAX_LIST_BYTES = 1 << 30
"""The most bytes of an operator's own list: keys, usage, a trace, a result of a benchmark."""


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text of a regular file of at most `max_bytes`, without a byte-order mark.

    Raises `OSError` as `open` does, `UnicodeDecodeError` for other text, and `LoadError` for a file
    that is larger or not regular (a pipe, a device).
    """
    # Without this flag, opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise LoadError(f"{path}: is not a regular file")
        content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
        if content is None:  # /proc/kmsg calls itself regular, and waits for the next line
            raise LoadError(f"{path}: is not a file with an end, so it cannot be read")
        if status.st_size > max_bytes or len(content) > max_bytes:
            raise LoadError(
                f"{path}: is too large ({status.st_size:,} bytes; at most {max_bytes:,} are read)"
            )
    return content.decode("utf-8-sig")


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError`, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns every error of the block into a `LoadError` that begins with `what`.

    Errors of `infer` stay as they are. Over a damaged or hostile file, libraries raise anything,
    even what is not an `Exception` (a panic in Rust). The traceback is logged at level DEBUG.
    """
    try:
        yield
    except InferError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.debug("%s cannot be loaded", what, exc_info=True)
        reason = " ".join(str(error).split())[:500]
        kind = type(error).__name__
        raise LoadError(
            f"{what} cannot be loaded, it is damaged or of an unknown kind: {kind}"
            + (f" ({reason})" if reason else "")
        ) from None
