"""`infer doctor`: what this machine has, what an engine makes of it, and what would be faster."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.table import Table

from infer.cli.plain import plain
from infer.config import EngineConfig


def run_doctor(config: EngineConfig, as_json: bool) -> None:
    """Print a diagnosis of this machine; raises `ConfigError` for settings it cannot follow."""
    from infer.engine.build.diagnosis import as_dicts, check_instruction_set, diagnose

    check_instruction_set()
    findings = diagnose(config)
    if as_json:
        print(json.dumps(as_dicts(findings), indent=2))
        return
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for finding in findings:
        table.add_row(finding.subject, plain(finding.state))
    console = Console()
    console.print(table)
    advice = [finding for finding in findings if finding.advice]
    console.print("Faster would be:" if advice else "Nothing would make it faster.")
    for finding in advice:
        console.print(f"  {finding.subject}: ", plain(finding.advice), sep="", highlight=False)
