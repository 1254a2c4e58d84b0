"""Factories of engines that fail in different ways: `launch_hash_llm("tests.support.faulty:…")`."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NoReturn

from infer.engine.loop import Blueprint
from infer.errors import ConfigError, LoadError
from infer.schedule.sequence import NOT_FINITE, Plan, Sampled
from infer.types import Request
from tests.support.hash_engine import HashRunner, hash_blueprint


def talkative(settings: dict[str, Any]) -> Blueprint:
    logging.getLogger("infer.test").info("made %s", "over there")
    return hash_blueprint(settings)


def misconfigured(settings: dict[str, Any]) -> NoReturn:
    raise ConfigError("page_size", "must be odd")


def without_weights(settings: dict[str, Any]) -> Blueprint:
    def build(announce: object) -> NoReturn:
        raise LoadError("the weights are not there")

    return dataclasses.replace(hash_blueprint(settings), build=build)


def exploding(settings: dict[str, Any]) -> NoReturn:
    raise KeyError("a mistake")


def speechless(settings: dict[str, Any]) -> Blueprint:
    blueprint = hash_blueprint(settings)
    files = dataclasses.replace(blueprint.files, tokenizer_json="{}")
    return dataclasses.replace(blueprint, files=files)


class Pill(HashRunner):
    """A runner that ends its process when a request with `token` in its prompt has five tokens.

    13 = by a segmentation fault, 14 = by hanging, 15 = by a kill from outside, 16 = by native code
    that hangs, 17 = by native code that hangs and keeps the interpreter's lock.
    """

    def execute(self, plan: Plan) -> Seq[Sampled]:
        for chunk in plan:
            sequence = chunk.sequence
            if chunk.samples and sequence.num_output >= 5:
                for token in sequence.request.prompt_token_ids:
                    if token == 13:
                        os.kill(os.getpid(), signal.SIGSEGV)
                    elif token == 14:
                        time.sleep(1000)
                    elif token == 15:
                        os.kill(os.getpid(), signal.SIGKILL)
                    elif token == 16:
                        lock = ctypes.create_string_buffer(64)  # a mutex that nobody gives back
                        ctypes.CDLL(None).pthread_mutex_lock(lock)
                        ctypes.CDLL(None).pthread_mutex_lock(lock)
                    elif token == 17:
                        lock = ctypes.create_string_buffer(64)
                        ctypes.PyDLL(None).pthread_mutex_lock(lock)
                        ctypes.PyDLL(None).pthread_mutex_lock(lock)
        return super().execute(plan)


def pill(settings: dict[str, Any]) -> Blueprint:
    return hash_blueprint({**settings, "runner": Pill})


def changing(settings: dict[str, Any]) -> Blueprint:
    """An engine beside which other threads run code that is made and forgotten all the time."""
    text = "def dive(depth):\n  return depth and dive(depth - 1)\ndive(40)"

    def work() -> None:
        while True:
            exec(compile(text, "made", "exec"), {})

    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    return hash_blueprint(settings)


def starts(settings: dict[str, Any]) -> Blueprint:
    """An engine that starts while the file `while_there` exists; each start adds a line to it."""
    path = Path(settings.pop("while_there"))
    if not path.exists():
        raise LoadError("the checkpoint has gone")
    with path.open("a", encoding="utf-8") as file:
        file.write("x\n")
    return hash_blueprint(settings)


def never(core: object) -> object:
    """For `INFER_WRAP_CORE`: an engine that never finishes loading."""
    time.sleep(3600)
    return core


class Sometimes(HashRunner):
    """A request that has 13 in its prompt fails after some tokens: in the step, or in its row."""

    def execute(self, plan: Plan) -> Seq[Sampled]:
        for chunk in plan:
            if _is_poisonous(chunk.sequence.request, 13) and chunk.sequence.num_output == 2:
                raise ValueError("broken on purpose")
        results = iter(super().execute(plan))
        return [
            Sampled(0, error=NOT_FINITE) if _is_poisonous(c.sequence.request, 14) else r
            for c, r in zip([c for c in plan if c.samples], results, strict=True)
        ]


def _is_poisonous(request: Request, token: int) -> bool:
    return request.prompt_token_ids[0] == token


def sometimes(settings: dict[str, Any]) -> Blueprint:
    return hash_blueprint({**settings, "runner": Sometimes})
