"""`infer chat`: commands, several lines, a full context, a model here and a server elsewhere."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infer.cli import terminal_chat
from infer.cli.chat_sources import (
    FULL,
    EngineSource,
    Message,
    ServerSource,
    Taken,
    without_oldest_turn,
)
from infer.cli.main import COMMANDS, app
from infer.cli.terminal_chat import Chat
from infer.config import EngineConfig
from infer.errors import ConfigError, InferError, RequestError
from tests.support.command_line import CliRunner
from tests.support.doubles import make_hash_llm
from tests.support.serving import live


class Echo:
    """Answers each message with itself in capitals; the context takes ten messages."""

    model, max_tokens = "echo", 100

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.interrupts = False
        self.closed = False

    def answer(
        self, messages: list[Message], sampling: Mapping[str, Any], taken: Taken, *, cut: bool
    ) -> Iterator[str]:
        self.asked.append((list(messages), dict(sampling)))
        if len(messages) > 10 and not cut:
            raise RequestError("too many messages", code=FULL)
        taken.num_dropped = max(0, len(messages) - 10)
        taken.num_prompt = 9 * min(10, len(messages))
        yield messages[-1]["content"].upper()
        taken.add(3)
        if self.interrupts:
            raise KeyboardInterrupt
        taken.finish_reason = "stop"

    def why(self, taken: Taken, notes: Console) -> None:
        notes.print(f"because {taken.num_tokens}")

    def use(self, model: str) -> None:
        if model != "other":
            raise InferError(f"no model {model}")
        self.model = model

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Holds a conversation of lines; returns (source, answers, notes)."""

    def talk(lines: str, source: Any = None, **how: Any) -> tuple[Any, str, str]:
        source, notes = source or Echo(), io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        system, sampling = how.get("system"), how.get("sampling", {})
        Chat(source, Console(file=notes, width=200), system, sampling).run()
        return source, capsys.readouterr().out, notes.getvalue()

    return talk


def contents(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages]


def test_a_conversation_with_every_command(talk: Any, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    source, out, notes = talk(
        f"one\ntwo\n/retry\n/undo\n/save {file}\nthree\n/tokens\n/why\n/set temperature 0\n"
        f"/set stop .\n/set\n/model\n/model other\n/model no\n/reset\n/load {file}\nfour\n/system\n"
        "/system new\nfive\n/help\n/exit\nsix\n",
        system="old",
    )
    asked = [contents(messages) for messages, _ in source.asked]
    assert asked == [
        ["old", "one"],
        ["old", "one", "ONE", "two"],
        ["old", "one", "ONE", "two"],
        ["old", "one", "ONE", "three"],
        ["old", "one", "ONE", "four"],
        ["new", "five"],
    ]
    assert out.split() == ["ONE", "TWO", "TWO", "THREE", "FOUR", "FIVE"]
    sampling = [fields for _, fields in source.asked]
    assert sampling[3] == {}
    assert sampling[4] == {}, "a conversation comes back with the sampling that it had"
    for said in ("because 3", "temperature is 0", "stop .", "echo answers", "other answers"):
        assert said in notes
    for said in ("no model no", "taken back: two", "39 of 100 tokens", "/summary"):
        assert said in notes


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/quit", "/quit is not a command; /help lists"),
        ("/undoo", "/undoo is not a command; do you mean /undo?"),
        ("/sumary", "do you mean /summary?"),
        ("/sys", "do you mean /system?"),
        ("/set foo 1", "there is no field 'foo'; there are temperature"),
        ("/set temperature hot", "temperature"),
        ("/set temperature 9", "temperature"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/such/folder/x", "cannot be written"),
        ("/load", "/load needs the name of a file"),
        ("/load /no/such/file", "cannot be read"),
        ("/retry", "no message to answer again"),
        ("/undo", "nothing to take back"),
        ("/why", "there is no answer yet"),
        ("/summary", "nothing to summarise"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_the_chat_goes_on(
    line: str, said: str, talk: Any
) -> None:
    source, out, notes = talk(f"{line}\nhello\n")
    assert said in notes
    assert "Traceback" not in notes
    assert out == "HELLO\n"
    assert source.asked == [([{"role": "user", "content": "hello"}], {})]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"5", b"{}", b'{"messages": 5}', b'{"messages": [{}]}', b"\xff"),
        *(b"[" * 10_000, b'{"messages": [], "sampling": {"no": 1}}'),
        b'{"messages": [], "sampling": [1]}',
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    content: bytes, talk: Any, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(content)
    source, _, notes = talk(f"one\n/load {tmp_path / 'x'}\ntwo\n")
    assert contents(source.asked[-1][0]) == ["one", "ONE", "two"]
    assert "is no conversation that /save has written" in notes


def test_paths_and_text_that_begin_with_a_slash_are_messages(talk: Any) -> None:
    source, _, _ = talk('/etc/hosts is what?\n"""\n/undo\nof two lines\n"""\n"""/help"""\n')
    assert [messages[-1]["content"] for messages, _ in source.asked] == [
        "/etc/hosts is what?",
        "/undo\nof two lines",
        "/help",
    ]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(talk: Any) -> None:
    source = Echo()
    source.interrupts = True
    _, out, _ = talk("one\ntwo\n", source)
    assert contents(source.asked[-1][0]) == ["one", "ONE", "two"]
    assert out.split() == ["ONE", "TWO"]


def test_a_full_context_has_two_ways_on(talk: Any) -> None:
    lines = "".join(f"m{i}\n" for i in range(6))
    source, _, notes = talk(f"{lines}/forget\nnext\n")
    assert "too many messages; /forget goes on" in notes
    assert len(source.asked[-1][0]) == 11, "what was refused is not kept"
    assert "without the oldest 1 messages" in notes
    source, _, notes = talk(f"{lines}/summary\nnext\n", system="s")
    assert contents(source.asked[-1][0])[0] == "s"
    assert "What we have talked about so far" in contents(source.asked[-1][0])[1]
    assert contents(source.asked[-1][0])[-1] == "next"
    assert len(source.asked[-1][0]) == 4
    assert "of 100 tokens of the context are used" in notes


def test_the_oldest_turn_goes_whole() -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": str(at)} for at, role in enumerate(roles)]
    shorter = without_oldest_turn(messages)
    assert shorter is not None
    assert contents(shorter) == ["0", "5", "6", "7"]
    again = without_oldest_turn(shorter)
    assert again is not None
    assert without_oldest_turn(again) is None


def test_a_model_in_this_process() -> None:
    runner = CliRunner()
    answer = runner.invoke(
        app,
        ["chat", "--max-tokens", "5", "--temperature", "0", "--max-seq-len", "64"],
        input="Hello\n/tokens\n/why\n" + "Tell me more of it, please, I want to know all.\n" * 9,
    )
    assert answer.exit_code == 0, answer.output
    assert "of 64 tokens of the context are used" in answer.stderr
    assert "/forget goes on without the oldest messages" in answer.stderr
    assert len(answer.stdout.splitlines()) >= 2
    cut = runner.invoke(
        app,
        ["run", "--max-tokens", "5", "--max-seq-len", "64"],
        input="/forget\n" + "Tell me more of it, please, I want to know all.\n" * 9,
    )
    assert cut.exit_code == 0, cut.output
    assert "without the oldest" in cut.stderr
    assert len([line for line in cut.stderr.splitlines() if "first after" in line]) == 9


def test_another_model_takes_over_only_if_it_loads(tmp_path: Path) -> None:
    notes = Console(file=io.StringIO())
    source = EngineSource(EngineConfig(max_seq_len=64), notes)
    try:
        with pytest.raises(InferError, match="neither a folder here nor a hub id"):
            source.use("no such model")
        message = [{"role": "user", "content": "Hello"}]
        assert "".join(source.answer(message, {"max_tokens": 3}, Taken(), cut=False))
        assert source.model == "infer-demo"
    finally:
        source.close()


def test_a_server(talk: Any) -> None:
    with live(make_hash_llm(max_seq_len=200)) as url:
        source = ServerSource(url, None, None)
        _, out, notes = talk(
            "hello\n/why\n/tokens\n/model no\n", source, sampling={"max_tokens": 4}
        )
        assert out.strip()
        assert "/v1/chat/completions" in notes
        assert "4 tokens, first after" in notes
        assert "has no model 'no'; it has hash-model" in notes
        _, _, notes = talk(("x" * 90 + "\n") * 3, source, sampling={"max_tokens": 4})
        assert "maximum context length" in notes
        assert "/forget goes on" in notes
        _, _, notes = talk("/forget\n" + ("x" * 90 + "\n") * 3, source, sampling={"max_tokens": 4})
        assert "without the oldest" in notes
    refused = CliRunner().invoke(app, ["chat", "--url", url, "--dtype", "int8"])
    assert isinstance(refused.exception, ConfigError)
    assert "a setting of an engine" in str(refused.exception)
    gone = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9"])
    assert "no infer server answers" in str(gone.exception)


STREAMS = [
    b"",
    b"data: [1]\n\n",
    b"data: {\n\n",
    b"data: \xff\n\n",
    b'data: {"error": {"message": "\\u001b]52;c;x"}}\n\n',
    b'data: {"choices": 5}\n\ndata: [DONE]\n\n',
    b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
    b'data: {"choices": [], "usage": {}}\n\n',
    b"data: " + b"x" * (2 << 20),
    b'data: {"choices": [{"delta": {"content": "cut"}}]}\n\n',
]


@pytest.mark.parametrize("stream", STREAMS, ids=range(len(STREAMS)))
def test_a_hostile_server_ends_an_answer_with_one_sentence(stream: bytes, talk: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            card = {"id": "m", "max_model_len": 100}
            self.wfile.write(json.dumps({"data": [card]}).encode())

        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(stream)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        source = ServerSource(f"http://127.0.0.1:{server.server_port}", None, None)
        _, out, notes = talk("one\n/why\n", source)
        assert "the answer was broken off" in notes
        assert "\x1b" not in out + notes
    finally:
        server.shutdown()
        server.server_close()


def test_what_is_pasted_is_one_message() -> None:
    """In a terminal with GNU readline, which is told when a paste begins and ends."""
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit does not know pasting")
    code = """
from infer.cli.terminal_chat import read_message
print(read_message().text.split(chr(10)), ">>")
"""
    fd, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as child:
        try:
            _read_until(fd, "›")
            os.write(fd, b"\x1b[200~one\ntwo\nthree\x1b[201~")
            os.write(fd, b"\r")
            assert str(["one", "two", "three"]) in _read_until(fd, ">>")
        finally:
            child.kill()
            os.close(fd)
            os.close(theirs)


def _read_until(fd: int, mark: str) -> str:
    text, ends_s = b"", time.monotonic() + 30
    while mark not in text.decode("utf-8", "replace"):
        assert time.monotonic() < ends_s, text
        if select.select([fd], [], [], 1)[0]:
            text += os.read(fd, 4096)
    return text.decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["serv", "chta", "modles", "plna"])
def test_a_command_that_is_not_there_says_what_is_near(name: str) -> None:
    shown = CliRunner().invoke(app, [name])
    assert shown.exit_code == 2
    assert "Do you mean " in shown.output
    assert any(command in shown.output for command in COMMANDS)


def test_a_prompt_from_stdin() -> None:
    runner, options = CliRunner(), ["--max-tokens", "3", "--temperature", "0"]
    given = runner.invoke(app, ["generate", "Once upon a time", *options])
    read = runner.invoke(app, ["generate", "-", *options], input="Once upon a time\n")
    assert (read.exit_code, read.stdout) == (0, given.stdout)
    empty = runner.invoke(app, ["generate", "-"], input=" \n")
    assert "no text on stdin" in str(empty.exception)


def test_the_commands_are_those_of_the_help(talk: Any) -> None:
    _, _, notes = talk("/help\n")
    assert len([line for line in notes.splitlines() if line.startswith("/")]) == 14
    assert terminal_chat.NEARLY_FULL < 1
