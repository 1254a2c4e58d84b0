"""Logs: the form of the lines, and a handler that never lets a serving thread wait

`JsonLines` makes a line of JSON of each log record and of each request at its end. A line has ids,
sizes, times, addresses and names of keys, and never the text of a prompt or an answer. JSON escapes
control characters, so a line cannot be forged. `LogWriter` hands lines to a thread, so that a pipe
that nobody reads blocks nothing: lines that do not fit into its queue are dropped and counted.
`log_on_stderr` installs both; in a terminal the lines are those of `terminal_lines`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from infer.log_fields import LOG_FIELDS
from infer.readiness import WRITABLE, is_ready
from infer.server.http.connections import PROBE_PATHS
from infer.server.observe.terminal_lines import TerminalLines, is_for_people, is_terminal
from infer.threads import BackgroundThread

if TYPE_CHECKING:
    from infer.server.http.context import RequestContext
    from infer.server.observe.request_trace import BatchTrace

MAX_QUEUED_CHARS = 4 << 20
"""Maximum number of characters of the lines that wait to be written."""
LAST_LINES_S = 1.0
"""Seconds that the end of the server waits for the last lines to be written."""
_LOOK_S = 0.2
_PIECE_BYTES = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512
"""Number of bytes that a writable pipe takes without waiting."""

access = logging.getLogger("infer.access")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object in one line; `LOG_FIELDS` and the record's `fields` are
    members of it."""

    def __init__(self, fields: Mapping[str, str] = MappingProxyType({})) -> None:
        """`fields`: what each line of this process carries."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **LOG_FIELDS.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


class LogWriter(logging.Handler):
    """A handler that never waits: a thread writes the lines, in order, to a stream.

    At most `max_queued_chars` wait there. What comes then is dropped; how much it was is said as
    soon as there is room again.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        max_queued_chars: int = MAX_QUEUED_CHARS,
        last_lines_s: float = LAST_LINES_S,
    ) -> None:
        """`stream`: where lines are written; default: stderr. `last_lines_s`: seconds for which
        `close` writes the waiting lines."""
        super().__init__()
        self._max_queued_chars = max_queued_chars
        self._last_lines_s = last_lines_s
        self._stream = stream or sys.stderr
        self._fd = _descriptor(self._stream)
        self._lines: deque[str] = deque()
        self._num_chars = 0
        self.num_dropped = 0
        """Number of lines that were dropped since the start."""
        self._num_unreported = 0
        self._wake = threading.Condition()
        self._closing_s: float | None = None
        """Time on the monotonic clock until which the rest may be written; None: not closing."""
        self._thread = BackgroundThread(self._run, self._begin_to_close, "infer-log")
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        with self._wake:
            if self._num_chars + len(line) > self._max_queued_chars:
                self.num_dropped += 1
                self._num_unreported += 1
                return
            self._push(line)
            self._wake.notify()

    def close(self) -> None:
        """Write the waiting lines, for `last_lines_s` at most, and end the thread."""
        self._thread.stop()
        super().close()

    def _push(self, line: str) -> None:
        self._lines.append(line)
        self._num_chars += len(line)

    def _begin_to_close(self) -> None:
        with self._wake:
            if self._closing_s is None:
                self._closing_s = time.monotonic() + self._last_lines_s
            self._wake.notify()

    def _next(self) -> str | None:
        """Wait for the next line; None after the last one."""
        with self._wake:
            if self._num_unreported and self._num_chars < self._max_queued_chars // 2:
                lost, self._num_unreported = self._num_unreported, 0
                text = "%d lines of the log were dropped: nobody read it fast enough"
                level, name = logging.WARNING, "infer.server"
                record = logging.LogRecord(name, level, __file__, 0, text, (lost,), None)
                self._push(self.format(record) + "\n")
            while not self._lines:
                if self._closing_s is not None:
                    return None
                self._wake.wait()
            line = self._lines.popleft()
            self._num_chars -= len(line)
            return line

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            while (line := self._next()) is not None:
                if self._fd is None:
                    self._stream.write(line)
                    self._stream.flush()
                elif not self._write(self._fd, line.encode("utf-8", "backslashreplace")):
                    return
        with self._wake:
            self._num_chars = self._max_queued_chars  # from now on every line is dropped
            self._lines.clear()

    def _write(self, fd: int, data: bytes) -> bool:
        """Write all data without a call that blocks; False if the time for closing is over."""
        while data:
            if self._closing_s is not None and time.monotonic() >= self._closing_s:
                return False
            if _takes(fd, _LOOK_S):
                data = data[os.write(fd, data[:_PIECE_BYTES]) :]
        return True


def _descriptor(stream: TextIO) -> int | None:
    """The file descriptor of a stream, if it has one. Lines are written to it directly: a thread
    that waits while it holds the stream's lock would keep the interpreter from ending."""
    try:
        fd = stream.fileno()
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return None
    return fd


def _takes(fd: int, timeout_s: float) -> bool:
    """Whether a file descriptor becomes writable within `timeout_s` seconds."""
    return is_ready(fd, WRITABLE, timeout_s)


@contextlib.contextmanager
def log_on_stderr(
    log_format: str,
    level: str = "info",
    *,
    is_quiet: bool = False,
    fields: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Writes logs to stderr: those of `infer` from `level` on, and warnings of the libraries it
    stands on. Requests have lines in JSON, and in a terminal unless `is_quiet`. `fields`: what
    each line in JSON carries.

    Does nothing where the program has set up logging.
    """
    logger = logging.getLogger("infer")
    if logger.handlers:
        yield
        return
    handler = LogWriter()
    shows_requests = log_format == "json"
    if shows_requests:
        handler.setFormatter(JsonLines(fields))
    elif is_terminal(sys.stderr):
        handler.setFormatter(TerminalLines())
        handler.addFilter(is_for_people)
        shows_requests = not is_quiet
    else:
        handler.setFormatter(logging.Formatter("%(message)s"))
    loggers = [logger, *(logging.getLogger(name) for name in ("uvicorn", "asyncio", "py.warnings"))]
    for named_logger in loggers:
        named_logger.addHandler(handler)
    logging.captureWarnings(True)
    set_log_level(level)
    access.setLevel(logging.INFO if shows_requests else logging.WARNING)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for named_logger in loggers:
            named_logger.removeHandler(handler)
        handler.close()
        access.setLevel(logging.NOTSET)


def set_log_level(level: str) -> None:
    """Log what is of `level` or above, from now on; lines of requests come in any case."""
    logging.getLogger("infer").setLevel(level.upper())


def log_batch(model_name: str, batch: BatchTrace) -> None:
    """Log one line about a static batch that has ended."""
    if access.isEnabledFor(logging.INFO):
        access.info("batch", extra={"fields": {"model": model_name, **batch.fields()}})


def log_request(context: RequestContext) -> None:
    """Log one line about a request that was answered or whose client has left; health probes,
    which come all the time, have none."""
    if not access.isEnabledFor(logging.INFO) or context.path in PROBE_PATHS:
        return
    fields = {
        "request_id": context.id,
        "client_request_id": context.client_id,
        "client": context.client,
        "key": context.key_name or None,
        "model": context.model or None,
        "method": context.method,
        "path": context.path,
        "status": context.status or 499,
        "ms": round(1000 * (time.monotonic() - context.received_s), 3),
        **context.trace_summary,
    }
    access.info("request", extra={"fields": fields})
