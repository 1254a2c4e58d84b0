"""A decode of 32 sequences × 1 token through `infer.cells` beside the engine's step.

`python benchmarks/cells.py [MODEL]` prints medians in milliseconds as JSON. Rounds of both
alternate, in one process and with one model in memory for each. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from infer import LLM, SamplingParams
from infer.cells import Batch, CellModel, Context, RowSampling, load_model, sample

NUM_SEQS, NUM_PROMPT, NUM_STEPS, NUM_ROUNDS = 32, 128, 24, 5
PROMPTS = [[(7 * i + 13 * j) % 2000 for j in range(NUM_PROMPT)] for i in range(NUM_SEQS)]


def engine_steps(llm: LLM) -> list[float]:
    """The seconds of each decoding step of the engine's core."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 2, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        llm.core.add(llm.make_request(prompt, sampling, request_id=str(i)))
    while any(sequence.num_remaining > 1 for sequence in llm.core.scheduler.unfinished):
        llm.core.step(flush=True)
    times = []
    while llm.core.has_work:
        started_s = time.perf_counter()
        llm.core.step(flush=True)
        times.append(time.perf_counter() - started_s)
    return times[:NUM_STEPS]


def cell_decodes(model: CellModel) -> tuple[list[float], list[float]]:
    """The seconds of each decode, and of each decode with greedy sampling."""
    context = Context(model, NUM_SEQS * 256, NUM_SEQS, raise_on_error=True)
    for seq, prompt in enumerate(PROMPTS):
        context.decode(Batch.of(prompt, seq))
    rows = [RowSampling(tokens=prompt) for prompt in PROMPTS]
    tokens, decodes, all_times, batch = [5] * NUM_SEQS, [], [], Batch(NUM_SEQS)
    for _ in range(NUM_STEPS):
        started_s = time.perf_counter()
        batch.clear()
        for seq, token in enumerate(tokens):
            batch.add(token, seq_ids=seq, logits=True)
        context.decode(batch)
        decodes.append(time.perf_counter() - started_s)
        tokens = [result.token_id for result in sample(context.logits(), rows)]
        all_times.append(time.perf_counter() - started_s)
    return decodes, all_times


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="with random weights; default: the shipped model")
    name = parser.parse_args().model
    load_format = "dummy" if name else "auto"
    steps: list[float] = []
    decodes: list[float] = []
    sampled: list[float] = []
    cells = load_model(name, max_seq_len=512, load_format=load_format)
    with LLM(
        model=name, max_batch_size=NUM_SEQS, max_seq_len=512, load_format=load_format,
        kv_cache_pages=NUM_SEQS * 32,
    ) as llm:  # fmt: skip
        engine_steps(llm)
        cell_decodes(cells)
        for _ in range(NUM_ROUNDS):
            steps += engine_steps(llm)
            found = cell_decodes(cells)
            decodes += found[0]
            sampled += found[1]
    step, decode, both = (1000 * statistics.median(each) for each in (steps, decodes, sampled))
    print(
        json.dumps(
            {
                "engine_step_ms": round(step, 3),
                "decode_ms": round(decode, 3),
                "decode_and_sample_ms": round(both, 3),
                "decode / step": round(decode / step, 3),
                "decode and sample / step": round(both / step, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
