"""The tests of this folder on a machine without a GPU: in a process with Triton's interpreter.

The variable that asks for the interpreter counts when a kernel's module is imported, and other
tests of this process import modules that look at it: hence a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_interpreted(which: str) -> int:
    """Run the tests with these marks; how many have passed. The others are this test's failure."""
    pytest.importorskip("triton", reason="Triton is not installed: no kernel can be interpreted")
    # Not in colours, whatever the terminal of this run is.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PY_COLORS": "0", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", str(HERE), "-m", which, "-n", "0"]
    command += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=HERE.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found, done.stdout
    return int(found[1])


@pytest.mark.timeout(900)  # 20 s of one core, on a machine that may have others to do
def test_every_kernel_in_the_interpreter() -> None:
    assert run_interpreted("not slow") > 70


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_at_more_sizes_in_the_interpreter() -> None:
    assert run_interpreted("slow") > 30
