"""The part that all workers share: the line protocol with `run.py`, and the prompts.

A worker is `python worker_NAME.py MODEL VARIANT`. It calls `serve` with a function that completes
all prompts greedily, with exactly `output_len` tokens each. Some can also say what the model thinks
of a text, for `benchmarks/quality.py`: the answer to {"score": ids} has the log-probabilities of
all ids but the first, and the best token there. This file uses the standard library only, because
it runs in every peer's environment. Whatever engines print, only lines of the protocol reach the
driver.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 2
Prompts = list[list[int]]
Complete = Callable[[Prompts, int], tuple[float, int]]
"""Prompts and the length of each answer → seconds, number of output tokens."""
Score = Callable[[list[int]], dict[str, Any]]


def arguments() -> tuple[Path, str]:
    """The checkpoint's folder and the variant (a dtype, a quantisation)."""
    return Path(sys.argv[1]), sys.argv[2]


def prompts_of(job: dict[str, Any], vocab_size: int) -> Prompts:
    """Random token ids, none of them special; each seed gives others."""
    rng = random.Random(job["seed"])
    ids = range(100, vocab_size)
    return [rng.choices(ids, k=job["input_len"]) for _ in range(job["num_requests"])]


def serve(load: Callable[[], Complete | tuple[Complete, Score]], needs_warmup: bool = True) -> None:
    """Load, report it, then answer each job with its seconds and its number of output tokens.

    `load` returns `complete`, which `timed` makes of a function that only completes, or it and a
    function that scores a text.
    """
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    config = json.loads((arguments()[0] / "config.json").read_text(encoding="utf-8"))
    started = time.perf_counter()
    loaded = load()
    complete, score = loaded if isinstance(loaded, tuple) else (loaded, None)
    ready = {"load_seconds": time.perf_counter() - started, "needs_warmup": needs_warmup}
    print(json.dumps(ready), file=protocol, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "score" in job:
            assert score is not None, "this worker cannot score"
            print(json.dumps(score(job["score"])), file=protocol, flush=True)
            continue
        prompts = prompts_of(job, config["vocab_size"])
        seconds, num_tokens = complete(prompts, job["output_len"])
        wanted = job["num_requests"] * job["output_len"]
        if num_tokens != wanted:
            raise SystemExit(f"made {num_tokens} tokens, asked for {wanted}: not comparable")
        answer = {"seconds": seconds, "output_tokens": num_tokens}
        print(json.dumps(answer), file=protocol, flush=True)


def timed(complete: Callable[[Prompts, int], list[int]]) -> Complete:
    """Measures a function that returns the number of tokens of each completion."""

    def run(prompts: Prompts, output_len: int) -> tuple[float, int]:
        started = time.perf_counter()
        counts = complete(prompts, output_len)
        seconds = time.perf_counter() - started
        return seconds, sum(counts)

    return run
