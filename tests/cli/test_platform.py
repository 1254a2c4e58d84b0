"""What somebody sees who starts `infer` where it cannot run."""

from __future__ import annotations

import subprocess
import sys

import pytest

WINDOWS = """
import asyncio, importlib, signal, subprocess, sys
import rich.console, typer  # these look for other modules on Windows, which are not here

class NotThere:
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ABSENT = {"fcntl", "resource", "termios", "pwd", "grp"}
for name in ABSENT:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, NotThere())
del signal.SIGKILL
command = importlib.import_module("infer.cli.main")
sys.platform = "win32"
sys.argv = ["infer", *ARGUMENTS]
command.main()
"""


@pytest.mark.parametrize("arguments", [["serve"], ["generate", "Hello"], ["--help"]])
def test_windows_is_refused_with_the_way_out(arguments: list[str]) -> None:
    """Modules that Windows lacks are not there: the message must come before they are missed."""
    code = f"ARGUMENTS = {arguments}\n{WINDOWS}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, encoding="utf-8"
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("infer: does not run on Windows")
    assert "WSL" in line


def test_python_m_infer_is_the_command() -> None:
    command = [sys.executable, "-m", "infer", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")
    assert (done.returncode, done.stdout.split()[0]) == (0, "infer")


@pytest.mark.parametrize(
    ("closed", "is_shown"),
    [("<&-", True), (">&-", False), ("2>&-", True), ("<&- >&- 2>&-", False)],
)
def test_a_closed_stream_is_an_empty_one(closed: str, is_shown: bool) -> None:
    """A program whose descriptors were closed has None for them, which has no methods."""
    command = f'"$1" -m infer plan {closed}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == is_shown
