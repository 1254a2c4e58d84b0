"""Scorecard 8 and 28: requests ended by a client, a deadline or an operator."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.server.app import create_app
from infer.server.settings import ServerSettings
from tests.support.doubles import make_hash_llm
from tests.support.server_process import (
    ENV,
    Findings,
    Heard,
    Served,
    bodies,
    follow,
    hash_server,
    model_server,
    send,
    served,
)
from tests.support.serving import COMPLETIONS, App, Reply, completion_body, is_idle, serving
from tests.support.waits import until

LONG = {"max_tokens": 60, "ignore_eos": True}

# ---- 8: the cancel matrix


MOMENTS = ("in the queue", "in the prompt", "first token", "decoding", "last token", "preempted")
WAYS = ("leaves", "DELETE", "deadline")


def reached(engine: AsyncLLM, moment: str, writes: list[bytes]) -> bool:
    stats = engine.stats()
    if moment == "in the queue":
        return stats["num_waiting"] >= 1
    if moment == "in the prompt":
        return stats["num_running"] >= 1 and not writes
    if moment == "preempted":
        return stats["num_preempted"] >= 1
    return len(writes) >= {"first token": 1, "decoding": 20, "last token": 59}[moment]


def said(reply: Reply) -> tuple[str, str]:
    """The text, joined from its pieces, and the finish reason."""
    choices = [event["choices"][0] for event in reply.events()]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


async def cancel_once(engine: AsyncLLM, app: App, moment: str, way: str, pause_s: float) -> None:
    """Another request runs all the time and must not be affected."""
    neighbour = completion_body(stream=True, prompt="neighbour", **LONG)
    expected = said(await app.post(COMPLETIONS, neighbour))
    near = asyncio.create_task(app.post(COMPLETIONS, neighbour))
    others = 3 if moment == "in the queue" else 1 if moment == "preempted" else 0
    extra = [
        asyncio.create_task(app.post(COMPLETIONS, completion_body(prompt=f"{i}", **LONG)))
        for i in range(others)
    ]
    await asyncio.sleep(0.002)
    gone, writes = asyncio.Event(), []
    prompt = "victim " * (20 if moment == "in the prompt" else 1)
    body = completion_body(stream=True, prompt=prompt, **LONG)
    before = engine.stats()
    task = asyncio.create_task(
        app.post(
            COMPLETIONS,
            body,
            headers={"x-request-id": "victim"},
            leave=gone,
            on_write=lambda data: writes.append(data),
        )
    )
    if way != "deadline":
        async with asyncio.timeout(60):
            while not task.done() and not reached(engine, moment, writes):
                await asyncio.sleep(0.0003)
        await asyncio.sleep(pause_s)
    if way == "leaves":
        gone.set()
        gone.set()
    elif way == "DELETE":
        listed = (await app.get("/v1/requests")).json()["data"]
        for each in listed:
            if each["client_request_id"] == "victim" and each["state"] != "finished":
                path = f"/v1/requests/{each['id']}"
                answers = [(await app.send("DELETE", path)).json() for _ in range(2)]
                assert not answers[1]["cancelled"], "twice"
    reply = await asyncio.wait_for(task, 60)
    code = {"deadline": b"deadline_exceeded", "DELETE": b"request_cancelled"}.get(way)
    assert code is None or code in reply.body or b"[DONE]" in reply.body
    assert said(await near) == expected
    await asyncio.gather(*extra)
    async with asyncio.timeout(60):
        while not is_idle(engine):
            await asyncio.sleep(0.001)
    after = engine.stats()
    ended = sum(
        after[f"num_requests_{end}"] - before[f"num_requests_{end}"]
        for end in ("finished", "cancelled", "failed")
    )
    assert ended == 2 + others
    assert after["num_requests_failed"] == 0


def cancel_everywhere(repeats: int) -> None:
    count = 0

    async def main(way: str, moment: str) -> None:
        nonlocal count
        engine = make_hash_llm(
            num_pages=40 if moment == "preempted" else 60,
            max_batch_size=3,
            max_num_batched_tokens=16,
            step_s=0.0005,
        )
        async with serving(engine) as app:
            dice, whole = random.Random(8), app.app
            for _ in range(repeats):
                if way == "deadline":
                    hurried = create_app(
                        engine, ServerSettings(request_timeout_s=dice.uniform(0.001, 0.05))
                    )
                    app.app = _by_victim(hurried, whole)
                await cancel_once(engine, app, moment, way, dice.uniform(0, 0.003))
                count += 1

    for way in WAYS:
        for moment in MOMENTS:
            asyncio.run(main(way, moment))
    load = f"{len(MOMENTS)} moments x {len(WAYS)} ways x {repeats}, a neighbour beside each"
    Findings().note(8, "cancel matrix", load, cancelled=count, neighbours_exact=count, left=0)


def _by_victim(short: Any, long: Any) -> Any:
    """An app that sends the victim's request to `short`, which has a deadline, others to `long`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        again = [message]

        async def received() -> Any:
            return again.pop() if again else await receive()

        chosen = short if b"victim" in message.get("body", b"") else long
        await chosen(scope, received, send)

    app.routes = long.routes  # type: ignore[attr-defined]
    return app


def test_cancelling_at_every_moment() -> None:
    cancel_everywhere(2)


@pytest.mark.slow
def test_cancelling_at_every_moment_a_hundred_times() -> None:
    cancel_everywhere(100)


# ---- 28: draining, and rolling restarts


async def roll(
    tmp_path: Path, arguments: list[str], rounds: int, wanted: list[dict[str, Any]]
) -> dict[str, Any]:
    """Restart two servers in turn, while clients try one server, then the other, then the first
    again. Every request must be answered with the right tokens."""
    running: list[tuple[Served, contextlib.ExitStack]] = []

    def start(name: str) -> tuple[Served, contextlib.ExitStack]:
        stack = contextlib.ExitStack()
        return stack.enter_context(served(arguments, tmp_path / name)), stack

    starts = (asyncio.to_thread(start, name) for name in ("first", "second"))
    running = list(await asyncio.gather(*starts))
    calm = [await follow(running[0][0].port, body) for body in wanted]
    done, tries, over = 0, [0, 0, 0, 0], False

    async def client(i: int) -> None:
        nonlocal done
        number = i
        while not over:
            body = number % len(wanted)
            for attempt in range(3):
                server = running[(number + attempt) % 2][0]
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    heard = await follow(server.port, wanted[body])
                    if heard.status == 200:
                        assert heard.answer == calm[body].answer, (heard.error, body)
                        tries[attempt] += 1
                        break
                    assert heard.status == 503, heard
                await asyncio.sleep(0.05)
            else:
                tries[3] += 1
            done += 1
            number += 1

    clients = [asyncio.create_task(client(i)) for i in range(16)]
    slowest = 0.0
    for i in range(rounds):
        await asyncio.sleep(0.3)
        old, stack = running[i % 2]
        before = asyncio.get_running_loop().time()
        # `served` sends SIGTERM and asserts that the exit code is 0 and no engine is left.
        await asyncio.to_thread(stack.close)
        slowest = max(slowest, asyncio.get_running_loop().time() - before)
        assert old.process.returncode == 0
        running[i % 2] = await asyncio.to_thread(start, f"again{i}")
    over = True
    await asyncio.gather(*clients)
    await asyncio.gather(*(asyncio.to_thread(stack.close) for _, stack in running))
    assert tries[3] == 0, f"{tries[3]} requests found no server in three tries"
    return {
        "restarts": rounds,
        "requests, all exact": done,
        "at the first, second, third try": tuple(tries[:3]),
        "failed": tries[3],
        "longest drain [s]": round(slowest, 2),
    }


@pytest.mark.slow
def test_one_server_after_the_other(tmp_path: Path) -> None:
    arguments = hash_server(step_s=0.002)
    counted = asyncio.run(roll(tmp_path, arguments, 2, bodies(10, 100)))
    load = "two servers restarted in turn, 16 clients with two retries, hash model"
    Findings().note(28, "rolling restart", load, **counted)


@pytest.mark.slow
def test_one_server_after_the_other_twenty_times(tmp_path: Path) -> None:
    arguments = model_server()
    counted = asyncio.run(roll(tmp_path, arguments, 20, bodies(20, 200)))
    load = "two servers restarted in turn, 16 clients with two retries, shipped model"
    Findings().note(28, "rolling restart", load, **counted)


async def drain(server: Served, streams: int) -> dict[str, Any]:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True}
    running = [asyncio.create_task(follow(server.port, body)) for _ in range(streams)]
    while (await server.stats())["num_open"] < streams:
        await asyncio.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    refused = 0
    with contextlib.suppress(OSError):
        while not all(task.done() for task in running):
            reader, writer = await send(server.port, body)
            head = await reader.read()
            writer.close()
            assert b" 503 " in head.splitlines()[0], head[:100]
            assert b"retry-after: " in head
            refused += 1
            await asyncio.sleep(0.05)
    heard = await asyncio.gather(*running)
    assert all(each.is_done for each in heard)
    assert refused > 0
    return {"finished": len(heard), "refused with 503 meanwhile": refused}


@pytest.mark.slow
def test_two_hundred_streams_at_sigterm(tmp_path: Path) -> None:
    with served(model_server(), tmp_path / "log") as server:
        counted = asyncio.run(drain(server, 200))
        assert server.process.wait(10) == 0
    Findings().note(28, "SIGTERM drain", "200 streams, 30 s to finish, shipped model", **counted)


# ---- E8: the terminal


def in_a_terminal(fd: int) -> Callable[[], None]:
    """What makes a new process the leader of a session with the terminal `fd`, as a shell is."""

    def begin() -> None:
        os.setsid()
        fcntl.ioctl(fd, termios.TIOCSCTTY, 0)

    return begin


@pytest.mark.parametrize("is_kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_terminal_that_is_closed(tmp_path: Path, is_kept: bool) -> None:
    """Its HUP goes to the server and to all that it has started: the engine, its stand-in and the
    checker of grammars. Streams are finished first. With `nohup` the server goes on."""
    terminal, inside = pty.openpty()
    port = free_port()
    command = [sys.executable, *("-m", "infer.server", "--max-seq-len", "512")]
    command += ["--port", str(port), "--sessions", "off", "--standby"]
    command += ["--kv-cache-memory-bytes", str(16 << 20)]  # a larger one takes longer to prepare
    if is_kept:
        command = ["nohup", *command]
    with (tmp_path / "out").open("wb") as output:
        process = subprocess.Popen(
            command,
            env=ENV,
            stdin=inside,
            stdout=output,
            stderr=output if is_kept else inside,
            preexec_fn=in_a_terminal(inside),
            text=True,
            encoding="utf-8",
        )
    os.close(inside)
    server = Served(process, f"http://127.0.0.1:{port}")
    try:
        until(lambda: is_up(server), 120)
        until(lambda: server.standby_pid() is not None, 120)

        async def use() -> None:
            grammar = {"type": "json_object"}
            warm = {"prompt": "Once", "max_tokens": 2, "response_format": grammar, "stream": True}
            assert (await follow(port, warm)).is_done  # there is a checker of grammars now
            body = {"prompt": "Once", "stream": True, "ignore_eos": True, "max_tokens": 400}
            heard = Heard()
            following = asyncio.create_task(follow(port, body, heard))
            while not (heard.text or following.done()):
                await asyncio.sleep(0.01)
            children = server.children()
            assert len(children) >= 3
            os.close(terminal)
            await asyncio.sleep(0.05)
            if not is_kept:
                assert server.get("/health/ready")[0] == 503
            assert (await following).is_done
            assert len(heard.text) > 300
            if is_kept:
                assert server.children() == children
                assert is_up(server)

        asyncio.run(use())
        if is_kept:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("call", "code"), [("leave_closed_streams()", 0), ("", 120)])
def test_what_could_not_be_written_is_no_failure(call: str, code: int) -> None:
    """Python itself ends with 120 where its last flush fails."""
    reader, writer = os.pipe()
    os.close(reader)
    program = "\n".join(
        (
            "import sys",
            "from infer.server.screen import leave_closed_streams",
            "try: print('x', file=sys.stderr, flush=True)",
            "except OSError: pass",
            call,
        )
    )
    env = {name: value for name, value in ENV.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", program], stderr=writer, env=env, check=False)
    os.close(writer)
    assert done.returncode == code


def is_up(server: Served) -> bool:
    with contextlib.suppress(OSError):
        return server.is_ready()
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
