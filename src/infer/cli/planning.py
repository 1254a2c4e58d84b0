"""`infer plan` and `infer models`: what fits into memory, and which models can be loaded."""

from __future__ import annotations

import json
from collections import defaultdict

from rich import box
from rich.console import Console
from rich.table import Table

from infer.cli.connect import MIN_WINDOW
from infer.cli.hub_cache import local_checkpoints
from infer.cli.plain import plain
from infer.config import EngineConfig
from infer.errors import ConfigError
from infer.models.quantized_config import METHODS
from infer.models.registry import ARCHITECTURES

MAX_FREE_GIB = 2**20
"""Maximum of `--free-gib`: one pebibyte, more than any machine has."""


AGENT_WINDOWS = (MIN_WINDOW, 2 * MIN_WINDOW)
"""Tokens of context: the fewest with which a coding agent works, and a comfortable number."""


def run_plan(
    config: EngineConfig,
    as_json: bool,
    free_gib: float | None,
    replicas: int = 1,
    agent: bool = False,
    fronts: int = 1,
) -> bool:
    """Print the plan for one of `replicas` engines of a model, with `free_gib` GiB of free memory
    for all of them; returns whether they fit. `agent`: also what the contexts of a coding agent
    take. `fronts`: processes that answer HTTP. Raises `ConfigError` for an impossible
    `free_gib`."""
    if free_gib is not None and not 0 <= free_gib <= MAX_FREE_GIB:  # also false for NaN
        raise ConfigError("free_gib", f"must be between 0 and {MAX_FREE_GIB}, not {free_gib:g}")
    # These import numpy, and torch where there may be a GPU.
    from infer.engine.build.planner import (
        most_replicas,
        opened,
        plan_for,
        request_defaults,
    )
    from infer.main_memory import gib

    free = None if free_gib is None else int(free_gib * 2**30)
    checkpoint = opened(config)
    plan = plan_for(config, checkpoint, free=free, replicas=replicas, fronts=fronts)
    most = most_replicas(config, checkpoint, free=free, fronts=fronts)
    defaults = request_defaults(config, checkpoint)
    drafts = plan.draft.kv_bytes_per_token if plan.draft else 0
    windows = {n: n * (plan.kv_bytes_per_token + drafts) for n in AGENT_WINDOWS if agent}
    fits = plan.fits and (replicas == 1 or replicas <= most)
    if as_json:
        fields = {**plan.as_dict(), "replicas": replicas, "replicas_that_fit": most}
        fields["sampling_defaults"] = defaults.as_dict()
        if agent:
            fields["agent_window_bytes"] = windows
        print(json.dumps({**fields, "fits": fits}, indent=2))
        return fits
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for what, how_much in plan.rows():
        if what != "verdict":
            table.add_row(what, plain(how_much))
            continue
        table.add_row("defaults of requests", plain(defaults))
        for window, num_bytes in windows.items():
            table.add_row(f"context of {window:,}", f"{gib(num_bytes)} for each conversation")
        if replicas > 1:
            table.add_row("replicas", f"{replicas}, each as above; at most {most} fit here")
            if not fits:
                how_much = f"does not fit: --replicas {most} does" if most else how_much
        table.add_row(what, plain(how_much), style="green" if fits else "red")
    Console().print(table)
    return fits


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
    methods = Table("quant_method", "what is read", "held as", box=box.SIMPLE)
    methods.title = "Quantised safetensors"
    for name, method in METHODS.items():
        methods.add_row(name, method.formats, method.held)
    console.print(methods)
    local = local_checkpoints("Local hub cache")
    if local is None:
        console.print("No checkpoints in the local hub cache; a folder is loaded by its path.")
    else:
        console.print(local)
