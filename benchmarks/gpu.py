"""Writes docs/gpu.md from `gpu-*.json` in benchmarks/results/: `python benchmarks/gpu.py`.

This program measures nothing: `infer bench gpu --model PATH --json FILE` does. The text around the
tables is in gpu.template.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infer.bench.gpu import WANTED

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "gpu.md"


def number(value: float | None) -> str:
    """A number for a table, with three significant digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def limit(row: dict[str, Any]) -> str:
    """The limit of a row and the share that is reached, which a cache can raise above 100 %."""
    if row["floor"] is None:
        return ""
    if row["share"] is None:
        return number(row["floor"])
    return f"{number(row['floor'])} ({100 * row['share']:.0f} %)"


def table(document: dict[str, Any]) -> str:
    """The table of one model on one GPU."""
    peaks = document["peaks"]
    lines = [
        f"### {document['model']} on {document['gpu']}",
        "",
        f"Measured peaks: copy {peaks['copy_tb_s']:.2f} TB/s (read and written bytes), read"
        f" {peaks['read_tb_s']:.2f} TB/s, products {peaks['product_tflop_s']:.0f} Tflop/s;"
        f" torch {document['torch']}.",
        "",
        "| what | unit | limit (share) | measured | wanted | ok |",
        "|---|---|---|---|---|---|",
    ]
    marks = {None: "", True: "yes", False: "**no**"}
    lines += [
        f"| {row['what']} | {row['unit']} | {limit(row)}"
        f" | {number(row['measured']) or 'unmeasured'}"
        f" | {number(row['wanted'])} | {marks[row['ok']]} |"
        for row in document["rows"]
        if row["key"] != "ready"
    ]
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    documents = [
        json.loads(p.read_text(encoding="utf-8"))
        for p in sorted((HERE / "results").glob("gpu-*.json"))
    ]
    kinds = ("H100", "H200")
    measured = {(kind, d["model"]) for d in documents for kind in kinds if kind in d["gpu"]}
    missing = [f"{model} on {kind}" for kind, model in WANTED if (kind, model) not in measured]
    text = (HERE / "gpu.template.md").read_text(encoding="utf-8")
    text = text.replace("{{tables}}", "\n\n".join(map(table, documents)))
    PAGE.write_text(text.replace("{{unmeasured}}", "; ".join(missing)), encoding="utf-8")


if __name__ == "__main__":
    main()
