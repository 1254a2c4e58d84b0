"""Real servers that share a machine's memory with each other and with somebody greedy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from infer.main_memory import available_bytes, proc_bytes
from tests.support.server_process import Served, follow, model_server, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
BROWSER = """
import sys, time
held = bytearray(int(sys.argv[1]))
for first in range(0, len(held), 4096):
    held[first] = 1
print("held", flush=True)
time.sleep(2)
"""


def anonymous(server: Served) -> int:
    """Bytes that the engine holds and that no file backs."""
    held = proc_bytes(f"/proc/{server.engine_pid()}/status", "RssAnon:")
    assert held is not None
    return held


def body(number: int, num_words: int, max_tokens: int) -> dict[str, object]:
    words = " ".join(f"{number * 7919 + i}" for i in range(num_words))
    return {"prompt": words, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True}  # fmt: skip


def test_one_user_at_a_time_does_not_fill_the_cache(tmp_path: Path) -> None:
    with served(model_server("--max-seq-len", "2048"), tmp_path / "log") as server:

        async def use(numbers: range) -> None:
            for number in numbers:
                assert (await follow(server.port, body(number, 60, 4))).status == 200

        server.settle()
        asyncio.run(use(range(20)))
        before = anonymous(server)
        asyncio.run(use(range(20, 400)))
        assert anonymous(server) - before < 48 << 20


def test_two_servers_and_a_browser_share_a_machine_and_no_request_is_lost(tmp_path: Path) -> None:
    with (
        served(model_server(), tmp_path / "log-1") as first,
        served(model_server(), tmp_path / "log-2") as second,
    ):
        engines = [server.engine_pid() for server in (first, second)]

        async def use() -> None:
            streams = [
                asyncio.create_task(follow(server.port, body(number, 8, 300)))
                for number in range(16)
                for server in (first, second)
            ]
            command = [sys.executable, "-c", BROWSER, str(available_bytes() * 6 // 10)]
            browser = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert browser.stdout is not None
            assert await browser.stdout.readline() == b"held\n"
            for heard in await asyncio.gather(*streams):
                assert heard.status == 200
                assert heard.is_done
                assert heard.finish_reason == "length"
            assert await browser.wait() == 0

        asyncio.run(use())
        assert engines == [server.engine_pid() for server in (first, second)]
