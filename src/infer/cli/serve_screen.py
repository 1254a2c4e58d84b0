"""`TerminalScreen`: `infer serve` in a terminal: a spinner while it loads, then what it serves"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infer.cli.plain import visible
from infer.load_stages import STAGES
from infer.main_memory import gib
from infer.server.observe.terminal_lines import CLEAR_LINE, columns_of, is_terminal
from infer.server.screen import Screen, Served
from infer.threads import BackgroundThread

if TYPE_CHECKING:
    from infer.engine.client.async_llm import AsyncLLM

FRAME_S = 0.1
"""Seconds between two pictures of the spinner."""
FIRST_STAGE = "starting the engine"
_FRAMES, _ASCII_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
_LABEL_COLUMNS = 11


@contextlib.contextmanager
def screen_of(log_format: str, names: Sequence[str]) -> Iterator[Screen]:
    """The screen of a server that loads the models `names`, within the block: the one of a terminal
    where stderr is one and the log is text."""
    if log_format != "text" or not is_terminal(sys.stderr):
        yield Screen()
        return
    with Spinner(", ".join(names)) as spinner:
        yield TerminalScreen(spinner)


class Spinner(logging.Handler):
    """A line that moves while models are loaded; as a handler it is told the stages."""

    def __init__(self, names: str) -> None:
        """`names`: what is loaded."""
        super().__init__()
        self._names, self._stage = visible(names), FIRST_STAGE
        self._started_s = time.monotonic()
        encoding = (getattr(sys.stderr, "encoding", None) or "ascii").lower()
        self._frames = itertools.cycle(_FRAMES if "utf" in encoding else _ASCII_FRAMES)
        self._has_ended = threading.Event()
        self._thread = BackgroundThread(self._run, self._has_ended.set, "infer-spinner")

    def __enter__(self) -> Spinner:
        STAGES.setLevel(logging.DEBUG)
        STAGES.propagate = False
        STAGES.addHandler(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`: a stage begins, and is shown however short it is."""
        self._stage = visible(record.getMessage())
        self._draw()

    def stop(self) -> None:
        """Clear the line and show nothing more; may be called again."""
        if self._has_ended.is_set():
            return
        self._thread.stop()
        STAGES.removeHandler(self)
        STAGES.propagate = True
        STAGES.setLevel(logging.NOTSET)
        _write(CLEAR_LINE)

    def _run(self) -> None:
        while not self._has_ended.wait(FRAME_S):
            with self.lock or contextlib.nullcontext():  # `emit` has it
                self._draw()

    def _draw(self) -> None:
        waited_s = time.monotonic() - self._started_s
        text = f"{next(self._frames)} {self._names}: {self._stage} ({waited_s:.0f} s)"
        _write(CLEAR_LINE + text[: columns_of(sys.stderr) - 1])


class TerminalScreen(Screen):
    """The spinner names the part of the load that has begun. It hides no cursor, because Ctrl+C
    ends a server that loads at once. All but the line on stdout goes to stderr."""

    def __init__(self, spinner: Spinner) -> None:
        self._spinner = spinner

    def serving(self, line: str, served: Served) -> None:
        """See `Screen`."""
        self._spinner.stop()
        super().serving(line, served)
        for label, text in lines_of(served):
            width = max(20, columns_of(sys.stderr) - _LABEL_COLUMNS - 1)
            rows = textwrap.wrap(visible(text), width, break_on_hyphens=False)
            for number, row in enumerate(rows or [""]):
                _write(f"  {'' if number else label:<{_LABEL_COLUMNS - 2}}{row}\n")

    def ending(self, num_open: int, timeout_s: float) -> None:
        """See `Screen`."""
        if num_open:
            requests = "1 request" if num_open == 1 else f"{num_open:,} requests"
            how = f"finishing {requests}, up to {timeout_s:g} s; Ctrl+C again ends now"
            _write(f"{CLEAR_LINE}{how}\n")


def lines_of(served: Served) -> Iterator[tuple[str, str]]:
    """What is served, for somebody who sees it for the first time: label and text of each line."""
    for engine in served.engines:
        weights = f", {engine.weights}" if engine.weights else ""
        yield "model", f"{engine.model_name}{weights}"
        seats = "1 request" if engine.num_seats == 1 else f"{engine.num_seats:,} requests"
        yield "context", f"{engine.max_seq_len:,} tokens; {seats} at the same time"
    if not served.engines:
        yield "model", f"{served.names}, loaded when a request asks for it"
    if memory := _memory(served.engines):
        yield "memory", memory
    is_url = served.url.startswith("http")
    if served.has_page and is_url:
        yield "page", f"{served.url}/"
    yield "API", f"{served.url}/v1" if is_url else f"/v1 at {served.url}"


def _memory(engines: Sequence[AsyncLLM]) -> str:
    """How much the weights and caches take; empty where no engine has said it."""
    most = now = 0.0
    for engine in engines:
        gauges = engine.engine_client.stats().gauges
        most += engine.weight_bytes + gauges.kv_bytes
        touched = gauges.num_touched_pages / gauges.num_pages if gauges.num_pages else 0.0
        now += engine.weight_bytes + gauges.kv_bytes * touched
    if not most:
        return ""
    if now >= most:
        return f"{gib(most)} for weights and cache"
    return f"up to {gib(most)} as the cache fills, {gib(now)} now"


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
        sys.stderr.write(text)
        sys.stderr.flush()
