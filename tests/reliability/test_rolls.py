"""Rolling restarts behind HAProxy, nginx and Envoy, with the blocks of docs/proxies.md: nothing is
lost.

Two servers with the shipped model are restarted in turn, ten times, under streams and plain
requests. `pytest -m peer tests/reliability/test_rolls.py`; skipped where a proxy is not installed.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.doubles import make_hash_llm
from tests.support.raw_http import connect
from tests.support.server_process import ENV, ROOT
from tests.support.serving import live
from tests.support.transports import make_certificate
from tests.support.waits import until

pytestmark = [pytest.mark.peer, pytest.mark.timeout(900)]

ROLLS = 10
CLIENTS = 4
"""Of each kind."""
MIN_ANSWERS = 400
"""Of each kind, over all restarts."""
BLOCKS = (ROOT / "docs/proxies.md").read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def block_of(heading: str, ports: list[int]) -> str:
    """The block below a heading of the page, with the servers of the test."""
    text = BLOCKS.split(f"### {heading}\n")[1].split("```")[1].partition("\n")[2]
    for number, port in enumerate(ports, 1):
        for between in (":", ", port_value: "):
            text = text.replace(f"10.0.0.{number}{between}8000", f"127.0.0.1{between}{port}")
        assert str(port) in text
    return text


def pieces_of(url: str, path: str, body: dict[str, Any] | None, *more: str) -> list[bytes]:
    """A whole answer, up to the end of its connection, as it arrives. `more`: lines of the head."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: localhost", *more]
    lines += ["connection: close", "content-type: application/json", f"content-length: {len(data)}"]
    with connect(url) as sock:
        sock.settimeout(60)
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        return list(iter(lambda: sock.recv(65536), b""))


def answered(url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Its bytes."""
    return b"".join(pieces_of(url, path, body))


class Backend:
    """A server that can be restarted on its port."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        """`options`: further ones of `infer serve`."""
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._options = options
        self._log = folder / f"{self.port}.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "infer", "serve", "--port", str(self.port)]
        options = [
            "--no-standby",
            "--sessions",
            "off",
            "--drain-delay-s",
            "3",
            "--num-threads",
            "1",
            *self._options,
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen([*command, *options], env=ENV, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        try:
            return answered(self.url, "/health/ready").startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def log(self) -> bytes:
        return self._log.read_bytes()

    def roll(
        self, amid: Callable[[], None] = lambda: None, starting: Callable[[], None] = lambda: None
    ) -> None:
        """End it as a supervisor does, and start it again. `amid`: called while it ends;
        `starting`: between the two."""
        self.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        amid()
        assert self.process.wait(90) == 0, self.log()[-3000:]
        starting()
        self.process = self._start()
        until(self.is_ready, 120)


@contextmanager
def haproxy(
    folder: Path, ports: list[int], tls: Path | None = None, *, is_plain: bool = False
) -> Iterator[str]:
    """HAProxy in front of servers. `tls`: file of the certificates that they may show; `is_plain`:
    it does not speak TLS itself."""
    program = shutil.which("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    certificate, key = make_certificate(folder, "proxy")
    pem = folder / "infer.pem"
    pem.write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    port = free_port()
    text = block_of("HAProxy", ports).replace("/etc/haproxy/infer.pem", str(pem))
    if is_plain:
        text = text.replace(f" ssl crt {pem}", "")
    if tls is not None:
        text = text.replace(" check\n", f" check ssl verify required ca-file {tls}\n")
    file = folder / "haproxy.cfg"
    file.write_text(text.replace("bind :443", f"bind 127.0.0.1:{port}"), encoding="utf-8")
    with subprocess.Popen([program, "-db", "-f", file]) as process:
        try:
            yield f"http{'' if is_plain else 's'}://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def nginx(folder: Path, ports: list[int], tls: Path | None = None) -> Iterator[str]:
    """As `haproxy`."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    block = block_of("nginx", ports).replace("listen 8080", f"listen 127.0.0.1:{port}")
    if tls is not None:
        lines = (
            f"proxy_ssl_verify on; proxy_ssl_trusted_certificate {tls}; proxy_ssl_name 127.0.0.1"
        )
        block = block.replace("proxy_pass http://infer", f"{lines};\nproxy_pass https://infer")
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{name}_temp_path {folder / name};" for name in names)
    head = f"daemon off; pid {folder / 'pid'}; error_log {folder / 'error.log'};\nevents {{}}\n"
    file = folder / "nginx.conf"
    file.write_text(f"{head}http {{ access_log off; {paths}\n{block}}}\n", encoding="utf-8")
    with subprocess.Popen([program, "-c", file, "-e", folder / "error.log"]) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGQUIT)


@contextmanager
def envoy(folder: Path, ports: list[int]) -> Iterator[str]:
    """As `haproxy`."""
    program = shutil.which("envoy")
    if program is None:
        pytest.skip("envoy is not installed")
    port = free_port()
    text = block_of("Envoy", ports)
    text = text.replace("0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {port}")
    file = folder / "envoy.yaml"
    file.write_text(text, encoding="utf-8")
    options = ["--log-path", str(folder / "envoy.log"), "--use-dynamic-base-id"]
    with subprocess.Popen([program, "-c", str(file), *options]) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def end_of(answer: bytes, is_stream: bool) -> str:
    """How an answer has ended: `whole`, or what is wrong with it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return f"{head[:40]!r} {body[:80]!r}"
    whole = b"data: [DONE]" in body if is_stream else b'"finish_reason":"length"' in body
    return "whole" if whole else f"cut off: {body[-60:]!r}"


@pytest.mark.parametrize("proxy", [haproxy, nginx, envoy])
def test_ten_restarts_lose_nothing(proxy: Any, tmp_path: Path) -> None:
    ends: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    is_over = threading.Event()

    def ask(url: str, is_stream: bool) -> None:
        body = {"prompt": "Once", "max_tokens": 60 if is_stream else 8, "ignore_eos": True}
        while not is_over.is_set():
            try:
                answer = answered(url, "/v1/completions", {**body, "stream": is_stream})
                ends[is_stream][end_of(answer, is_stream)] += 1
            except OSError as error:
                ends[is_stream][f"{type(error).__name__}: {error}"] += 1
            time.sleep(0.05)

    backends = [Backend(tmp_path) for _ in range(2)]
    try:
        for backend in backends:
            until(backend.is_ready, 180)
        with ExitStack() as held:
            url = held.enter_context(proxy(tmp_path, [each.port for each in backends]))
            until(lambda: _is_up(url), 30)
            threads = [
                threading.Thread(target=ask, args=(url, is_stream))
                for is_stream in ends
                for _ in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            try:
                for turn in range(ROLLS):
                    backends[turn % 2].roll()
                until(lambda: min(it.total() for it in ends.values()) >= MIN_ANSWERS, 120)
            finally:
                is_over.set()
                for thread in threads:
                    thread.join(90)
    finally:
        for backend in backends:
            backend.process.kill()
            backend.process.wait()
    print({"streams" if kind else "plain": dict(counts) for kind, counts in ends.items()})
    for counts in ends.values():
        assert set(counts) == {"whole"}, ends


def reads_of(url: str, body: dict[str, Any]) -> int:
    """In how many pieces a stream arrives."""
    pieces = pieces_of(url, "/v1/completions", {**body, "stream": True}, "accept-encoding: gzip")
    assert b"data: [DONE]" in b"".join(pieces)
    return len(pieces)


@pytest.mark.parametrize(
    "proxy", [haproxy, functools.partial(haproxy, is_plain=True), nginx, envoy]
)
def test_a_proxy_hands_on_each_token(proxy: Any, tmp_path: Path) -> None:
    """By itself HAProxy collects for 200 ms where it does not speak TLS."""
    body = {"prompt": [1, 2], "max_tokens": 200, "ignore_eos": True}
    with live(make_hash_llm(step_s=0.01)) as direct:
        port = int(direct.rpartition(":")[2])
        with proxy(tmp_path, [port, port]) as url:
            until(lambda: _is_up(url), 30)
            assert reads_of(url, body) > 50
            assert reads_of(direct, body) > 50


def _is_up(url: str) -> bool:
    try:
        return bool(re.match(rb"HTTP/1.1 200", answered(url, "/health/ready")))
    except OSError:
        return False
