"""Logs: a pipe that nobody reads blocks nothing, and every line has the documented form."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infer.server.observe.logs import JsonLines, LogWriter, log_on_stderr
from tests.support.doubles import make_hash_llm
from tests.support.serving import live


@contextmanager
def writer_to(stream: io.TextIOBase, **limits: Any) -> Iterator[tuple[logging.Logger, LogWriter]]:
    logger = logging.Logger("test")
    handler = LogWriter(stream, **limits)  # type: ignore[arg-type]
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    try:
        yield logger, handler
    finally:
        handler.close()


def test_lines_are_written_in_order_to_the_last(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("w", encoding="utf-8") as file,
        writer_to(file) as (logger, handler),
    ):
        for i in range(5000):
            logger.warning("%d é \ud800", i)
        handler.close()
        lines = (tmp_path / "log").read_text("utf-8").splitlines()
    assert lines == [f"{i} é \\ud800" for i in range(5000)]
    assert handler.num_dropped == 0


def test_a_stream_without_a_file_is_written_too() -> None:
    with writer_to(stream := io.StringIO()) as (logger, handler):
        logger.warning("here")
        handler.close()
        assert stream.getvalue() == "here\n"


def test_what_nobody_reads_is_dropped_counted_and_said() -> None:
    reading, writing = os.pipe()
    limits = {"max_queued_chars": 100_000}
    with (
        os.fdopen(writing, "w", encoding="utf-8") as stream,
        writer_to(stream, **limits) as (logger, handler),
    ):
        for i in range(20_000):  # the pipe holds 1,300 of them, so who waited would wait for ever
            logger.warning("line %d %s", i, "x" * 40)
        assert 10_000 < handler.num_dropped < 19_000
        dropped = handler.num_dropped
        read = b""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while b"dropped" not in read:
                read += pipe.read(65536) or b""
        assert f"{dropped} lines of the log were dropped" in read.decode()
        assert read.startswith(b"line 0 ")
        kept = [line for line in read.decode().splitlines() if line.startswith("line ")]
        assert len(kept) == 20_000 - dropped


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_end_does_not_wait_for_readers(is_closed: bool) -> None:
    reading, writing = os.pipe()
    with (
        os.fdopen(writing, "w", encoding="utf-8") as stream,
        writer_to(stream, last_lines_s=0.3) as (logger, handler),
    ):
        if is_closed:
            os.close(reading)
        for _ in range(5000):
            logger.warning("x" * 100)
        handler.close()  # returns, which nobody's reading would make it do
        assert not any(thread.name == "infer-log" for thread in threading.enumerate())
    if not is_closed:
        os.close(reading)


def test_every_line_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Also lines of uvicorn, asyncio and warnings, and stack traces."""
    with log_on_stderr("json"):
        for name in ("infer.engine", "uvicorn.error", "asyncio", "py.warnings"):
            logging.getLogger(name).warning("of %s\nin two lines", name)
        logging.getLogger("uvicorn.error").warning("where", stack_info=True)
        try:
            raise ValueError("what")
        except ValueError:
            logging.getLogger("asyncio").exception("failed", extra={"fields": {"odd": object()}})
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines[:4]] == [
        "infer.engine", "uvicorn.error", "asyncio", "py.warnings"
    ]  # fmt: skip
    assert "test_every_line_is_json" in lines[4]["stack"]
    assert "ValueError: what" in lines[5]["exception"]


OTHERS = ("X-Forwarded-For", "X-Real-IP", "Forwarded", "X-Client-IP", "True-Client-IP")
"""Headers in which a proxy may say for whom it asks, and a client whatever it likes."""


@pytest.mark.parametrize("trusted", [None, "*"])
def test_lines_of_requests_have_the_clients_address(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, trusted: str | None
) -> None:
    """And no other, whatever its headers say, though uvicorn would believe those of this machine,
    or of all that FORWARDED_ALLOW_IPS has."""
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    caplog.set_level(logging.INFO, "infer")
    says = dict.fromkeys(OTHERS, "203.0.113.9") | {"X-Forwarded-Proto": "https"}
    with live(make_hash_llm()) as url:
        for headers in ({}, says):
            request = urllib.request.Request(f"{url}/v1/models", headers=headers)
            with urllib.request.urlopen(request, timeout=5) as response:
                response.read()
    lines = [r for r in caplog.records if r.getMessage() == "request"]
    assert len(lines) == 2
    for line in lines:
        assert json.loads(JsonLines().format(line))["client"].startswith("127.0.0.1:")
