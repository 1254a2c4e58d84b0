"""TLS and Unix sockets, and the errors if they cannot be used."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from infer.config import EngineConfig
from infer.errors import ConfigError, LoadError
from infer.server import serve
from infer.server.address import bind, check_certificate, unix_socket, url_of
from infer.server.serve import Server
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.doubles import make_hash_llm
from tests.support.transports import make_certificate
from tests.support.waits import until

BODY = '{"model": "hash-model", "prompt": "Hello", "max_tokens": 8, "seed": 1}'
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name) for name in ("one", "other")}


@contextlib.contextmanager
def running(sock: socket.socket, settings: ServerSettings) -> Iterator[list[str]]:
    said: list[str] = []
    server = Server(make_hash_llm(), sock, settings, announce=said.append)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        until(lambda: bool(said), 30)
        yield said
    finally:
        server.should_exit = True
        thread.join(30)


def ask(connection: http.client.HTTPConnection) -> None:
    """Ask for a plain answer, a stream, and a refusal after which the connection is closed."""
    connection.request("POST", "/v1/completions", BODY, JSON)
    assert connection.getresponse().read().startswith(b"{")
    streamed = BODY.replace("{", '{"stream": true, ', 1)
    connection.request("POST", "/v1/completions", streamed, JSON)
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.request("POST", "/v1/completions", "{", JSON)
    assert connection.getresponse().status == 400
    connection.close()


def test_tls(made: dict[str, tuple[str, str]]) -> None:
    certificate, key = made["one"]
    settings = ServerSettings(ssl_certfile=certificate, ssl_keyfile=key)
    check_certificate(settings)
    with bind(port=0) as sock, running(sock, settings) as said:
        port = sock.getsockname()[1]
        assert f"https://127.0.0.1:{port}" in said[0]
        trusting = ssl.create_default_context(cafile=certificate)
        ask(http.client.HTTPSConnection("127.0.0.1", port, context=trusting, timeout=30))
        with trusting.wrap_socket(
            socket.create_connection(("127.0.0.1", port), timeout=30),
            server_hostname="127.0.0.1",
        ) as raw:
            raw.sendall(b"no HTTP\r\n\r\n")
            assert raw.recv(1000).startswith(b"HTTP/1.1 400")
        stranger = ssl.create_default_context()
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(http.client.HTTPSConnection("127.0.0.1", port, context=stranger, timeout=30))
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(1000).startswith(b"HTTP")
        ask(http.client.HTTPSConnection("127.0.0.1", port, context=trusting, timeout=30))


def test_an_event_loop_of_others_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray brings uvloop, which uvicorn prefers, and whose transports are others than asyncio's."""

    def refuse() -> None:
        raise AssertionError("uvloop was taken")

    uvloop = ModuleType("uvloop")
    monkeypatch.setattr(uvloop, "new_event_loop", refuse, raising=False)
    monkeypatch.setitem(sys.modules, "uvloop", uvloop)
    with bind(port=0) as sock, running(sock, ServerSettings()):
        ask(http.client.HTTPConnection("127.0.0.1", sock.getsockname()[1], timeout=30))


def test_certificates_that_cannot_be_used(made: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    certificate, key = made["one"]
    text, empty, fifo = tmp_path / "text.pem", tmp_path / "empty.pem", tmp_path / "fifo.pem"
    text.write_text("hello", encoding="utf-8")
    empty.write_text("", encoding="utf-8")
    os.mkfifo(fifo)
    cases = {
        ("gone.pem", key): "ssl_certfile: 'gone.pem' cannot be read: No such file",
        (certificate, "gone.key"): "ssl_keyfile: 'gone.key' cannot be read: No such file",
        (certificate, made["other"][1]): "the key is another certificate's",
        (str(text), key): "cannot be used",
        (certificate, str(text)): "cannot be used",
        (certificate, None): "cannot be used",
        (str(empty), key): "is empty",
        (str(fifo), key): "is not a regular file",
        (str(tmp_path), key): "ssl_certfile",
    }
    for (one, other), told in cases.items():
        with pytest.raises(LoadError) as caught:
            serve.serve_config(
                EngineConfig(model="/no/such"),
                ServerSettings(ssl_certfile=one, ssl_keyfile=other),
                port=0,
            )
        assert told in str(caught.value)
    with pytest.raises(ConfigError, match="ssl_keyfile: is of no use without ssl_certfile"):
        ServerSettings(ssl_keyfile=key)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self._path)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "infer.sock")
    with unix_socket(path) as sock:
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert url_of(sock) == f"unix:{path}"
        with running(sock, ServerSettings(uds=path)) as said:
            assert f"unix:{path}" in said[0]
            ask(_UnixConnection(path))
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(path)
            raw.sendall(b"no HTTP\r\n\r\n")
            assert raw.recv(1000).startswith(b"HTTP/1.1 400")
            raw.close()
            with pytest.raises(ConfigError, match="a server listens at"), unix_socket(path):
                pass
            ask(_UnixConnection(path))
    assert not os.path.exists(path)


def test_paths_of_unix_sockets(tmp_path: Path) -> None:
    path = str(tmp_path / "infer.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    with unix_socket(path):
        os.unlink(path)
        Path(path).write_text("somebody else's", encoding="utf-8")
    assert Path(path).read_text(encoding="utf-8") == "somebody else's"
    with pytest.raises(ConfigError, match="is there and is no socket"), unix_socket(path):
        pass
    for wrong in (str(tmp_path / "no" / "such"), str(tmp_path / ("x" * 200)), "a\0b"):
        with pytest.raises(ConfigError, match="uds: cannot listen"), unix_socket(wrong):
            pass


def test_keys_in_clear_text_are_warned_of(
    tmp_path: Path, made: dict[str, tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    Keys(file, must_exist=False).create("a", KeyLimits())
    certificate, key = made["one"]
    both: dict[str, Any] = {"ssl_certfile": certificate, "ssl_keyfile": key}
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("0.0.0.0", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", both, False),
    ]
    for host, more, warned in cases:
        caplog.clear()
        settings = ServerSettings(api_keys=str(file), **more)
        with caplog.at_level(logging.WARNING), pytest.raises(LoadError, match="/no/such"):
            serve.serve_config(EngineConfig(model="/no/such"), settings, host, 0, in_thread=True)
        assert ("in clear text" in caplog.text) is warned
