"""One tenant floods the server, another sends single requests: `python benchmarks/tenants.py`.

It starts `infer serve` with two keys. First tenant B alone sends short requests, one after the
other. Then tenant A keeps 24 long prompts open, and B does the same again. It prints B's time to
first token in both cases, the longest step of A's prompts, and whether the P95 with the flood is at
most twice the quiet P95 plus that step. With `--shared` both use one key, which a server cannot
tell apart. Nothing else may run at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from infer.server.tenancy.keys import KeyLimits, Keys

NUM_FLOOD = 24
NUM_ASKED = 40
TEXT = "once upon a time there was a little fox who went to the river and saw a big bird"
WORDS = TEXT.split()


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    """The open response."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    )


def prompt(num_words: int) -> str:
    """A prompt that begins unlike all others, so that no prefix is cached."""
    return " ".join(random.choices(WORDS, k=num_words))


def first_token_ms(url: str, key: str) -> float:
    """The milliseconds to the first token of a short request, whose answer is read to the end."""
    body = {"prompt": prompt(12), "max_tokens": 8, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    with post(url, key, body) as reply:
        reply.readline()
        first = time.perf_counter() - started
        reply.read()
    return 1000 * first


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def main() -> None:
    """Start the server, measure, print, end it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--budget", type=int, default=128, help="max_num_batched_tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Keys(Path(folder) / "keys.json", must_exist=False)
        a, b = (keys.create(name, KeyLimits(admin=name == "b")) for name in "ab")
        if options.shared:
            a = b
        command = [sys.executable, "-m", "infer.server", "--port", "0"]
        command += ["--api-keys", str(Path(folder) / "keys.json"), "--max-batch-size", "8"]
        command += ["--max-num-batched-tokens", str(options.budget)]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ, encoding="utf-8"
        )
        try:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if "http" in word)
            measure(url, a, b)
        finally:
            server.terminate()
            server.wait()


def slow_steps(url: str, key: str) -> list[dict[str, Any]]:
    """The slow steps that computed a part of a long prompt."""

    def get(path: str) -> Any:
        request = urllib.request.Request(url + path, headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    steps = []
    for entry in get("/v1/requests")["data"][:60]:
        with contextlib.suppress(urllib.error.HTTPError):  # forgotten meanwhile
            gaps = get(f"/v1/requests/{entry['id']}")["slowest_gaps"]
            steps += [g["slowest_step"] for g in gaps if g["slowest_step"]["prompt_tokens"] > 64]
    return steps


def measure(url: str, a: str, b: str) -> None:
    """Measure without the flood, then with it."""
    for _ in range(5):
        first_token_ms(url, b)
    quiet = [first_token_ms(url, b) for _ in range(NUM_ASKED)]
    ended = threading.Event()
    num_done = [0]

    def flood() -> None:
        while not ended.is_set():
            body = {"prompt": prompt(250), "max_tokens": 32, "ignore_eos": True}
            with post(url, a, body) as reply:
                reply.read()
            num_done[0] += 1

    threads = [threading.Thread(target=flood) for _ in range(NUM_FLOOD)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    busy = []
    for _ in range(NUM_ASKED):
        busy.append(first_token_ms(url, b))
        time.sleep(random.uniform(0.02, 0.1))
    steps = slow_steps(url, b)
    ended.set()
    chunk = statistics.median(step["step_ms"] for step in steps)
    bound = 2 * p95(quiet) + chunk
    for thread in threads:
        thread.join()
    print(f"quiet     P50 {statistics.median(quiet):7.1f} ms   P95 {p95(quiet):7.1f} ms")
    print(f"flooded   P50 {statistics.median(busy):7.1f} ms   P95 {p95(busy):7.1f} ms")
    print(f"a chunk (median of slow steps) {chunk:.1f} ms; the flood had {num_done[0]} answers")
    words = "kept" if p95(busy) <= bound else "BROKEN"
    print(f"bound 2 x quiet P95 + chunk = {bound:.1f} ms: {words}")


if __name__ == "__main__":
    main()
