"""transformers on a GPU, as a yardstick: `python benchmarks/gpu_yardsticks.py FOLDER [JSON]`.

FOLDER has a config in transformers' format; weights are random. Two ways are measured: continuous
batching (`generate_batch`), with the workload `BATCH` of `infer bench gpu`, and one stream with
`torch.compile` and a static cache. With JSON, a file that `infer bench gpu --json` has written for
the same model on the same GPU, the rows are added to it. A way that fails is unmeasured, with its
reason on the terminal. The GPU's memory must be free.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from infer.bench.gpu import BATCH, BATCH_OUTPUT, batch_prompts
from infer.bench.gpu_rows import Row

COMPILED_TOKENS = 256
"""Number of tokens that one stream generates with `torch.compile`."""


def yardstick_rows(folder: str, device: torch.device) -> Iterator[Row]:
    """The rows for the model whose config is in a folder."""
    model = random_model(folder, device)
    prompts = batch_prompts(model.config.vocab_size)
    rate = attempt("generate_batch", lambda: batched_rate(model, prompts, BATCH_OUTPUT))
    yield Row(
        "transformers", f"transformers' batching: {BATCH}", "tok/s", rate, higher_is_better=True
    )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    token_ms = attempt(
        "torch.compile", lambda: compiled_token_ms(model, prompts[0], COMPILED_TOKENS)
    )
    yield Row("compiled", "transformers with torch.compile, one stream", "ms", token_ms)


def attempt(what: str, work: Callable[[], float]) -> float | None:
    """The result of `work`; None, and a line on the terminal, if it fails."""
    try:
        return work()
    except Exception as error:  # one way's failure must not cost the other's figure
        print(f"{what} fails: {error}", file=sys.stderr)
        return None


def random_model(folder: str, device: torch.device) -> Any:
    """transformers' model of the config in a folder, with random bfloat16 weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    settings = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    with torch.device(device):
        model = make(AutoConfig.from_pretrained(folder), **settings)
    return model.eval()


def batched_rate(model: Any, prompts: list[list[int]], num_output: int) -> float:
    """Tokens a second of transformers' continuous batching; the second of two runs."""
    took_s, count = 0.0, 0
    for _ in range(2):
        begun_s = time.perf_counter()
        results = model.generate_batch(prompts, generation_config=greedy(num_output))
        took_s = time.perf_counter() - begun_s
        count = sum(len(result.generated_tokens) for result in results.values())
    assert count == num_output * len(prompts), f"{count} tokens came"
    return count / took_s


def compiled_token_ms(model: Any, prompt: list[int], num_output: int) -> float:
    """Milliseconds a token of one stream with a static cache, for which transformers compiles."""
    tokens = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(tokens)

    def generate_s(num: int) -> float:
        settings = greedy(num, cache_implementation="static")
        begun_s = time.perf_counter()
        model.generate(tokens, attention_mask=mask, generation_config=settings)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun_s

    generate_s(num_output)  # compiles
    generate_s(1)
    whole_s = min(generate_s(num_output) for _ in range(3))
    first_s = min(generate_s(1) for _ in range(3))
    return 1000 * (whole_s - first_s) / (num_output - 1)


def greedy(num_output: int, **settings: Any) -> Any:
    """transformers' settings for so many greedy tokens; no token ends a sequence."""
    import transformers

    make: Any = transformers.GenerationConfig
    return make(
        do_sample=False,
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        eos_token_id=-1,
        pad_token_id=0,
        **settings,
    )


def main() -> None:
    """Measure, print, and add the rows to the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("json", nargs="?", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds no CUDA device here")
    document = (
        json.loads(options.json.read_text(encoding="utf-8")) if options.json else {"rows": []}
    )
    for row in yardstick_rows(options.folder, torch.device("cuda")):
        value = "unmeasured" if row.measured is None else f"{row.measured:,.3f} {row.unit}"
        print(f"{row.what}: {value}", flush=True)
        others = [each for each in document["rows"] if each["key"] != row.key]
        document["rows"] = [*others, row.as_dict()]
    if options.json:
        options.json.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
