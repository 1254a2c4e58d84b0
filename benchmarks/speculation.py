"""Tokens a second with and without speculation, in alternating pairs of one engine.

`python benchmarks/speculation.py [MODEL]` prints a line of JSON for each workload and number of
streams. The requests of a pair are equal except for `speculation`. `copy` goes on with a text that
is in the prompt four times, `chat` with stories that are drawn. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from infer import LLM, SamplingParams

QUESTION = "What is 10 * 10?\n\n10 * 10 = 100\n\n"
NUM_TOKENS, NUM_PAIRS = 128, 21
CONFIG = '{"method": "ngram", "num_speculative_tokens": 8}'


def rate(llm: LLM, workload: str, num_streams: int, number: int, speculation: bool) -> float:
    """Tokens a second of one round."""
    prompts, each = [], []
    for i in range(num_streams):
        text = QUESTION * 4 if workload == "copy" else f"One day, number {number} met {i}. "
        prompts.append(text)
        each.append(
            SamplingParams(
                temperature=0 if workload == "copy" else 0.8,
                seed=1000 * number + i,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                speculation=speculation,
            )
        )
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, each, use_tqdm=False)
    took_s = time.perf_counter() - started_s
    return sum(len(output.token_ids) for output in outputs) / took_s


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="with random weights; default: the shipped model")
    name = parser.parse_args().model
    with LLM(
        model=name,
        max_seq_len=1024,
        max_batch_size=32,
        speculative_config=CONFIG,
        load_format="dummy" if name else "auto",
    ) as llm:
        for workload in ("copy", "chat"):
            for num_streams in (1, 32):
                if name and num_streams > 1 and workload == "copy":
                    continue
                pairs = NUM_PAIRS if not name else 3
                rates: dict[bool, list[float]] = {True: [], False: []}
                before = llm.stats()
                for number in range(-1, pairs):
                    for speculation in (False, True) if number % 2 else (True, False):
                        found = rate(llm, workload, num_streams, max(0, number), speculation)
                        if number >= 0:
                            rates[speculation].append(found)
                ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
                stats = llm.stats()
                drafted, accepted = (
                    stats[key] - before[key] for key in ("num_draft_tokens", "num_accepted_tokens")
                )
                print(
                    json.dumps(
                        {
                            "workload": workload,
                            "streams": num_streams,
                            "plain": round(statistics.median(rates[False]), 1),
                            "speculation": round(statistics.median(rates[True]), 1),
                            "ratio": round(statistics.median(ratios), 3),
                            "drafted": drafted,
                            "accepted": accepted,
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
