"""How long a start takes: `python benchmarks/start.py [--rounds 3] [--against SRC] [OPTIONS]`.

It alternates, each in a new process: `import torch` alone, and `infer serve` from its start to the
first 200 of `/health/ready`, then from `kill -9` of its engine to the next one. With `--against`,
the folder `src` of another version takes part. OPTIONS are those of `infer serve`. It prints the
medians and their ratio to `import torch`, with the machine's load before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

LIMIT_S = 300.0
"""Seconds after which a server that is not ready is given up."""


def import_torch() -> float:
    """The seconds that a process takes which imports torch and nothing else."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started_s


def status_of(url: str) -> int:
    """The status of a GET; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for(url: str, wanted: int, started_s: float) -> float:
    """The seconds since `started_s` when the status of a GET is the wanted one."""
    while (now_s := time.perf_counter() - started_s) < LIMIT_S:
        if status_of(url) == wanted:
            return time.perf_counter() - started_s
        time.sleep(0.005)
    raise TimeoutError(f"{url} was not {wanted} in {now_s:.0f} s")


def engine_of(pid: int) -> int:
    """The process id of a server's engine."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            name = Path(f"/proc/{child}/comm").read_text(encoding="utf-8").strip()
            if name == "infer-engine":
                return int(child)
    raise ProcessLookupError(f"{pid} has no engine")


def serve(source: Path, options: list[str]) -> tuple[float, float, float]:
    """The seconds until a server answers, until it is ready, and of a restart of its engine."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "infer", "serve", "--port", str(port), *options]
    started_s = time.perf_counter()
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        try:
            while status_of(f"{url}/health/live") == 0:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.005)
            answers_s = time.perf_counter() - started_s
            ready_s = wait_for(f"{url}/health/ready", 200, started_s)
            time.sleep(4.0)  # the standby imports
            os.kill(engine_of(process.pid), signal.SIGKILL)
            killed_s = time.perf_counter()
            with contextlib.suppress(TimeoutError):
                while status_of(f"{url}/health/ready") == 200:
                    assert time.perf_counter() - killed_s < LIMIT_S
            return answers_s, ready_s, wait_for(f"{url}/health/ready", 200, killed_s)
        finally:
            process.terminate()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="the folder src of another version")
    arguments, options = parser.parse_known_args()
    sources = {"this": Path(__file__).parents[1] / "src"}
    if arguments.against:
        sources["other"] = arguments.against.resolve()
    load = re.match(r"\S+", Path("/proc/loadavg").read_text(encoding="utf-8"))
    imports: list[float] = []
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sources}
    for _ in range(arguments.rounds):
        imports.append(import_torch())
        for name, source in sources.items():
            found[name].append(serve(source, options))
    alone = statistics.median(imports)
    print(f"load {load and load[0]} before, {os.getloadavg()[0]:.2f} after")
    print(f"import torch alone: {alone:.2f} s")
    for name, rows in found.items():
        answers, ready, again = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{name}: answers after {answers:.2f} s, ready after {ready:.2f} s"
            f" ({ready / alone:.2f} of import torch), ready again {again:.2f} s after a kill -9"
        )


if __name__ == "__main__":
    main()
