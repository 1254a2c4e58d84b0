"""`infer serve` and `infer chat` in a terminal, as people see them, at 60 and at 120 columns."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminals import Session, session

WIDTHS = (60, 120)
pytestmark = [
    pytest.mark.slow,  # a minute of real terminals
    pytest.mark.skipif(sys.platform == "win32", reason="no terminals of this kind"),
]


@pytest.fixture(scope="module", params=WIDTHS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Session, int, str]]:
    """A server in a terminal, its width and its URL."""
    with session(["serve", "--port", "0", "--sessions", "off"], request.param) as shown:
        screen = shown.until(r"API +http://127.0.0.1:\d+/v1\n")
        yield shown, request.param, re.findall(r"API +(http://\S+)/v1", screen)[0]


def ask(url: str, **fields: object) -> bytes:
    body = json.dumps({"prompt": "a b", "max_tokens": 5, **fields}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def test_what_a_newcomer_sees_of_a_server(served: tuple[Session, int, str]) -> None:
    shown, width, url = served
    stages = re.findall(r"infer-demo: ([a-zA-Z ]+) \(\d+ s\)", shown.raw)
    assert list(dict.fromkeys(stages)) == [
        "starting the engine",
        "reading the checkpoint",
        "loading the weights",
        "making the KV cache",
        "trying the kernels",
    ]
    lines = shown.screen().splitlines()
    at = lines.index(f"infer serves infer-demo at {url} (Ctrl+C to stop)")
    labels = [line.split()[0] for line in lines[at + 1 : at + 6]]
    assert labels == ["model", "context", "memory", "page", "API"]
    assert re.search(r"memory +up to \S+ \S+ as the cache fills, \S+ \S+ now", shown.screen())
    assert all(len(line) < width for line in lines[at + 1 : at + 6])
    assert not any(each in line for line in lines for each in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"), "it has gone"


def test_a_request_is_a_line(served: tuple[Session, int, str]) -> None:
    shown, width, url = served
    ask(url)
    line = shown.until(r"[^\n]*/v1/completions 200 [^\n]*\n").splitlines()[-1]
    assert re.search(r"^\d\d:\d\d:\d\d .*/v1/completions 200 · .*\d\+5 tokens .*s$", line)
    assert ("POST" in line, "infer-demo" in line) == (width >= 100, width >= 100)
    assert len(line) < width
    for path in ("/", "/v1/models", "/v1/no%1b%5b2J"):
        subprocess.run(["curl", "-s", f"{url}{path}"], check=True, capture_output=True)
    screen = shown.until(r"404 [^\n]*\n")
    assert " /v1/no\ufffd[2J 404 · " in screen.splitlines()[-1]
    assert "/v1/models" not in screen, "nobody waits for it"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_end_says_what_it_waits_for(width: int) -> None:
    with session(["serve", "--port", "0", "--sessions", "off", "--quiet"], width) as shown:
        screen = shown.until(r"API +http://127.0.0.1:\d+/v1\n")
        url = re.findall(r"API +(http://\S+)/v1", screen)[0]
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 16}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            shown.process.send_signal(signal.SIGINT)
            shown.until(r"finishing 16 requests, up to 30 s; Ctrl\+C again ends now\n")
            shown.process.send_signal(signal.SIGINT)
            assert shown.process.wait(30) == 0
        assert "/v1/completions" not in shown.screen(), "it is quiet"


def test_without_a_terminal_it_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infer", "serve", "--port", "0", "--sessions", "off"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as server,
    ):
        try:
            assert server.stdout is not None
            line = server.stdout.readline().decode()
            found = re.fullmatch(r"infer serves infer-demo at (\S+) \(Ctrl\+C to stop\)\n", line)
            assert found
            ask(found[1])
            server.send_signal(signal.SIGINT)
            assert server.stdout.read() == b""
            assert server.wait(30) == 0
        finally:
            server.kill()
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "/v1/completions" not in text
    assert "memory" not in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("colours", [True, False])
def test_a_chat(width: int, colours: bool) -> None:
    more = {} if colours else {"NO_COLOR": "1"}
    with session(["chat", "--max-tokens", "40", "--temperature", "0"], width, **more) as shown:
        shown.until("›")
        shown.type("Tell me a story about a dog.\r")
        screen = shown.until(r"first after[^\n]*\n(.|\n)*›")
        shown.type("/help\r")
        screen = shown.until("/exit(.|\n)*›")
        assert max(map(len, screen.splitlines())) <= width
        assert colours or not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown.raw)
        shown.type("\x04")
        assert shown.process.wait(30) == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [("q", 0), ("\x1b", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_top_gives_the_terminal_back(
    end: str | signal.Signals, code: int, served: tuple[Session, int, str]
) -> None:
    _, width, url = served
    with session(["top", "--url", url], width) as shown:
        before = termios.tcgetattr(shown.fd)
        shown.until("q leaves, p pauses")
        assert termios.tcgetattr(shown.fd) != before, "keys come as they are pressed"
        rows = shown.screen().splitlines()
        assert max(map(len, rows)) <= width
        if isinstance(end, str):
            shown.type("\x1b[A")  # an arrow key is not Esc
            shown.type("p")
            shown.until("paused: p goes on")
            shown.type("p")
            shown.until(r"(?s)paused: p goes on.*q leaves, p pauses")
            shown.type(end)
        else:
            shown.process.send_signal(end)
        shown.rest()
        assert shown.process.wait(30) == code
        assert shown.raw.rindex("\x1b[?1049l") > shown.raw.rindex("\x1b[?1049h")
        assert shown.raw.rindex("\x1b[?25h") > shown.raw.rindex("\x1b[?25l")
        assert termios.tcgetattr(shown.fd) == before


def test_top_into_a_pipe_is_one_picture(served: tuple[Session, int, str]) -> None:
    _, _, url = served
    command = [sys.executable, "-m", "infer", "top", url]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert b"\x1b" not in done.stdout
    assert done.stdout.count(b"seats ") == 1
