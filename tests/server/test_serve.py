"""Running a server: the line when it listens, a port in use, options from settings, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import pytest
import typer

from infer.cli import options
from infer.cli.main import main
from infer.config import EngineConfig, settings_of
from infer.errors import ConfigError
from infer.replicas.launch import FleetSettings
from infer.server import address, serve
from tests.support.command_line import CliRunner
from tests.support.doubles import make_hash_llm
from tests.support.server_process import record
from tests.support.serving import COMPLETIONS, completion_body, live

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def test_importing_the_server_brings_no_torch() -> None:
    code = (
        "import sys, infer.server.__main__, infer.server.app;"
        "assert not {'torch', 'infer.engine.build.assemble'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, timeout=60)


def test_a_port_in_use() -> None:
    with address.bind(port=0) as held:
        port = held.getsockname()[1]
        held.listen()
        with pytest.raises(ConfigError, match=rf"port: {port} is in use on 127\.0\.0\.1"):
            address.bind(port=port)


def test_a_port_that_somebody_else_takes_while_the_model_loads() -> None:
    """Clients are refused until the server listens; the second server on a port gets an error."""
    with address.bind(port=0) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with address.bind(port=port) as other:
            other.listen()
            with pytest.raises(ConfigError, match=rf"port: {port} is in use"):
                serve.run(make_hash_llm(), held)
    assert not any(thread.name == "infer-engine" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("host", "port", "field"),
    [
        ("no.such.host.invalid", 0, "host"),
        ("192.0.2.1", 0, "host"),
        ("x" * 300, 0, "host"),
        ("127.0.0.1", 65536, "port"),
        ("127.0.0.1", -1, "port"),
    ],
)
def test_addresses_that_cannot_be_used(host: str, port: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        address.bind(host, port)
    assert caught.value.field == field


def test_the_url_of_a_socket() -> None:
    with address.bind("0.0.0.0", 0) as sock:
        assert address.url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            sock = address.bind("::1", 0)
        except ConfigError:
            return
        with sock:
            assert address.url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


def parsed(*arguments: str) -> EngineConfig:
    """The settings of a command line."""
    seen: list[EngineConfig] = []
    app = typer.Typer()

    @app.command()
    @options.with_engine_options()
    def command(*, settings: dict[str, Any]) -> None:
        seen.append(EngineConfig.from_kwargs(**settings))

    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not seen:
        raise result.exception
    return seen[0]


def test_every_setting_is_an_option() -> None:
    assert parsed() == EngineConfig()
    changed = {
        "model": "m",
        "served_model_name": "n",
        "dtype": "float32",
        "quantization": "int8",
        "device": "cpu",
        "batching_mode": "static",
        "kv_cache_backend": "slotted",
        "kv_cache_dtype": "int8",
        "scheduler_policy": "fcfs",
        "load_format": "dummy",
        "model_impl": "native",
        "attention_backend": "sdpa",
        "tool_parser": "mistral",
        "reasoning_parser": "think",
        "sampler": "module:function",
        "numa": "all",
        "static_order": "prompt_length",
        "speculative_config": '{"method": "ngram"}',
    }
    static = ("--batching-mode", "static")
    for spec in settings_of(EngineConfig):
        flag = "--" + spec.name.replace("_", "-")
        value: Any
        if spec.kind is bool:
            assert getattr(parsed(flag), spec.name) is True
            assert getattr(parsed(flag.replace("--", "--no-", 1)), spec.name) is False
            continue
        number = 0.5 if spec.name == "gpu_memory_utilization" else 7.5
        value = changed.get(spec.name, "x") if spec.kind is str else spec.kind(number)
        needed = static if spec.name in ("min_batch_size", "static_order") else ()
        assert getattr(parsed(flag, str(value), *needed), spec.name) == value


def test_options_of_a_typer_command() -> None:
    """A command keeps its own parameters, gets the settings that were given, and no others."""
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @options.with_engine_options(leave_out=("model",))
    def command(
        word: Annotated[str, typer.Argument()], times: int = 1, *, settings: dict[str, Any]
    ) -> None:
        seen.append((word, times, settings))

    def invoke(*arguments: str) -> int:
        return CliRunner().invoke(app, arguments).exit_code

    assert invoke("a") == 0
    flags = ["--max-batch-size", "3", "--batch-wait-timeout-s", "0.5", "--dtype", "float32"]
    assert invoke("b", "--times", "2", *flags, "--no-enable-prefix-caching") == 0
    given = {
        "max_batch_size": 3,
        "batch_wait_timeout_s": 0.5,
        "dtype": "float32",
        "enable_prefix_caching": False,
    }
    assert seen == [("a", 1, {}), ("b", 2, given)]
    assert EngineConfig.from_kwargs(**given).max_batch_size == 3
    for wrong in (["--model", "m"], ["--settings", "x"], ["--max-batch-size", "x"]):
        assert invoke("c", *wrong) == 2
    assert len(seen) == 2


def code_of(*arguments: str) -> int | str | None:
    """The exit code of `infer serve`, which is also that of `python -m infer.server`."""
    with pytest.raises(SystemExit) as end:
        main(["serve", *arguments])
    return end.value.code


def test_options_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        parsed("--dtype", "int3")
    with pytest.raises(SystemExit):
        parsed("--max-batch-size", "many")
    assert code_of("--max-batch-size", "0") == 2
    assert "max_batch_size: must be at least 1" in capsys.readouterr().err
    with address.bind(port=0) as held:
        held.listen()
        assert code_of("--port", str(held.getsockname()[1])) == 2
    assert "is in use" in capsys.readouterr().err


def test_main_serves_what_is_assembled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With engines of the tests instead of those that need torch."""
    configs: list[tuple[str, EngineConfig]] = []

    def maker(where: str) -> Any:
        def make(config: EngineConfig, loads: Any = None, standby: Any = None, **how: Any) -> Any:
            assert (how.pop("early", None) is None) is (where == "thread")
            configs.append((where, replace(config, seed=None)))  # the server has drawn one
            limits = {"hang_s": 120.0, "load_timeout_s": 3600.0, "fleet": FleetSettings()}
            assert how == ({} if where == "thread" else limits)
            return make_hash_llm()

        return make

    class Assemble:
        build_async_llm = staticmethod(maker("thread"))

    class Launch:
        launch = staticmethod(maker("process"))

    class Ended(serve.Server):
        async def on_tick(self, counter: int) -> bool:
            return True

    monkeypatch.setitem(sys.modules, "infer.engine.build.assemble", Assemble)
    monkeypatch.setitem(sys.modules, "infer.replicas.launch", Launch)
    monkeypatch.setattr(serve, "Server", Ended)
    assert code_of("--port", "0", "--model", "m", "--max-batch-size", "3") == 0
    line = capsys.readouterr().out
    assert code_of("--port", "0", "--model", "n", "--engine-thread") == 0
    assert configs == [
        ("process", EngineConfig(model="m", max_batch_size=3)),
        ("thread", EngineConfig(model="n")),
    ]
    assert re.fullmatch(r"infer serves hash-model at http://127\.0\.0\.1:\d+ \(.*\)\n", line)


def test_files_are_looked_at_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Launch:
        @staticmethod
        def launch(*_: object, **__: object) -> None:
            raise AssertionError("the model is loaded")

    monkeypatch.setitem(sys.modules, "infer.replicas.launch", Launch)
    nowhere = tmp_path / "no" / "file"
    assert code_of("--port", "0", "--api-keys", str(nowhere)) == 2
    assert "file cannot be read (No such file or directory)" in capsys.readouterr().err
    for url in (f"sqlite:///{nowhere}", "foo://bar"):
        assert code_of("--port", "0", "--sessions", url) == 2
        assert "sessions: the database cannot be used" in capsys.readouterr().err


CLOSED_TERMINAL = -1
"""In place of a signal."""


SCRIPT = textwrap.dedent(
    """
    import sys
    from tests.support.doubles import make_hash_llm
    from infer.server import address, serve
    settings = serve.ServerSettings(drain_timeout_s=float(sys.argv[1]))
    serve.run(make_hash_llm(step_s=0.0), address.bind(port=0), settings)
    """
)


FORKS = textwrap.dedent(
    """
    import fcntl, os, socket, sys, termios
    from tests.support.doubles import make_hash_llm, small_tokenizer
    from infer.server import address, serve
    control = socket.socket(fileno=int(sys.argv[1]))
    small_tokenizer().rest()  # made once, too; it has no process and no thread now
    while True:
        drain_s, (terminal, *outputs), _, _ = socket.recv_fds(control, 64, 3)
        if not drain_s:
            sys.exit()
        if not (pid := os.fork()):
            control.close()
            os.setsid()
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
            for number, descriptor in enumerate((terminal, *outputs)):
                os.dup2(descriptor, number)
                os.close(descriptor)
            break
        for descriptor in (terminal, *outputs):
            os.close(descriptor)
        control.send(b"%d" % pid)
        control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    settings = serve.ServerSettings(drain_timeout_s=float(drain_s))
    serve.run(make_hash_llm(step_s=0.01), address.bind(port=0), settings)
    """
)
"""Imports what a server needs once, and forks for each server: the imports take a second."""


class TerminalServers:
    """Servers one after the other, each the leader of a session with a terminal of its own."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", FORKS, str(theirs.fileno())],
                env=ENV,
                pass_fds=[theirs.fileno()],
            )

        self._control.settimeout(60)
        self._pid: int | None = None

    @contextlib.contextmanager
    def running(self, drain_s: str, terminal: int) -> Iterator[tuple[int, TextIO, TextIO]]:
        """A server's process id, what it writes to stdout, and to stderr."""
        (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
        with open(out, encoding="utf-8") as said, open(errors, encoding="utf-8") as told:
            socket.send_fds(self._control, [drain_s.encode()], [terminal, out_end, errors_end])
            for descriptor in (terminal, out_end, errors_end):
                os.close(descriptor)
            pid = self._pid = int(self._control.recv(64))
            try:
                yield pid, said, told
            finally:
                if self._pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    self.wait()

    def wait(self) -> int:
        """The exit code of the server."""
        code, self._pid = int(self._control.recv(64)), None
        return code

    def close(self) -> None:
        """End the process that forks."""
        self._control.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def servers() -> Iterator[TerminalServers]:
    with contextlib.closing(TerminalServers()) as found:
        yield found


@pytest.mark.parametrize(
    ("drain_s", "signals", "num_tokens", "last"),
    [
        ("10", [signal.SIGTERM], 30, b"data: [DONE]"),
        pytest.param("10", [signal.SIGINT], 30, b"data: [DONE]", marks=pytest.mark.slow),
        ("0.2", [signal.SIGTERM], 400, b"shutting down"),
        ("600", [signal.SIGTERM, signal.SIGTERM], 400, b"shutting down"),
        ("10", [signal.SIGHUP] * 2 + [signal.SIGTERM], 60, b"data: [DONE]"),
        pytest.param("10", [CLOSED_TERMINAL], 30, b"data: [DONE]", marks=pytest.mark.slow),
        ("10", [CLOSED_TERMINAL, signal.SIGHUP, signal.SIGHUP], 60, b"data: [DONE]"),
        ("600", [CLOSED_TERMINAL, signal.SIGTERM], 400, b"shutting down"),
        ("10", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM], 60, b"data: [DONE]"),
    ],
)
def test_signals(
    servers: TerminalServers, drain_s: str, signals: list[int], num_tokens: int, last: bytes
) -> None:
    """Running requests may finish or get an error; the exit code is 0. HUP ends a server only where
    its terminal is gone."""
    terminal, inside = pty.openpty()
    try:
        with servers.running(drain_s, inside) as (pid, out, errors):
            port = int(re.findall(r":(\d+) ", out.readline())[0])
            received = bytearray()
            with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
                body = completion_body(max_tokens=num_tokens, stream=True, ignore_eos=True)
                data = str(body).replace("'", '"').replace("True", "true").encode()
                sock.sendall(
                    f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n"
                    "content-type: application/json\r\n"
                    f"content-length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                received += sock.recv(100)
                for number in signals:
                    if number == CLOSED_TERMINAL:
                        os.close(terminal)  # the system sends HUP
                    else:
                        os.kill(pid, number)
                    time.sleep(0.15)
                while piece := sock.recv(65536):
                    received += piece
            assert servers.wait() == 0
            assert last in received
            said = errors.read()
            assert "Traceback" not in said
            assert ("(most recent call first)" in said) is (signal.SIGUSR1 in signals)
    finally:
        if CLOSED_TERMINAL not in signals:
            os.close(terminal)


def test_stacks_are_written_while_other_threads_work(tmp_path: Path) -> None:
    """Each signal comes while other threads change their stacks, and ends nothing."""
    body = completion_body(max_tokens=400, stream=True, ignore_eos=True)
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "0.2"], env=ENV, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        try:
            assert process.stdout is not None
            port = int(re.findall(rb":(\d+) ", process.stdout.readline())[0])

            signals = [signal.SIGUSR1] * 300

            def ask() -> None:
                while signals:
                    recorder = asyncio.run(record(port, body))
                    assert recorder.heard().is_done

            with ThreadPoolExecutor(3) as pool:
                clients = [pool.submit(ask) for _ in range(3)]
                while signals and process.poll() is None:
                    process.send_signal(signals.pop())
                    time.sleep(0.002)
                signals.clear()
                for client in clients:
                    client.result()
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert (tmp_path / "log").read_bytes().count(b"(most recent call first)") > 1


def test_no_connection_after_the_end() -> None:
    with (
        live(make_hash_llm()) as url,
        urllib.request.urlopen(f"{url}/health", timeout=5) as response,
    ):
        assert response.status == 200
        assert "server" not in response.headers
    host, port = url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    assert not any(thread.name == "infer-engine" for thread in threading.enumerate())
