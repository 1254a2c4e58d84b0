"""Published checkpoints that are on this disk: the batching modes, and parity with transformers.

`python benchmarks/published.py PATH-OR-HUB-ID…` downloads nothing. For each checkpoint it compares
greedy texts in float32 with those of transformers, then measures what batching_modes.py measures,
in the machine's default dtype, and prints one table. A text may differ where transformers' two best
logits are equal up to rounding; the program says how far apart they are there, and ends with status
1 if that is more than `TIE`. `--json FOLDER` keeps the results. It needs the development
environment.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batching_modes import LATENCIES, WORKLOADS, differing, engine_config, record

from infer import LLM, SamplingParams

PROMPTS = (
    "Once upon a time there was a little fox who",
    "The three most important things about writing software are",
    "In the year 1905 a clerk of the patent office in Bern",
    "def fibonacci(n):\n",
)
TIE = 1e-3
"""The largest distance of two logits, relative to their scale, that rounding explains."""
SHORT: dict[str, dict[str, Any]] = {
    "single": {"input_len": 16, "output_len": 8},
    "mixed": {"num_requests": 2},
    "continuous_batching": {"num_requests": 2, "rate": 4.0},
}
"""The workloads of `--quick`."""


class Compared(NamedTuple):
    """A greedy text of ours beside that of transformers."""

    prompt: str
    ours: str
    theirs: str
    gap: float
    """Distance of transformers' two best logits where the texts part, relative to the standard
    deviation of the logits; 0 where they are equal."""

    @property
    def is_right(self) -> bool:
        return self.ours == self.theirs or self.gap <= TIE

    def __str__(self) -> str:
        if self.ours == self.theirs:
            return f"equal: {self.prompt!r} → {self.theirs!r}"
        return f"differs (gap {self.gap:.2g}): {self.prompt!r} → {self.ours!r}, not {self.theirs!r}"


def our_texts(model: str, num_tokens: int) -> list[tuple[list[int], list[int], str]]:
    """Prompt ids, output ids and text of each prompt."""
    with LLM(model, dtype="float32", device="cpu", max_seq_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return [(list(o.prompt_token_ids), list(o.token_ids), o.text) for o in outputs]


def compare(model: str, num_tokens: int = 32) -> list[Compared]:
    """Greedy texts of both, from the same texts as prompts, each with its own tokenizer."""
    ours = our_texts(model, num_tokens)  # first, so that only one model is in memory

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        model, local_files_only=True, dtype=torch.float32
    ).eval()
    found = []
    for prompt, (_, our_ids, our_text) in zip(PROMPTS, ours, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            made = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
            )
        their_ids = made[0, ids.shape[1] :].tolist()
        text = str(tokenizer.decode(their_ids, skip_special_tokens=True))
        gap = 0.0
        if text != our_text:
            pairs = enumerate(zip(our_ids, their_ids, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), None)
            gap = float("inf")
            if shared is not None:
                with torch.inference_mode():
                    logits = theirs(made[:, : ids.shape[1] + shared]).logits[0, -1].double()
                best, second = logits.topk(2).values.tolist()
                gap = (best - second) / float(logits.std())
        found.append(Compared(prompt, our_text, text, gap))
    return found


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """All runs as one table of Markdown."""
    lines = ["| model | workload | mode | output tok/s | TTFT ms | ITL ms | end to end ms |"]
    lines.append("|" + "---|" * 7)
    for document in documents:
        for run in document["runs"]:
            summary = run["summary"]
            cells = [document["model"], run["workload"], run["mode"]]
            cells.append(f"{summary['output_tok_s']:,.1f}")
            for key in LATENCIES:
                values = summary[key]
                ranks = [f"{values[rank]:,.0f}" for rank in ("p50", "p95", "p99")] if values else []
                cells.append(" / ".join(ranks) or "—")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Latencies are P50 / P95 / P99."])


def main() -> None:
    """Compare and measure each checkpoint; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="PATH-OR-HUB-ID")
    parser.add_argument("--dtype", default="auto", help="for the modes; default: the machine's")
    parser.add_argument("--tokens", type=int, default=32, help="length of the compared texts")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="keep the results there")
    parser.add_argument("--quick", action="store_true", help="a few tokens of each workload")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    wrong, documents = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.json or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model in arguments.models:
            name = model.rstrip("/").rpartition("/")[2]
            for compared in compare(model, arguments.tokens):
                print(f"{name}: {compared}", flush=True)
                if not compared.is_right:
                    wrong.append(f"{name}: the text after {compared.prompt!r}")
            config = engine_config(model, arguments.dtype)
            workloads = SHORT if arguments.quick else WORKLOADS
            file = folder / f"published-{name}.json"
            documents.append(record(name, config, file, workloads=workloads))
            wrong += [f"{name}: {each} in the three modes" for each in differing(documents[-1])]
    print(table(documents))
    if wrong:
        sys.exit("not equal: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
