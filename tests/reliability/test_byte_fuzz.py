"""Scorecard 17: mutated bytes into seven functions that read what strangers send.

Each function has an oracle, may raise only the error that it documents, and is timed. A failure
names the target, the number of the run and the input; `INFER_FUZZ_EXECS` sets the number of runs.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from infer.errors import LoadError, RequestError
from infer.models.hub import SHIPPED_FOLDER
from infer.models.weights import open_checkpoint
from infer.server.http.json_body import parse_json
from infer.server.openai.events import dump, event
from infer.text.stop import StopMatcher
from infer.text.tokenizer import Tokenizer
from tests.support.cases import timed
from tests.support.server_process import Findings

NUM_EXECS = int(os.environ.get("INFER_FUZZ_EXECS", "20000"))
MAX_RUN_S, MAX_MB = 1.0, 256
CORPUS = [
    b'{"model":"m","prompt":["a",1,2.5e3,null,true],"stop":"\\u00e9\\ud83d\\ude00"}',
    b'{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":null}]}',
    b'{"messages":[{"role":"user","content":"Tell me of a fox."}]}',
    b'[{"role":"system","content":[{"type":"text","text":"x"}]},{"role":"tool","content":"y"}]',
    "Once upon a time, naïve 日本語 👩‍👩‍👧 e\u0301 \u2028 <|end|> <s>".encode(),
    b"the end. the endless end.\nUser: stop\n\n###",
    save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}),
]
WORDS = [b'"', b"\\", b"\\u", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"1e999", b"-0",
         b"NaN", b"9" * 400, b"\xff", b"\xed\xa0\x80", b"\xf0\x9f", b"\0", b"\xe2\x80\xa8",
         b"<|end|>", b"null", b'"role"', b'"content"', b"\n\n", b"\xef\xbb\xbf", b"a" * 5000,
         b"[" * 200, (2**63).to_bytes(8, "little")]  # fmt: skip


def mutated(dice: random.Random) -> bytes:
    """One of the corpus after some changes: bits, cuts, words, parts of another."""
    data = bytearray(dice.choice(CORPUS))
    for _ in range(dice.choice([0, 1, 1, 2, 4, 16])):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << dice.randrange(8)
            case 1:
                del data[at : at + dice.randrange(1, 9)]
            case 2:
                data[at:at] = dice.choice(WORDS)
            case 3:
                other = dice.choice(CORPUS)
                start = dice.randrange(len(other))
                data[at:at] = other[start : start + dice.randrange(1, 40)]
            case _:
                data[at:at] = dice.randbytes(dice.randrange(1, 5))
    return bytes(data)


def text_of(data: bytes, dice: random.Random) -> str:
    return data.decode(errors=dice.choice(["replace", "surrogateescape"]))


def cut(text: str, dice: random.Random) -> list[str]:
    """The text in pieces of up to nine characters."""
    pieces, at = [], 0
    while at < len(text):
        size = dice.randrange(1, 10)
        pieces.append(text[at : at + size])
        at += size
    return pieces


class Targets:
    """The seven functions, each with its oracle; they return whether the input was taken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer.from_folder(SHIPPED_FOLDER)

    def json_body(self, data: bytes, dice: random.Random) -> bool:
        value = parse_json(data)
        assert repr(value) == repr(json.loads(data.decode()))
        return True

    def chat(self, data: bytes, dice: random.Random) -> bool:
        value = parse_json(data)
        messages = value.get("messages") if isinstance(value, dict) else value
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            return False
        text, ids = self._tokenizer.apply_chat_template(messages)
        assert self._tokenizer.decode(ids, skip_special_tokens=False) == text
        return True

    def stop_strings(self, data: bytes, dice: random.Random) -> bool:
        text = text_of(data, dice)
        stop = [text[i : i + dice.randrange(1, 9)] for i in dice.choices(range(len(text) + 1), k=3)]
        stop = [one for one in stop if one] or ["end"]
        matcher, got, found = StopMatcher(stop), "", False
        for piece in cut(text, dice):
            new, found = matcher.push(piece)
            got += new
            if found:
                break
        got += matcher.finish()
        assert found == any(one in text for one in stop)
        assert text.startswith(got)
        assert not any(one in got for one in stop)
        assert found or got == text
        return True

    def detokeniser(self, data: bytes, dice: random.Random) -> bool:
        ids = [byte * 8 + dice.randrange(8) for byte in data[:300]]
        skip = dice.random() < 0.5
        detokenizer = self._tokenizer.new_detokenizer(skip_special_tokens=skip)
        got = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert got == self._tokenizer.decode(ids, skip_special_tokens=skip)
        return True

    def sse(self, data: bytes, dice: random.Random) -> bool:
        text = text_of(data, dice)
        written = event(dump({"text": text}), dice.choice([None, "token"]))
        assert written.endswith(b"\n\n")
        *names, line = written.removesuffix(b"\n\n").split(b"\n")
        assert line.startswith(b"data: ")
        assert len(written.splitlines()) == len(names) + 2
        assert json.loads(line.removeprefix(b"data: ")) == {"text": text}
        return True

    def tokenizer(self, data: bytes, dice: random.Random) -> bool:
        text = text_of(data, dice)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        assert not self._tokenizer.special_token_ids & set(ids), "text became a control token"
        assert self._tokenizer.decode(ids) == text
        return True

    def safetensors(self, data: bytes, dice: random.Random) -> bool:
        (self._folder / "model.safetensors").write_bytes(data)
        source = open_checkpoint(self._folder, torch.float32, torch.device("cpu"))
        source.take("a", (2, 3))
        return True


NAMES = tuple(name for name in vars(Targets) if not name.startswith("_"))


def fuzz(name: str, count: int, folder: Path, most_s: float = MAX_RUN_S) -> dict[str, Any]:
    """Run a target so many times, each for `most_s` of a thread's time at most; returns what was
    seen."""
    target: Callable[[bytes, random.Random], bool] = getattr(Targets(folder), name)
    dice, taken, refused, longest_s = random.Random(name), 0, 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(count):
        data = mutated(dice)
        started_s = time.thread_time()
        try:
            taken += target(data, dice)
        except (RequestError, LoadError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}, run {i}, {data!r}: {error!r}") from error
        longest_s = max(longest_s, time.thread_time() - started_s)
    more_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert longest_s < most_s, f"{name}: {longest_s:.1f} s"
    assert more_mb < MAX_MB, f"{name}: {more_mb} MB"
    assert taken, f"{name}: every input was refused"
    return {"taken": taken, "refused": refused, "longest [ms]": round(longest_s * 1000, 1)}


@timed(MAX_RUN_S)
@pytest.mark.parametrize("name", NAMES)
def test_mutated_bytes(name: str, tmp_path: Path, most_s: float) -> None:
    assert len(NAMES) == 7
    fuzz(name, 300, tmp_path, most_s)


@pytest.mark.slow
def test_mutated_bytes_for_longer(tmp_path: Path) -> None:
    seen = {name.replace("_", " "): fuzz(name, NUM_EXECS, tmp_path) for name in NAMES}
    Findings().note(17, "byte fuzz", f"7 targets, {NUM_EXECS:,} runs each", **seen)
