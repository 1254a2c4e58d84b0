"""Writes docs/performance.md and its plots: `python benchmarks/performance.py`.

This program measures nothing; the page names the command behind each table. It reads files of
benchmarks/results/: `peers-*.json` of peers/run.py (`zen4-*.json`: of another machine,
`avx2-*.json`: kept to AVX2, `icelake-*.json`: a third machine, kept to AVX2; `published-*.json`: of
published checkpoints, `quantised-*.json`: of quantised ones), `floor-*.json` of floor.py, and
results of `infer bench` that are named WORKLOAD-LABEL.json. Results of the same workload are
compared with each other (`modes-zen4-*.json`: of another machine, in one table).
`batching-*.json` of batching_modes.py have a table together and a plot each, `cores-*.json` of
cores.py a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

from infer.bench.report import write_report
from infer.engine.build import exactness

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "performance.md"
PLOTS = PAGE.parent / "performance"
sys.path[:0] = [str(HERE), str(HERE / "peers")]
import cores  # noqa: E402
from run import tables  # noqa: E402

COLOURS = {"ours": "#0072B2", "openvino": "#E69F00", "vllm": "#009E73", "llamacpp": "#D55E00"}
SHAPES = {
    "llama-3.2-1b": "Llama 3.2 1B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "qwen3-1.7b": "Qwen3 1.7B",
    "gemma-3-1b": "Gemma 3 1B",
    "llama-3.2-3b": "Llama 3.2 3B",
    "qwen3-4b": "Qwen3 4B",
    "gemma-3-4b": "Gemma 3 4B",
    "smollm2-135m": "SmolLM2 135M",
    "gemma-3-270m": "Gemma 3 270M",
}
MODES = {"sequential": "#888888", "static": "#E69F00", "continuous": "#0072B2"}
MEASURED = (
    *("smollm2-135m", "gemma-3-270m", "gemma-3-1b", "llama-3.2-1b", "qwen3-1.7b"),
    *("llama-3.2-3b", "qwen3-4b"),
)
"""What batching_modes.py is run on; the first two with their real weights."""
WANTED_SHARE = 1 / 5
"""The P99 of the time to first token that continuous batching may have, of static batching's."""


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def rate(document: dict[str, Any], engine: str, case: str) -> float:
    """The median tokens a second of an engine."""
    job = document["cases"][case]
    tokens = job["input_len"] if case == "prefill" else job["num_requests"] * job["output_len"]
    return statistics.median(tokens / r["seconds"][case][engine] for r in document["rounds"])


def plot_peers(documents: list[dict[str, Any]], file: Path) -> None:
    """Draws bars of tokens a second: a row for each comparison, a panel for each load."""
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
            what = "prompt of 1,024" if case == "prefill" else f"{case} at once"
            axes.set_title(f"{shape}: {what}, tok/s", fontsize=8)
    figure.savefig(file)


def table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def distribution(values: dict[str, float] | None) -> str:
    return f"{values['p50']:,.0f} / {values['p99']:,.0f}" if values else "—"


def summaries(files: list[Path]) -> str:
    """A table of stored results of workloads."""
    rows = []
    for file in files:
        document = load(file.name)
        label, summary = document["label"], document["summary"]
        parts = [(label, f"{summary['output_tok_s']:,.1f}", summary)]
        for group, values in summary.get("groups", {}).items():
            parts.append((f"{label}: {group}", "", values))
        for name, rate, values in parts:
            cells = [distribution(values.get(key)) for key in ("ttft_ms", "itl_ms", "e2e_ms")]
            rows.append([name, rate, *cells])
    heading = ["", "output tok/s", "TTFT ms, P50 / P99", "ITL ms, P50 / P99", "end to end ms"]
    return table(heading, rows)


def compared(workload: str, *labels: str) -> str:
    """The table of a workload; also writes the plots that `infer bench report` makes."""
    files = [RESULTS / f"{workload}-{label}.json" for label in labels]
    folder = PLOTS / workload
    for written in write_report(files, folder):
        if written.suffix == ".md":
            written.unlink()
    plots = "".join(
        f"![{workload}, {name}](performance/{workload}/{name}.png)\n\n"
        for name in ("timeline", "latency", "throughput")
    )
    return f"{summaries(files)}\n{plots}"


def percents(found: dict[str, list[float]], name: str) -> str:
    return f"{statistics.median(found[name]):.0%}" if name in found else "—"


def floors() -> str:
    rows = []
    for file in sorted(RESULTS.glob("floor-*.json")):
        document = load(file.name)
        shape = SHAPES[Path(document.pop("model")).name]
        machine = "Zen 4" if "zen4" in file.name else "Xeon"
        for dtype, found in document.items():
            single, prefill = found["single"], found["prefill"]
            rows.append(
                [f"{machine}: {shape}, {dtype}", f"{statistics.median(single['tok_s']):.1f}",
                 f"{statistics.median(single['read_gb_s']):.1f}", percents(single, "share"),
                 percents(single, "share_of_weights"),
                 f"{statistics.median(prefill['tok_s']):,.0f}", percents(prefill, "share"),
                 percents(prefill, "share_of_stock")]
            )  # fmt: skip
    heading = ["", "one stream, tok/s", "read GB/s", "of that rate", "of reading the weights",
               "prompt tok/s", "of its products alone", "of torch's products"]  # fmt: skip
    return table(heading, rows)


def by_workload(document: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Workload → mode → summary, in the order of `MODES`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for mode in MODES:
        for run in document["runs"]:
            if run["mode"] == mode:
                found.setdefault(run["workload"], {})[mode] = run["summary"]
    return found


def ranks(values: dict[str, float] | None) -> str:
    """The three percentiles, for a table."""
    return " / ".join(f"{values[p]:,.0f}" for p in ("p50", "p95", "p99")) if values else "—"


def plot_batching(document: dict[str, Any], file: Path) -> None:
    """Draws throughput and time to first token of each workload: a bar for each mode."""
    from matplotlib.figure import Figure

    workloads = by_workload(document)
    figure = Figure(layout="constrained", dpi=110)
    figure.set_size_inches(11, 4.6)
    panels = figure.subplots(2, len(workloads), squeeze=False)
    for column, (name, summaries) in enumerate(workloads.items()):
        upper, lower = panels[0][column], panels[1][column]
        rates = [summary["output_tok_s"] for summary in summaries.values()]
        colours = [MODES[mode] for mode in summaries]
        bars = upper.bar(list(summaries), rates, color=colours)
        upper.bar_label(bars, [f"{each:,.0f}" for each in rates], padding=2, fontsize=7)
        upper.set_ylim(top=1.2 * max(rates))
        upper.set_title(f"{name}: output tok/s", fontsize=8)
        for number, (mode, summary) in enumerate(summaries.items()):
            values = [summary["ttft_ms"][p] / 1000 for p in ("p50", "p95", "p99")]
            places = [i + 0.27 * (number - 1) for i in range(3)]
            bars = lower.bar(places, values, width=0.25, color=MODES[mode], label=mode)
            lower.bar_label(bars, [f"{each:.1f}" for each in values], padding=1, fontsize=6)
        lower.set_xticks(range(3), ["P50", "P95", "P99"])
        lower.set_title(f"{name}: time to first token, s", fontsize=8)
        for axes in (upper, lower):
            axes.tick_params(labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[1][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(MODES),
        fontsize=7,
        frameon=False,
    )
    figure.savefig(file)


def what_changed(workloads: dict[str, dict[str, dict[str, Any]]]) -> str:
    """One sentence on what the policy changed; and where the wanted share is not reached, why."""
    _, mixed, arrivals = workloads.values()
    rate = {mode: summary["output_tok_s"] for mode, summary in mixed.items()}
    first = {mode: summary["ttft_ms"]["p99"] for mode, summary in arrivals.items()}
    share = first["continuous"] / first["static"]
    gain = {mode: rate["continuous"] / rate[mode] for mode in ("sequential", "static")}
    text = (
        "With requests at once, continuous batching has"
        f" {gain['sequential']:.2f} times the throughput of sequential and {gain['static']:.2f}"
        " times that of static; with arrivals, the P99 of the time to first token is"
        f" {first['continuous'] / 1000:.1f} s instead of {first['static'] / 1000:.1f} s (static)"
        f" and {first['sequential'] / 1000:.1f} s (sequential), which is 1/{1 / share:.1f} of"
        " static."
    )
    if share > WANTED_SHARE:
        least = arrivals["continuous"]["ttft_ms"]["p50"] / 1000
        text += (
            " 1/5 is not reached here: these prompts come faster than they are computed"
            f" (P50 {least:.1f} s), so the queue decides in every mode."
        )
    return textwrap.fill(text, 115)


def batching() -> str:
    """The table of all models, and for each one what the policy changed, and its plot."""
    rows, sections, missing = [], [], []
    for name in MEASURED:
        file = RESULTS / f"batching-{name}.json"
        if not file.exists():
            missing.append(SHAPES[name])
            continue
        document = load(file.name)
        workloads = by_workload(document)
        plot_batching(document, PLOTS / f"{file.stem}.png")
        for workload, summaries in workloads.items():
            for mode, summary in summaries.items():
                cells = [ranks(summary[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms")]
                tokens = f"{summary['output_tok_s']:,.1f}"
                rows.append([SHAPES[name], workload, mode, tokens, *cells])
        machine = document["runs"][0]["machine"]
        dtype = document["engine"]["dtype"].replace("auto", "the file's blocks")
        about = f"{dtype}, {machine['logical_cpus']} cores of {machine['cpu']}"
        sections.append(
            f"**{SHAPES[name]}** ({about}): {what_changed(workloads)}\n\n"
            f"![{SHAPES[name]}](performance/{file.stem}.png)\n"
        )
    if missing:
        sections.append(f"Not recorded yet: {', '.join(missing)}.\n")
    heading = ["model", "workload", "mode", "output tok/s", "TTFT ms", "ITL ms", "end to end ms"]
    return "\n".join([table(heading, rows), *sections])


def plans() -> str:
    """A table of what `infer plan --json` has said."""
    rows = []
    for file in sorted(RESULTS.glob("plan-*.json")):
        plan = load(file.name)
        sizes = [f"{plan[name] / 2**30:.2f}" for name in ("weight_bytes", "kv_bytes")]
        fits = f"{plan['sequences_that_fit']['2048']} of 2,048 tokens" if plan["fits"] else "no"
        count = f"{plan['num_parameters'] / 1e9:.2f}"
        rows.append([SHAPES[plan["model"]], count, *sizes, fits])
    return table(["", "10⁹ weights", "weights GiB", "cache GiB", "sequences"], rows)


def many_cores() -> str:
    """The tables of cores.py."""
    sections = []
    for file in sorted(RESULTS.glob("cores-*.json")):
        document = load(file.name)
        cpu, num = document["machine"]["cpu"], len(document["rounds"])
        about = f"{document['model']}, {document['dtype']}, {cpu}; rounds: {num}; tok/s"
        sections.append(f"{about}\n\n{cores.table(document)}")
    return "\n".join(sections) or "Not recorded yet.\n"


def main() -> None:
    """Write the page and its plots."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PLOTS.mkdir(exist_ok=True)
    text = (HERE / "performance.template.md").read_text(encoding="utf-8")
    for name in ("peers", "zen4", "avx2", "icelake"):
        documents = [load(file.name) for file in sorted(RESULTS.glob(f"{name}-*.json"))]
        plot_peers(documents, PLOTS / f"{name}.png")
        text = text.replace(f"{{{{{name}}}}}", "\n".join(tables(each) for each in documents))
    for name in ("published", "quantised"):
        found = [load(file.name) for file in sorted(RESULTS.glob(f"{name}-*.json"))]
        text = text.replace(f"{{{{{name}}}}}", "\n".join(map(tables, found)))
    text = text.replace("{{floors}}", floors())
    text = text.replace("{{batching}}", batching())
    text = text.replace("{{plans}}", plans())
    text = text.replace("{{cores}}", many_cores())
    text = text.replace("{{exactness}}", exactness.table())
    text = text.replace("{{modes-zen4}}", summaries(sorted(RESULTS.glob("modes-zen4-*.json"))))
    while "{{" in text:
        before, _, rest = text.partition("{{")
        call, _, after = rest.partition("}}")
        text = before + compared(*call.split()) + after
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
