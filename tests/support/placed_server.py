"""A program: serves a checkpoint, asks it once, and prints where threads and memory are, as JSON.

`python tests/support/placed_server.py PATIENCE_S OPTIONS...` with options of `infer serve`. For
each engine: the lists of processors that its threads may use, and for each large part of its memory
the policy that was asked for and how many pages are on which NUMA node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8000"
ASKED = {
    "prompt": "Once upon a time there was one little fox and an owl",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
}
LARGE_PAGES = 512
"""Number of pages of 4 KiB from which a part of memory counts."""


def ask(path: str, body: dict[str, Any] | None = None, url: str = URL) -> Any:
    """The answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
        return json.load(answer)


def engines() -> list[Path]:
    """The folders of the engines' processes."""
    names = Path("/proc").glob("[0-9]*/comm")
    return sorted(
        each.parent for each in names if each.read_text(encoding="utf-8").strip() == "infer-engine"
    )


def pages(process: Path) -> list[tuple[str, dict[str, int]]]:
    """Policy ("default", "prefer:1") and the number of pages of 4 KiB on each node, of each large
    part of memory that is no file."""
    found = []
    for line in (process / "numa_maps").read_text(encoding="utf-8").splitlines():
        policy = line.split()[1]
        counts = {node: int(count) for node, count in re.findall(r"N(\d+)=(\d+)", line)}
        if "anon=" in line and "file=" not in line and sum(counts.values()) >= LARGE_PAGES:
            found.append((policy, counts))
    return found


def allowed(process: Path) -> Counter[str]:
    """Lists of processors that threads may use, and how many threads have each."""
    texts = [path.read_text(encoding="utf-8") for path in process.glob("task/*/status")]
    return Counter(re.findall(r"Cpus_allowed_list:\s*(\S+)", "\n".join(texts)))


def main() -> None:
    """Serve, ask, print, end."""
    timeout_s, options = float(sys.argv[1]), sys.argv[2:]
    server = subprocess.Popen([sys.executable, "-m", "infer", "serve", "--port", "8000", *options])
    last_s = time.monotonic() + timeout_s
    while True:
        assert server.poll() is None, server.returncode
        assert time.monotonic() < last_s, "the server does not become ready"
        try:
            ask("/health/ready")
            break
        except OSError:
            time.sleep(2)
    text = ask("/v1/completions", ASKED)["choices"][0]
    where = [{"pages": pages(each), "allowed": allowed(each)} for each in engines()]
    print("PLACED", json.dumps({"answer": text, "engines": where}), flush=True)
    server.terminate()
    server.wait(timeout_s)


if __name__ == "__main__":
    main()
