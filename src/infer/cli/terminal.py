"""`infer generate`: text on stdout as it comes, everything else on stderr.

So the file of `infer generate … > file` holds the text alone. Ctrl+C ends the text, and what there
is of it stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console

from infer.cli.chat_sources import Taken, limited, loaded
from infer.cli.plain import note, write
from infer.config import EngineConfig
from infer.errors import InferError
from infer.readable_text import readable
from infer.types import SamplingParams, TextDelta

FROM_STDIN = "-"
"""Prompt that stands for the text on stdin."""
MAX_STDIN_CHARS = 64 << 20
"""Most characters of it."""


def write_stream(pieces: Iterable[TextDelta]) -> tuple[str, Taken]:
    """Print the pieces of a stream as they come; returns the whole text and what it took."""
    taken, text = Taken(), ""
    try:
        for piece in pieces:
            taken.add(len(piece.token_ids))
            text += piece.text
            write(piece.text)
    except KeyboardInterrupt:
        pass
    print()
    return text, taken


def run_generate(
    config: EngineConfig, prompt: str, sampling: SamplingParams, max_tokens: int | None
) -> None:
    """`infer generate`: print the prompt and its continuation. `prompt`: "-" reads it from stdin.
    `max_tokens`: where neither the sampling nor the model has a limit."""
    prompt = _from_stdin() if prompt == FROM_STDIN else readable(prompt)
    notes = Console(stderr=True)
    with loaded(config, notes) as llm:
        pieces = llm.stream(prompt, limited(llm, sampling, max_tokens))
        write(prompt)
        _, taken = write_stream(pieces)
    note(notes, taken)


def _from_stdin() -> str:
    """The text on stdin, without the line feed at its end."""
    text = sys.stdin.read(MAX_STDIN_CHARS + 1)
    if len(text) > MAX_STDIN_CHARS:
        raise InferError(f"the text on stdin is longer than {MAX_STDIN_CHARS:,} characters")
    if not text.strip():
        raise InferError("there is no text on stdin to continue")
    return readable(text.removesuffix("\n"))
