"""Loads hostile checkpoints, each in a process with limits of time and memory.

`python hostile_files.py` imports the engine once. Then it forks for each path that it reads from
stdin, and writes the result as a line of JSON. `load_all` runs it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 5
LIMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Loaded:
    """The result of loading a checkpoint."""

    kind: str
    """Name of the exception; "loaded" = there was none, "killed" = a limit was exceeded."""
    message: str
    cpu_s: float
    num_bytes: int
    """Peak memory in bytes, above what the process had before."""


class Loader:
    """Loads one checkpoint at a time, in the same way as `load_all`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def load(self, path: Path) -> Loaded:
        """Load a checkpoint as `LLM` does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(path, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process that forks has ended with {self._process.wait()}"
        return Loaded(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def load_all(paths: Sequence[Path], timeout_s: float = 300) -> list[Loaded]:
    """Load each checkpoint as `LLM` does."""
    done = subprocess.run(
        [sys.executable, __file__],
        input="".join(f"{path}\n" for path in paths),
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=True,
        encoding="utf-8",
    )
    found = [Loaded(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(paths)
    return found


def _load(path: str) -> tuple[str, str]:
    from infer.config import EngineConfig
    from infer.engine.build.assemble import assemble

    try:
        assemble(EngineConfig(model=path, kv_cache_memory_bytes=1 << 22))
    except BaseException as error:
        bases = [kind.__name__ for kind in type(error).__mro__]
        return "LoadError" if "LoadError" in bases else bases[0], str(error)
    return "loaded", ""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _child(path: str, out: int, before: int) -> None:
    # A limit of CPU time, which does not depend on the machine's load.
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S * 2, LIMIT_S * 2))
    mapped = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    most = mapped + 3 * LIMIT_BYTES  # ends a process that takes too much memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    kind, message = _load(path)
    used = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "kind": kind,
        "message": message[:2000],
        "cpu_s": used.ru_utime + used.ru_stime,
        "num_bytes": _peak_bytes() - before,
    }
    os.write(out, json.dumps(report).encode())
    os._exit(0)


def main() -> None:
    # A forked child has none of its parent's OpenMP threads and would wait for them forever.
    os.environ["OMP_NUM_THREADS"] = "1"
    # With torch, once for all children.
    import infer.engine.build.assemble  # noqa: F401
    import infer.engine.client.input  # noqa: F401
    import infer.models.decoder  # noqa: F401
    import infer.text.tokenizer  # noqa: F401

    before = _peak_bytes()
    for line in sys.stdin:
        path = line.rstrip("\n")
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            _child(path, writing, before)
        os.close(writing)
        ends_s = time.monotonic() + 60  # a process that waits for a pipe uses no CPU time
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > ends_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        with os.fdopen(reading, encoding="utf-8") as file:
            text = file.read()
        killed = {"kind": "killed", "message": "", "cpu_s": 99.0, "num_bytes": 0}
        print(text or json.dumps(killed), flush=True)


if __name__ == "__main__":
    main()
