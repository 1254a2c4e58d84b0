"""`infer plan` and `infer models`: what fits into memory, and which models can be loaded."""

from __future__ import annotations

import json
from collections import defaultdict

from rich import box
from rich.console import Console
from rich.table import Table

from infer.cli.plain import plain
from infer.config import EngineConfig
from infer.models.hub import cached_checkpoints
from infer.models.registry import ARCHITECTURES


def run_plan(config: EngineConfig, as_json: bool, free_gib: float | None) -> bool:
    """Print the plan for a model, with `free_gib` GiB of free memory; returns whether it fits."""
    from infer.engine.build.assemble import plan_for  # this imports torch

    plan = plan_for(config, free=None if free_gib is None else int(free_gib * 2**30))
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2))
        return plan.fits
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for what, how_much in plan.rows():
        style = None if what != "verdict" else "green" if plan.fits else "red"
        table.add_row(what, plain(how_much), style=style)
    Console().print(table)
    return plan.fits


def run_models() -> None:
    """Print the model families, and the checkpoints in the local hub cache."""
    console = Console()
    rows = defaultdict(list)
    for name, row in ARCHITECTURES.items():
        rows[row].append(name)
    families = Table("family", "architectures", "supported", title="Families", box=box.SIMPLE)
    for row, names in rows.items():
        families.add_row(row.family, "\n".join(names), row.notes)
    console.print(families)
    cached = cached_checkpoints()
    if not cached:
        console.print("No checkpoints in the local hub cache; a folder is loaded by its path.")
        return
    local = Table("model", "architecture", "size", title="Local hub cache", box=box.SIMPLE)
    for checkpoint in cached:
        known = "" if checkpoint.architecture in ARCHITECTURES else " (not supported)"
        local.add_row(
            plain(checkpoint.name),
            plain(checkpoint.architecture + known),
            f"{checkpoint.num_bytes / 1e9:.2f} GB",
        )
    console.print(local)
