"""The time of sampling at real vocabularies: `python benchmarks/sampling.py [--threads 2]`.

The tables have medians in milliseconds of `sample` for R rows of V logits in float32, and the time
that reading them once takes at 30 GB/s. `peaked` logits have a few probable tokens, as those of
trained models. `flat` logits are those of random weights, where top-p 0.9 keeps more than half of
the vocabulary. Logits are bfloat16 numbers, as a bfloat16 head makes them, so many are equal.
Nothing else may run at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from infer.runner.sampler import sample
from infer.schedule.sequence import Sequence
from infer.types import Request, SamplingParams

VOCABULARIES = (128_256, 151_936)
ROWS = (1, 8, 32)
GREEDY: dict[str, Any] = {"temperature": 0.0}
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY],
    "temperature 0.7": [{"temperature": 0.7}],
    "top-k 40": [{"top_k": 40}],
    "top-p 0.9": [{"top_p": 0.9}],
    "top-p 0.9, T 0.7": [{"top_p": 0.9, "temperature": 0.7}],
    "top-k 40, top-p 0.9, min-p 0.05": [{"top_k": 40, "top_p": 0.9, "min_p": 0.05}],
    "greedy, repetition penalty": [{**GREEDY, "repetition_penalty": 1.1}],
    "greedy, frequency penalty": [{**GREEDY, "frequency_penalty": 0.5}],
    "greedy, logprobs 0": [{**GREEDY, "logprobs": 0}],
    "greedy, logprobs 5": [{**GREEDY, "logprobs": 5}],
    "mixed": [
        GREEDY, {}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.1},
        {"top_p": 0.95, "repetition_penalty": 1.1}, {**GREEDY, "logprobs": 5}, {"top_k": 40},
    ],
}  # fmt: skip


def sequences(rows: int, vocab: int, kinds: list[dict[str, Any]]) -> list[Sequence]:
    """Sequences of 200 tokens, 100 of them output; the kinds of sampling take turns."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for row in range(rows):
        seen = torch.randint(vocab, (200,), generator=generator).tolist()
        sampling = SamplingParams(**kinds[row % len(kinds)])
        sequence = Sequence.from_request(Request(f"{row}", (*seen[:100],), sampling, row, 9), 0)
        sequence.tokens += seen[100:]
        made.append(sequence)
    return made


def milliseconds(logits: torch.Tensor, members: list[Sequence], rounds: int) -> float:
    """The median duration of a call. The logits are written again before each, as by the head."""
    times, work = [], torch.empty_like(logits)
    for _ in range(rounds + 2):
        work.copy_(logits)
        started = time.perf_counter()
        sample(work, members)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1e3


def main() -> None:
    """Print a table for each vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for vocab in VOCABULARIES:
        columns = [f"{name} {rows}" for name in ("peaked", "flat") for rows in ROWS]
        print(f"\nV = {vocab:,}, {options.threads} threads, ms\n")
        print(f"| sampling | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        floors = [f"{rows * vocab * 4 / 30e6:.2f}" for rows in ROWS] * 2
        print(f"| (reading once at 30 GB/s) | {' | '.join(floors)} |")
        for kind, params in KINDS.items():
            cells = []
            for spread in (4.0, 1.0):
                for rows in ROWS:
                    generator = torch.Generator().manual_seed(rows)
                    logits = torch.randn(rows, vocab, generator=generator).mul(spread)
                    members = sequences(rows, vocab, params)
                    logits = logits.bfloat16().float()
                    with torch.inference_mode():
                        cells.append(f"{milliseconds(logits, members, options.rounds):.2f}")
            print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
