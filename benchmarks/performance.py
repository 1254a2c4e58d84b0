"""Writes docs/performance.md and its plots from benchmarks/results/: `python performance.py`.

Nothing is measured here; the page names the command behind each table. Files: `peers-*.json` of
peers/run.py (`zen4-*.json` on another machine), `floor-*.json` of floor.py, and results of
`infer bench` named WORKLOAD-LABEL.json, of which those of one workload are compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from infer.bench.report import write_report

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "performance.md"
PLOTS = PAGE.parent / "performance"
sys.path.insert(0, str(HERE / "peers"))
from run import tables  # noqa: E402

COLOURS = {"ours": "#0072B2", "openvino": "#E69F00", "vllm": "#009E73", "llamacpp": "#D55E00"}
SHAPES = {"llama-3.2-1b": "Llama 3.2 1B", "qwen3-0.6b": "Qwen3 0.6B"}


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def rate(document: dict[str, Any], engine: str, case: str) -> float:
    """Median tokens a second of an engine."""
    job = document["cases"][case]
    tokens = job["input_len"] if case == "prefill" else job["num_requests"] * job["output_len"]
    return statistics.median(tokens / r["seconds"][case][engine] for r in document["rounds"])


def plot_peers(documents: list[dict[str, Any]], file: Path) -> None:
    """Bars of tok/s: a row of panels for each comparison, a panel for each load."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", dpi=110)
    figure.set_size_inches(11, 2.1 * len(documents))
    panels = figure.subplots(len(documents), 4, squeeze=False)
    for row, document in zip(panels, documents, strict=True):
        engines = document["engines"][::-1]
        shape = SHAPES[document["model"]]
        for axes, case in zip(row, document["cases"], strict=True):
            rates = [rate(document, engine, case) for engine in engines]
            colours = [COLOURS.get(engine.partition(":")[0], "#888888") for engine in engines]
            bars = axes.barh(range(len(engines)), rates, color=colours)
            axes.bar_label(bars, [f"{each:,.0f}" for each in rates], padding=2, fontsize=7)
            axes.set_xlim(right=1.2 * max(rates))
            axes.set_yticks(range(len(engines)), engines if case == "1" else [], fontsize=7)
            axes.tick_params(axis="x", labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            what = "prompt of 1,024 tokens" if case == "prefill" else f"{case} at once"
            axes.set_title(f"{shape}: {what}, tok/s", fontsize=8)
    figure.savefig(file)


def table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def distribution(values: dict[str, float] | None) -> str:
    return f"{values['p50']:,.0f} / {values['p99']:,.0f}" if values else "—"


def compared(workload: str, *labels: str) -> str:
    """A table of stored results of a workload, and the plots that `infer bench report` makes."""
    files = [RESULTS / f"{workload}-{label}.json" for label in labels]
    documents = [json.loads(file.read_text()) for file in files]
    rows = []
    for document in documents:
        summary = document["summary"]
        cells = [distribution(summary[name]) for name in ("ttft_ms", "itl_ms", "e2e_ms")]
        rows.append([document["label"], f"{summary['output_tok_s']:,.1f}", *cells])
        for group, values in summary.get("groups", {}).items():
            cells = [distribution(values.get(name)) for name in ("ttft_ms", "itl_ms", "e2e_ms")]
            rows.append([f"{document['label']}: {group}", "", *cells])
    heading = ["", "output tok/s", "TTFT ms, P50 / P99", "ITL ms, P50 / P99", "end to end ms"]
    folder = PLOTS / workload
    for written in write_report(files, folder):
        if written.suffix == ".md":
            written.unlink()
    plots = "".join(
        f"![{workload}, {name}](performance/{workload}/{name}.png)\n\n"
        for name in ("timeline", "latency", "throughput")
    )
    return f"{table(heading, rows)}\n{plots}"


def floors() -> str:
    rows = []
    for file in sorted(RESULTS.glob("floor-*.json")):
        document = load(file.name)
        shape = SHAPES[Path(document.pop("model")).name]
        for dtype, found in document.items():
            single, prefill = found["single"], found["prefill"]
            share, median = statistics.median(single["share"]), statistics.median
            rows.append(
                [f"{shape}, {dtype}", f"{median(single['tok_s']):.1f}",
                 f"{median(single['read_gb_s']):.1f}", f"{share:.0%}",
                 f"{median(prefill['tok_s']):,.0f}", f"{median(prefill['share']):.0%}",
                 f"{median(prefill['share_of_stock']):.0%}"]
            )  # fmt: skip
    heading = ["", "one stream, tok/s", "read GB/s", "of the floor", "prompt tok/s",
               "of its products alone", "of torch's products"]  # fmt: skip
    return table(heading, rows)


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    text = (HERE / "performance.template.md").read_text()
    for name in ("peers", "zen4"):
        documents = [load(file.name) for file in sorted(RESULTS.glob(f"{name}-*.json"))]
        plot_peers(documents, PLOTS / f"{name}.png")
        text = text.replace(f"{{{{{name}}}}}", "\n".join(tables(each) for each in documents))
    text = text.replace("{{floors}}", floors())
    while "{{" in text:
        before, _, rest = text.partition("{{")
        call, _, after = rest.partition("}}")
        text = before + compared(*call.split()) + after
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
