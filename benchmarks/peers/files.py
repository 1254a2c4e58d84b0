"""GGUF files as they are, ours beside llama.cpp: `python files.py FILE.gguf[:DTYPE] … --rounds 3`.

`sh setup.sh llamacpp` builds the other engine. Each round asks both for 1, 8 and 32 requests of 128
tokens in and 64 out, and for a prompt of 1,024 tokens, one engine after the other; the process of
llama.cpp ends after each load, and ours sleeps while it has nothing to do. DTYPE: ours in another
format than the file's, from the same file. Ratios are medians of those of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from infer import LLM, SamplingParams

THREADS = 2
LOADS = {"1": (1, 128, 64), "8": (8, 128, 64), "32": (32, 128, 64), "prompt": (1, 1024, 1)}
"""Name → requests, tokens in, tokens out."""
PEERS = Path(os.environ.get("INFER_PEERS", Path.home() / ".cache" / "infer-peers"))


def bench_program() -> Path:
    """The program of llama.cpp that is measured."""
    return PEERS / "llamacpp/build/bin/llama-batched-bench"


def theirs(
    file: str,
    num: int,
    input_len: int,
    output_len: int,
    *,
    threads: int = THREADS,
    before: Sequence[str] = (),
) -> float:
    """Tokens a second of llama-batched-bench: of the prompt, or of what is generated. `before`: the
    command that starts it."""
    room = -(-(input_len + output_len) // 256) * 256
    options = {"-m": file, "-t": threads, "-c": num * room, "-npp": input_len, "-npl": num}
    options |= {"-ntg": max(1, output_len - 1), "--output-format": "jsonl", "-fa": "off"}
    command = [*before, str(bench_program())]
    for name, value in options.items():
        command += [name, str(value)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    lines = (done.stdout + done.stderr).splitlines()
    record = json.loads(next(line for line in lines if line.startswith('{"n_kv_max"')))
    if output_len == 1:  # the tool wants a step: not counted
        return num * input_len / float(record["t_pp"])
    return num * (int(record["tg"]) + 1) / float(record["t"])


def ours(llm: LLM, num: int, input_len: int, output_len: int, *, vocab_size: int = 20_000) -> float:
    """The same of our engine, with prompts that are new each time."""
    prompts = [[random.randrange(100, vocab_size) for _ in range(input_len)] for _ in range(num)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    begin_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - begin_s
    return num * (input_len if output_len == 1 else output_len) / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engines = []
    for text in options.files:
        file, _, dtype = text.partition(":")
        settings = {"max_seq_len": 2048, "max_batch_size": 32, "num_threads": THREADS}
        settings |= {"device": "cpu", "kv_cache_memory_bytes": 1 << 30}
        llm = LLM(file, dtype=dtype or "auto", **settings)
        for load in LOADS.values():
            ours(llm, *load[:2], min(8, load[2]))
        engines.append((text, file, llm))
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for text, file, llm in engines:
            for name, load in LOADS.items():
                pair = (ours(llm, *load), theirs(file, *load))
                rates.setdefault((text, name), []).append(pair)
    for (text, name), pairs in rates.items():
        own, other = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = sorted(a / b for a, b in pairs)
        spread = f"{ratios[0]:.2f}–{ratios[-1]:.2f}"
        middle = statistics.median(ratios)
        print(f"{Path(text).name:40} {name:7} {own:7.0f} {other:7.0f}  {middle:.2f} ({spread})")


if __name__ == "__main__":
    main()
