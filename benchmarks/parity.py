"""How far our logits are from those of transformers: `python benchmarks/parity.py`.

It prints the table of docs/models.md. For each family that is the largest deviation, relative to
the scale of the logits, over the small odd shapes of tests/support/model_shapes.py, in float32. The
logits are those of `LLM.logits`: the whole prompt in one step, token by token, in chunks of 7, and
beside other requests. A prefix hit leaves out the logits of what it found, so the code of the tests
measures that way. It needs the development environment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from infer import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
Logits = NDArray[np.float32]


def engine(folder: Path, step_tokens: int) -> LLM:
    """An engine of the checkpoint, with torch's attention, whose steps have so many tokens."""
    return LLM(
        str(folder),
        dtype="float32",
        max_num_batched_tokens=step_tokens,
        attention_backend="sdpa",
        page_size=4,
        kv_cache_pages=300,
        num_threads=1,
    )


def beside_others(folder: Path, tokens: list[int]) -> Logits:
    """The logits of a prompt in chunks, while two other requests generate."""
    with engine(folder, 20) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
        others = [llm.stream(tokens[:length], params) for length in (5, 33)]
        for stream in others:
            next(stream)
        return llm.logits(tokens)


def in_steps_of(step_tokens: int) -> Callable[[Path, list[int]], Logits]:
    """A function that computes a prompt's logits in steps of so many tokens."""

    def compute(folder: Path, tokens: list[int]) -> Logits:
        with engine(folder, step_tokens) as llm:
            return llm.logits(tokens)

    return compute


WAYS = {
    "prefill": in_steps_of(512),
    "decode": in_steps_of(1),
    "chunked": in_steps_of(7),
    "mixed batch": beside_others,
}


def main() -> None:
    """Measure and print one family after the other."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.support.checkpoints import write_checkpoint
    from tests.support.model_shapes import SHAPES
    from tests.support.parity import Bench, deviation, prefix_hit, reference, tokens_of

    def worst_of(theirs: Any, folder: Path) -> list[float]:
        tokens = tokens_of(150)
        wanted = reference(theirs, tokens)
        found = [deviation(torch.from_numpy(way(folder, tokens)), wanted) for way in WAYS.values()]
        return [*found, prefix_hit(Bench(folder), theirs)]

    torch.set_num_threads(1)
    names = (*WAYS, "prefix hit")
    print("| family | shapes | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    for family, shapes in SHAPES.items():
        found = []
        for shape in shapes.values():
            with tempfile.TemporaryDirectory() as name:
                theirs = write_checkpoint(Path(name), family, **shape)
                found.append(worst_of(theirs, Path(name)))
        cells = " | ".join(f"{max(values):.1e}" for values in zip(*found, strict=True))
        print(f"| {family} | {len(shapes)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
