"""What others wrote is shown as text: no markup is read, no order reaches the terminal."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from infer.cli.explain import write
from infer.cli.main import app, main
from infer.cli.plain import note, visible
from infer.cli.terminal import write_stream
from infer.errors import InferError
from infer.types import TextDelta
from tests.support.command_line import CliRunner
from tests.support.request_traces import TRACE

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
HOSTILE = {
    CLIPBOARD: "\\x1b]52;c;cm0gLXJm\\x07",
    "\x1b[2J\x9b31m": "\\x1b[2J\\x9b31m",
    "a\rb\x7f": "a\\x0db\\x7f",
    "\u202egnp.exe": "\\u202egnp.exe",
    "plain ✓ 日本\n\ttext 🙂": "plain ✓ 日本\n\ttext 🙂",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_controls_are_written_out(text: str) -> None:
    assert visible(text) == HOSTILE[text]
    assert "".join(map(visible, text)) == HOSTILE[text]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_writes(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    pieces = [TextDelta(text=piece, token_ids=(1,)) for piece in ("a\x1b", "[2Jb", "[bold]")]
    text, _ = write_stream(pieces)
    assert text == "a\x1b[2Jb[bold]", "the history keeps what was said"
    assert out.getvalue() == ("a\\x1b[2Jb[bold]\n" if is_terminal else "a\x1b[2Jb[bold]\n")


def test_notes_read_no_markup() -> None:
    out = io.StringIO()
    note(Console(file=out, force_terminal=True, width=80), "[/foo] [link=x]y" + CLIPBOARD)
    assert "[/foo] [link=x]y" in out.getvalue()
    assert CLIPBOARD not in out.getvalue()


@pytest.mark.parametrize("model", ["[/foo]", "[bold]x", "/no/[red]such", "a\x1b[2Jb"])
def test_errors_of_the_start_read_no_markup(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", model])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert visible(model) in error
    assert error.startswith("infer: ")


def test_a_trace_reads_no_markup() -> None:
    trace: dict[str, Any] = json.loads(json.dumps(TRACE))
    trace.update(id="[/x]", path="[bold]" + CLIPBOARD, outcome="[red]o")
    trace["events"][1]["behind"] = ["[/y]"]
    trace["slowest_gaps"][0]["slowest_step"]["prompts_of"] = ["[/z]" + CLIPBOARD]
    out = io.StringIO()
    write(trace, Console(file=out, width=200))
    for shown in ("[/x]", "[bold]\\x1b]52", "[red]o", "[/y]", "[/z]\\x1b]52"):
        assert shown in out.getvalue()
    assert "\x1b]52" not in out.getvalue()


ANSWERS: list[tuple[int, bytes]] = [
    (200, b""),
    (200, b"hello"),
    (200, b"[]"),
    (200, b"null"),
    (200, b"{}"),
    (200, b"\xff\xfe"),
    (200, b"[" * 100_000),
    (200, json.dumps({**TRACE, "events": 5}).encode()),
    (200, json.dumps({**TRACE, "events": [{}]}).encode()),
    (200, json.dumps({**TRACE, "slowest_gaps": ["x"]}).encode()),
    (200, json.dumps({**TRACE, "total_ms": "soon"}).encode()),
    (500, b"hello"),
    (500, b"[]"),
    (404, b'{"error": 5}'),
    (404, b'{"error": {"message": ["x"]}}'),
    (404, b'{"error": {"message": "[/foo]\\u001b[2J\\nline"}}'),
]


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = ANSWERS[int(self.path.rpartition("/")[2])]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_explain_against_a_hostile_server(number: int, hostile: str) -> None:
    result = CliRunner().invoke(app, ["explain", str(number), "--url", hostile])
    assert isinstance(result.exception, InferError), result.output
    assert result.stdout == ""
    assert "\n" not in str(result.exception)
    assert len(str(result.exception)) < 700


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x", "x", "http://[", "http://a b"])
def test_explain_at_no_address(url: str) -> None:
    result = CliRunner().invoke(app, ["explain", "x", "--url", url])
    assert isinstance(result.exception, InferError)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("of some words that do not fit", ["of some words", "that do not", "fit"]),
        ("/a/path/that/is/long is none", ["/a/path/that/is/long", "is none"]),
        ("é 日本語 日本語 two\n\n  x", ["é 日本語", "日本語 two", "", "  x"]),
    ],
)
def test_notes_in_a_terminal_cut_no_word(text: str, rows: list[str]) -> None:
    def shown(is_terminal: bool) -> list[str]:
        file = io.StringIO()
        note(Console(file=file, width=14, force_terminal=is_terminal, color_system=None), text, "")
        return file.getvalue().splitlines()

    assert shown(True) == rows
    assert shown(False) == text.split("\n"), "a pipe gets whole lines"
