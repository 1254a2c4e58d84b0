"""How far our logits are from those of transformers: `python benchmarks/parity.py`.

It prints the table of docs/models.md. For each family that is the largest deviation, relative to
the scale of the logits, over the small odd shapes of tests/support/model_shapes.py, in float32. It
runs the code of the tests and needs the development environment.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure and print one family after the other."""
    sys.path.insert(0, str(ROOT))
    from tests.support.checkpoints import write_checkpoint
    from tests.support.model_shapes import SHAPES
    from tests.support.parity import WAYS, Bench

    torch.set_num_threads(1)
    print("| family | shapes | " + " | ".join(WAYS) + " |")
    print("|---|---|" + "---|" * len(WAYS))
    for family, shapes in SHAPES.items():
        worst = dict.fromkeys(WAYS, 0.0)
        for shape in shapes.values():
            with tempfile.TemporaryDirectory() as name:
                theirs = write_checkpoint(Path(name), family, **shape)
                for way, measure in WAYS.items():
                    worst[way] = max(worst[way], measure(Bench(Path(name)), theirs))
        cells = " | ".join(f"{value:.1e}" for value in worst.values())
        print(f"| {family} | {len(shapes)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
