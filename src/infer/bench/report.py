"""`infer bench report`: turns results in JSON into one page of Markdown and three plots.

The plots show the distributions of latency, a timeline of all requests, and throughput over time.
They show the run of each file that has the median throughput. A label has the same colour
everywhere. A request's bar is pale until its first token and full after it; while it is pale, the
request waits or its prompt is computed, which a client cannot tell apart. Needs matplotlib, the
extra `bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.bench.drive import Record
from infer.bench.results import FORMAT
from infer.errors import ConfigError, LoadError
from infer.extras import to_install
from infer.files import MAX_LIST_BYTES, parse_json, read_text

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
_ERROR = "#CC0000"
_HEADINGS = {
    "TTFT ms": ("ttft_ms", "Time to first token"),
    "ITL ms": ("itl_ms", "Inter-token latency"),
    "end to end ms": ("e2e_ms", "End to end"),
}
_ENGINE = {
    "mode": "mode",
    "steps": "num_steps",
    "rows a step": "mean_rows_per_step",
    "batches": "batches_formed",
    "batches a minute": "batches_per_minute",
    "requests a batch": "mean_batch_size",
    "mean wait ms": "mean_wait_ms",
    "wait p50": "p50_wait_ms",
    "wait p95": "p95_wait_ms",
    "wait p99": "p99_wait_ms",
    "success rate": "success_rate",
    "mean processing ms": "mean_processing_ms",
    "KV bytes": "kv_bytes",
    "KV pages used": "kv_pages_used",
    "prefix hit rate": "prefix_hit_rate",
    "cached tokens": "num_cached_tokens",
    "preemptions": "num_preemptions",
}
"""Heading → statistic of the engine; one that has no meaning there is a dash."""
_BINS = 60


@dataclass(frozen=True, slots=True)
class Result:
    """A result file: its document, and the records of the run with the median throughput."""

    label: str
    colour: str
    document: dict[str, Any]
    records: list[Record]

    @property
    def answered(self) -> list[Record]:
        """The records of the requests that ended without an error."""
        return [record for record in self.records if record.error is None]


def write_report(files: Sequence[Path], folder: Path) -> list[Path]:
    """Write the page and its plots into a folder; returns the paths of what was written.

    Raises `ConfigError` for a file that is not a result, and where matplotlib is missing.
    """
    results = _read(files)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        message = f"the plots need matplotlib: {to_install('bench')}"
        raise ConfigError("report", message) from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    plots: dict[str, Callable[[Any, list[Result]], None]] = {
        "latency": _plot_latency,
        "timeline": _plot_timeline,
        "throughput": _plot_throughput,
    }
    for name, plot in plots.items():
        figure = Figure(layout="constrained", dpi=130)
        plot(figure, results)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1])
    written.append(folder / "report.md")
    written[-1].write_text(_page(results, list(plots)), encoding="utf-8")
    return written


def _read(files: Sequence[Path]) -> list[Result]:
    results: list[Result] = []
    for file in files:
        try:
            document = parse_json(read_text(file, MAX_LIST_BYTES))
            rows = document["runs"][document["median_run"]]["requests"]
            label = str(document["label"])
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}, not {FORMAT}")
            records = [Record(**row) for row in rows]
        except (OSError, ValueError, LookupError, TypeError, LoadError) as error:
            message = f"{file} is no result that `infer bench … --json` has written"
            raise ConfigError("report", f"{message} ({type(error).__name__}: {error})") from None
        if label in [result.label for result in results]:
            label = f"{label} ({file.stem})"
        results.append(Result(label, _COLOURS[len(results) % len(_COLOURS)], document, records))
    return results


def _legend(figure: Any, results: Sequence[Result], more: Sequence[Any] = ()) -> None:
    """Put the legend below the plots, where it covers nothing."""
    from matplotlib.patches import Patch

    handles = [Patch(color=result.colour, label=result.label) for result in results]
    columns = min(4, len(handles) + len(more))
    figure.legend(
        handles=[*handles, *more], loc="outside lower center", ncols=columns, frameon=False
    )


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _plot_latency(figure: Any, results: list[Result]) -> None:
    """The cumulative distribution of each latency, in milliseconds."""
    figure.set_size_inches(11, 3.9)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (key, title) in zip(panels, _HEADINGS.values(), strict=True):
        reach = []
        for result in results:
            values = sorted(
                1000 * value for record in result.answered for value in _of(record, key)
            )
            if values:
                shares = [(i + 1) / len(values) for i in range(len(values))]
                axes.step(values, shares, where="post", color=result.colour, linewidth=1.8)
                reach += [max(values[0], 1e-2), values[-1]]
        if reach and max(reach) > 30 * min(reach):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.set_xlim(left=0)
        axes.set(title=title, xlabel="ms", ylim=(0, 1.02))
        _tidy(axes)
    panels[0].set_ylabel("share of all values")
    _legend(figure, results)


def _of(record: Record, key: str) -> list[float]:
    if key == "itl_ms":
        return [stop - start for start, stop in record.gaps]
    return [record.ttft_s if key == "ttft_ms" else record.e2e_s]


def _plot_timeline(figure: Any, results: list[Result]) -> None:
    """One panel for each file, one bar for each request; all panels have the same time axis."""
    from matplotlib.patches import Patch

    heights = [min(4.5, 1.0 + 0.11 * len(result.records)) for result in results]
    figure.set_size_inches(11, sum(heights) + 0.8)
    panels = figure.subplots(
        len(results), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, result in zip(panels[:, 0], results, strict=True):
        for row, record in enumerate(result.records):
            first_s = record.token_s[0] if record.token_s else record.end_s
            colour = _ERROR if record.error else result.colour
            axes.barh(
                row, first_s - record.arrival_s, left=record.arrival_s, color=colour, alpha=0.25
            )
            axes.barh(row, record.end_s - first_s, left=first_s, color=colour)
        axes.set(title=result.label, ylabel="request", ylim=(len(result.records) - 0.4, -0.6))
        axes.set_xlim(left=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
        _tidy(axes)
        axes.grid(False, axis="y")
    panels[-1, 0].set_xlabel("seconds since the start")
    kinds = [
        Patch(color="#555555", alpha=0.25, label="waiting and prefill"),
        Patch(color="#555555", label="decode"),
    ]
    if any(record.error for result in results for record in result.records):
        kinds.append(Patch(color=_ERROR, label="ended with an error"))
    _legend(figure, (), kinds)


def _plot_throughput(figure: Any, results: list[Result]) -> None:
    """Output tokens a second, in equal slices of time."""
    figure.set_size_inches(11, 3.9)
    axes = figure.subplots()
    end_s = max(record.end_s for result in results for record in result.records)
    width_s = max(end_s / _BINS, 0.001)
    for result in results:
        counts = [0.0] * (_BINS + 1)
        for record in result.answered:
            for at_s in record.token_s:
                counts[int(at_s / width_s)] += record.output_tokens / len(record.token_s)
        rates = [count / width_s for count in counts]
        last = max(i for i, rate in enumerate(rates) if rate) if any(rates) else 0
        edges = [i * width_s for i in range(last + 2)]
        axes.stairs(rates[: last + 1], edges, color=result.colour, linewidth=1.8)
    axes.set(xlabel="seconds since the start", ylabel="output tokens a second")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _tidy(axes)
    _legend(figure, results)


def _table(rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""]


def _cells(values: dict[str, Any]) -> list[str]:
    """A table cell for each of the three distributions, in milliseconds."""
    cell_values = [values.get(key) for key, _ in _HEADINGS.values()]
    ranks = ("p50", "p95", "p99")
    return [
        " / ".join(f"{value[rank]:,.1f}" for rank in ranks) if value else "—"
        for value in cell_values
    ]


def _page(results: Sequence[Result], plots: Sequence[str]) -> str:
    rows: list[list[object]] = [["", "workload", "answered", "output tok/s", "goodput", *_HEADINGS]]
    groups: list[list[object]] = [["", "group", *_HEADINGS]]
    steps: list[list[object]] = [["", *_ENGINE]]
    where: list[list[object]] = [["", "mode", "model", "prompts", "CPU", "versions", "started"]]
    for result in results:
        document, summary = result.document, result.document["summary"]
        answered = f"{summary['num_answered']} of {summary['num_requests']}"
        goodput = f"{summary['goodput']['share']:.0%}" if "goodput" in summary else "—"
        rate = f"{summary['output_tok_s']:,.1f}"
        name = document["workload"]["name"]
        rows.append([result.label, name, answered, rate, goodput, *_cells(summary)])
        for group, values in summary.get("groups", {}).items():
            groups.append([result.label, group, *_cells(values)])
        if engine := summary.get("engine"):
            if "mean_rows_per_step" not in engine:  # written before there was this name
                engine = {**engine, "mean_rows_per_step": engine["mean_batch_size"]}
                del engine["mean_batch_size"]
            steps.append([result.label, *(engine.get(name, "—") for name in _ENGINE.values())])
        target, machine = document["target"], document["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        cpu = f"{machine['cpu']}, {machine['logical_cpus']} logical"
        described = (target["mode"], target["model"], target["prompts"], cpu, versions)
        where.append([result.label, *described, document["started"]])
    lines = ["# infer bench", "", "Latencies are P50 / P95 / P99.", "", *_table(rows)]
    for name in plots:
        lines += [f"![{name}]({name}.png)", ""]
    lines += [line for table in (groups, steps, where) if table[1:] for line in _table(table)]
    return "\n".join(lines)
