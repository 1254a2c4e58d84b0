"""Tests of hostile checkpoints: each is refused with a `LoadError`, in little time and memory.

Each case is loaded completely, as by `LLM`, in a process of its own, which measures its time and
memory. All cases share a test, because the process from which they are forked takes seconds.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from infer.cli.main import main
from infer.errors import LoadError
from infer.files import read_text
from tests.support.hostile_checkpoints import (
    check,
    every,
)


@pytest.mark.timeout(300)
def test_bad_files_are_refused(tmp_path: Path) -> None:
    """Some cases of each kind; the scorecard's row A10 has all of them."""
    check(every(120), tmp_path)


def test_a_file_of_the_system_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/kmsg says that it is regular and has nothing to read until the next line comes."""
    file = tmp_path / "kmsg"
    file.touch()

    class Endless(io.RawIOBase):
        def fileno(self) -> int:
            return descriptors[0]

        def read(self, size: int = -1) -> None:
            return None

    descriptors: list[int] = []

    def opened(descriptor: int, mode: str) -> Endless:
        descriptors.append(descriptor)
        return Endless()

    monkeypatch.setattr(os, "fdopen", opened)
    with pytest.raises(LoadError, match="is not a file with an end"):
        read_text(file, 100)
    os.close(descriptors[0])


@pytest.mark.parametrize("file", ["/dev/zero", "/proc/self/mem", "/dev/tty", "/"])
def test_a_chat_template_that_is_no_file_is_one_sentence(
    file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if not os.access(file, os.R_OK):
        pytest.skip(f"{file} cannot be read here")
    with pytest.raises(SystemExit) as ended:
        main(["generate", "Once", "--chat-template", file, "--max-tokens", "1"])
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert len(err.splitlines()) < 4, err
    assert "Traceback" not in err
