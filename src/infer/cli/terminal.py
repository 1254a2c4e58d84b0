"""Generating and chatting in the terminal: text on stdout as it comes, everything else on stderr.

So the file of `infer generate … > file` holds the text alone. Ctrl+C stops the answer that is being
written, and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

from infer.cli.plain import note, write
from infer.config import EngineConfig
from infer.engine.llm import LLM
from infer.errors import RequestError
from infer.readable_text import readable
from infer.types import SamplingParams, TextDelta

COMMANDS = "/reset starts a new conversation, /exit ends, Ctrl+C stops an answer"


@dataclass
class Speed:
    """The speed of one stream."""

    num_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def __str__(self) -> str:
        if not self.num_tokens:
            return "no tokens"
        text = f"{self.num_tokens} tokens, first after {self.first_token_s * 1000:.0f} ms"
        rest_s = self.total_s - self.first_token_s
        if self.num_tokens > 1 and rest_s > 0:
            text += f", then {(self.num_tokens - 1) / rest_s:.1f} tok/s"
        return text


def write_stream(pieces: Iterable[TextDelta]) -> tuple[str, Speed]:
    """Print the pieces of a stream as they come; returns the whole text and its speed."""
    speed, text = Speed(), ""
    started_s = time.perf_counter()
    try:
        for piece in pieces:
            speed.total_s = time.perf_counter() - started_s
            if not speed.num_tokens:
                speed.first_token_s = speed.total_s
            speed.num_tokens += len(piece.token_ids)
            text += piece.text
            write(piece.text)
    except KeyboardInterrupt:
        pass
    print()
    return text, speed


def run_generate(
    config: EngineConfig, prompt: str, sampling: SamplingParams, max_tokens: int | None
) -> None:
    """`infer generate`: print the prompt and its continuation. `max_tokens`: where neither the
    sampling nor the model has a limit."""
    notes = Console(stderr=True)
    with _load(config, notes) as llm:
        sampling = _limited(llm, sampling, max_tokens)
        pieces = llm.stream(prompt, sampling)
        write(prompt)
        _, speed = write_stream(pieces)
    note(notes, speed)


def run_chat(config: EngineConfig, system: str | None, sampling: SamplingParams) -> None:
    """`infer chat`: read lines and answer them until the end of input or `/exit`."""
    notes = Console(stderr=True)
    with _load(config, notes) as llm:
        note(notes, f"{llm.model_name} — {COMMANDS}")
        sampling = _limited(llm, sampling, None)
        beginning = [{"role": "system", "content": readable(system)}] if system else []
        history = list(beginning)
        while True:
            line = _read_line()
            if line is None or line == "/exit":
                return
            if line == "/reset":
                history = list(beginning)
                note(notes, "a new conversation")
            elif line.startswith("/"):
                note(notes, f"{line.split()[0]} is not a command; {COMMANDS}")
            elif line:
                history.append({"role": "user", "content": line})
                try:
                    answer, speed = write_stream(llm.stream(history, sampling))
                except RequestError as error:
                    history.pop()
                    note(notes, f"{error}; /reset starts a new conversation", "yellow")
                    continue
                history.append({"role": "assistant", "content": answer})
                note(notes, speed)


def _read_line() -> str | None:
    """One line of the user; None at the end of input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives `input` line editing and history
    while True:
        try:
            return readable(input("\n› " if sys.stdin.isatty() else "")).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _limited(llm: LLM, sampling: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """`sampling` with a limit, if neither it nor the model has one."""
    if "max_tokens" in sampling.given or llm.sampling_defaults.max_tokens is not None:
        return sampling
    return sampling.replace(max_tokens=max_tokens)


def _load(config: EngineConfig, notes: Console) -> LLM:
    with notes.status("loading the model …"):
        llm = LLM.from_config(config)
    if llm.sampling_defaults.values:
        note(notes, f"what is not chosen: {llm.sampling_defaults}")
    return llm
