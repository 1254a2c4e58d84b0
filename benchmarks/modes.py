"""The three batching modes on the same 64 mixed requests: `python benchmarks/modes.py`.

Runs them through each mode with the model that ships, checks that the greedy tokens of every
request are the same, and prints the table of docs/architecture.md. Steps are exact; the time is
what this machine took and is not part of any test.
"""

from __future__ import annotations

import random
import time

from infer import LLM, SamplingParams

NUM_REQUESTS = 64
SEATS = 8
TEXT = "one day the little fox went to the river and saw a red boat under an old tree"
WORDS = TEXT.split()


def requests() -> tuple[list[str], list[SamplingParams]]:
    """Prompts of 2 to 200 words, outputs of 4 to 64 tokens, some of which end by themselves."""
    rng = random.Random(0)
    prompts, params = [], []
    for _ in range(NUM_REQUESTS):
        words = [rng.choice(WORDS) for _ in range(rng.choice([2, 8, 40, 200]))]
        prompts.append("Once upon a time " + " ".join(words))
        params.append(SamplingParams(temperature=0, max_tokens=rng.choice([4, 16, 32, 64])))
    return prompts, params


def main() -> None:
    """Run, compare, print."""
    prompts, params = requests()
    tokens = {}
    print("| mode | steps | tokens a step | mean sequences a step | padded / real | seconds |")
    print("|---|---|---|---|---|---|")
    for mode in ("sequential", "static", "continuous"):
        with LLM(dtype="float32", batching_mode=mode, max_batch_size=SEATS) as llm:
            llm.generate("warm up", SamplingParams(max_tokens=4))
            before = llm.stats()
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            after = llm.stats()
        tokens[mode] = [output.token_ids for output in outputs]
        steps = after["num_steps"] - before["num_steps"]
        computed = after["num_computed_tokens"] - before["num_computed_tokens"]
        sampled = after["num_sampled_tokens"] - before["num_sampled_tokens"]
        padded = "—"
        if after["num_batch_tokens"]:
            padded = f"{after['num_padded_tokens'] / after['num_batch_tokens']:.2f}"
        print(
            f"| {mode} | {steps} | {computed / steps:.1f} | {sampled / steps:.2f} | {padded}"
            f" | {seconds:.2f} |"
        )
    same = tokens["sequential"] == tokens["static"] == tokens["continuous"]
    print(f"\ngreedy tokens of all {NUM_REQUESTS} requests equal in the three modes: {same}")
    assert same


if __name__ == "__main__":
    main()
