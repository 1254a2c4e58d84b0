"""The ledger of what engines were promised: sums, locks that die with their owner, bad folders."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infer.engine.build.memory_ledger import (
    MemoryLedger,
    Promise,
    for_newcomer,
    ledger_folder,
    part_of,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no ledger on Windows")
GIB = 1 << 30


def others_of(ledger: MemoryLedger) -> list[tuple[int, int]]:
    with ledger.planning():
        return [(each.promised, each.least) for each in ledger.others()]


def entered(folder: Path, promised: int, least: int = 0) -> MemoryLedger:
    ledger = MemoryLedger(folder)
    with ledger.planning():
        ledger.enter(promised, least)
    return ledger


def test_who_comes_later_gets_what_nobody_was_promised() -> None:
    assert for_newcomer(20, []) == (20, 20)
    assert for_newcomer(20, [Promise(promised=8, least=2, held=3)]) == (15, 20)
    # The first one was promised nearly all: the second one may have half, and more if it must.
    assert for_newcomer(20, [Promise(promised=19, least=2, held=0)]) == (9, 18)
    assert for_newcomer(0, [Promise(promised=19, least=2, held=19)]) == (0, 0)
    assert for_newcomer(1, [Promise(promised=19, least=5, held=1)]) == (0, 0)


def test_parts_never_add_up_to_more_than_there_is() -> None:
    dice = random.Random(1)
    for _ in range(2000):
        everyone = []
        for _ in range(dice.randint(1, 6)):
            least = dice.randint(0, 50)
            promised = least + dice.randint(0, 200)
            everyone.append(Promise(promised, least, dice.randint(0, promised)))
        available = dice.randint(0, 300)
        capacity = available + sum(each.held for each in everyone)
        parts = [
            part_of(each, everyone[:i] + everyone[i + 1 :], available)
            for i, each in enumerate(everyone)
        ]
        assert all(e.least <= part <= e.promised for e, part in zip(everyone, parts, strict=True))
        assert sum(parts) <= max(capacity, sum(each.least for each in everyone))
        if sum(each.promised for each in everyone) <= capacity:
            assert parts == [each.promised for each in everyone]


def test_engines_see_each_other_and_not_themselves(tmp_path: Path) -> None:
    first, second = entered(tmp_path, 7, 1), entered(tmp_path, 9, 2)
    assert others_of(first) == [(9, 2)]
    assert others_of(second) == [(7, 1)]
    assert [each.held > 0 for each in first.others_now()] == [sys.platform == "linux"]
    second.leave()
    assert others_of(first) == []
    assert tmp_path.stat().st_mode & 0o777 == 0o700


ENGINE = """
import sys, time
from pathlib import Path
from infer.engine.build.memory_ledger import MemoryLedger
ledger = MemoryLedger(Path(sys.argv[1]))
with ledger.planning():
    ledger.enter(5, 4)
    print("entered", flush=True)
    if sys.argv[2] == "planning":
        time.sleep(3600)
time.sleep(3600)
"""


@pytest.mark.parametrize("when", ["planning", "serving"])
def test_a_promise_dies_with_its_engine(tmp_path: Path, when: str) -> None:
    ledger = MemoryLedger(tmp_path)
    command = [sys.executable, "-c", ENGINE, str(tmp_path), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "entered\n"
        if when == "serving":
            assert others_of(ledger) == [(5, 4)]
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    assert others_of(ledger) == []
    assert not list(tmp_path.glob("*.engine"))  # its file is removed


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"pid": 1}', "\0", '{"promised": -1, "least": -2}', "[" * 9000]
)
def test_a_damaged_entry_is_one_sentence(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = entered(tmp_path, 7)
    (file,) = tmp_path.glob("*.engine")
    file.write_text(text, encoding="utf-8")
    good = entered(tmp_path, 3, 1)
    ledger = MemoryLedger(tmp_path)
    for _ in range(3):
        assert others_of(ledger) == [(3, 1)]
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("is damaged" in line and "planned without it" in line for line in said)
    assert len(said) <= 2  # one of each ledger that has read it
    del bad, good


def foreign(folder: Path) -> Path:
    folder.write_text("a file", encoding="utf-8")
    return folder


def link(folder: Path) -> Path:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")
    return folder


def missing(folder: Path) -> Path:
    return folder / "deep" / "in" / "nothing"


def lock_is_a_folder(folder: Path) -> Path:
    (folder / "lock").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("make", [foreign, link, missing, lock_is_a_folder])
def test_a_folder_that_cannot_be_used_is_one_sentence_and_it_serves(
    tmp_path: Path, make: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(make)
    ledger = MemoryLedger(make(tmp_path / "ledger"))
    with ledger.planning():
        ledger.enter(5, 1)
        assert ledger.others() == []
    assert ledger.others_now() == []
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    ledger = entered(tmp_path, 5)
    assert others_of(ledger) == []
    assert not list(tmp_path.iterdir())
    assert "not a folder of this user" in caplog.text


def test_the_folder_is_the_users_own(tmp_path: Path) -> None:
    assert ledger_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "infer"
    assert str(os.getuid()) in str(ledger_folder({}))
    tmp_path.chmod(0o777)
    MemoryLedger(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_what_an_engine_of_another_namespace_takes_is_not_asked(tmp_path: Path) -> None:
    other = entered(tmp_path, 100, 40)
    (file,) = tmp_path.glob("*.engine")
    entry = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**entry, "space": "pid:[1]"}), encoding="utf-8")
    ledger = MemoryLedger(tmp_path)
    assert ledger.others_now() == [Promise(100, 40, 100)]
    del other
