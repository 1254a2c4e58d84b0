"""A program that uses the engine can end at any time: no thread of ours is in native code then."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from infer import LLM, SamplingParams
from infer.runner import kv_storage

# Preparing each part of a cache is made slow and continues in torch, where a thread must not be
# ended: C++ that cannot be unwound takes the interpreter's lock again.
SLOW = """
import sys, threading
import torch
from infer.runner import kv_storage

looked_at = threading.Event()  # until then the first part is not ready, however slow the machine

def slow(*arguments):
    while not looked_at.is_set():
        torch.empty(1 << 18).normal_()
    for _ in range(3):
        torch.empty(1 << 18).normal_()
    return True

kv_storage.advise = slow
"""
BLOCKING = """
from infer import LLM, SamplingParams
llm = LLM(device="cpu", dtype="float32")
for piece in llm.stream("Once upon", SamplingParams(max_tokens=9, temperature=0)):
    break
assert any(thread.name == "kv-storage" for thread in threading.enumerate())
looked_at.set()
sys.stdout.write("the last line")
"""
ASYNC = """
import asyncio
from infer import EngineConfig, SamplingParams
from infer.engine.build.assemble import build_async_llm

async def main():
    looked_at.set()
    llm = build_async_llm(EngineConfig(device="cpu", dtype="float32"))
    await llm.start()
    params = SamplingParams(max_tokens=1900, ignore_eos=True)
    async with llm.stream(llm.make_request("Once upon", params)) as pieces:
        async for piece in pieces:
            break
        sys.stdout.write("the last line")
        sys.stdout.flush()
        sys.exit(0)  # neither the stream nor the engine is closed

asyncio.run(main())
"""


FORKS = """
import os, sys
import infer.engine.build.assemble

for script in sys.argv[1:]:
    if not (pid := os.fork()):
        break
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(" exit code", ended, flush=True)
else:
    sys.exit()
exec(script)
"""
"""Runs each script to its end, and its interpreter's, in a fork that finds torch imported."""


def assert_ends(*scripts: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *scripts],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        encoding="utf-8",
    )
    wanted = "the last line exit code 0\n" * len(scripts)
    assert (done.returncode, done.stdout) == (0, wanted), done.stderr[-2000:]


def test_a_script_ends_while_the_cache_is_prepared_or_an_engine_works_in_a_thread() -> None:
    assert_ends(SLOW + BLOCKING, SLOW + ASYNC)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_scripts_end() -> None:
    for _ in range(100):
        assert_ends(SLOW + BLOCKING)


def test_who_closes_has_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> bool:
        time.sleep(0.02)
        return True

    def preparing() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "kv-storage"]

    for thread in preparing():  # threads of other tests
        thread.join()
    monkeypatch.setattr(kv_storage, "advise", slow)
    with LLM(device="cpu") as llm:
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert preparing()
    until_s = time.monotonic() + 10
    while preparing() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not preparing()
