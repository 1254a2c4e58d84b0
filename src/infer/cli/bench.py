"""`infer bench`: a progress bar and a table on stderr, and JSON as the last line of stdout.

`infer.bench` does the measuring. The line of JSON is the document without the timelines of the
requests; `--json` writes the whole document. The exit code is 1 if no request was answered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infer.bench.measure import BenchOptions, measure
from infer.bench.workloads import WORKLOADS
from infer.cli.options import ListedOptions, key_option, with_engine_options, with_options
from infer.config import EngineConfig
from infer.errors import ConfigError

_LIST = "\n\n".join(f"[bold]{name}[/]: {made.__doc__}" for name, made in WORKLOADS.items())
app = typer.Typer(
    help=f"Measure speed: our engine, or any OpenAI-compatible server.\n\nWorkloads:\n\n{_LIST}",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
_with_bench_options = with_options(BenchOptions, "bench", "Measuring")
_HEADINGS = {
    "ttft_ms": "time to first token",
    "itl_ms": "inter-token latency",
    "e2e_ms": "end to end",
}


@app.command(cls=ListedOptions)
@with_engine_options(leave_out=("model", "seed"))
@_with_bench_options
def offline(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder, GGUF file, package:NAME or hub id; default: the one that ships."
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="File for the engine's steps, which the page can play.")
    ] = None,
    *,
    bench: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Measure the engine in this process, without a server."""
    from infer.bench.engine import engine_target
    from infer.bench.recording import Recorder

    options = BenchOptions(**bench)
    config = EngineConfig.from_kwargs(model=model, seed=options.seed, **settings)
    if record is not None:
        _check_writable("record", record)
    recorder = None if record is None else Recorder()

    async def measured(**callbacks: Any) -> dict[str, Any]:
        how: dict[str, Any] = {"ignore_eos": options.ignore_eos, "recorder": recorder}
        async with engine_target(config, **how) as target:
            described = {
                "mode": "offline",
                "model": target.llm.model_name,
                "prompts": "token ids",
                "engine": dataclasses.asdict(config),
            }
            llm = target.llm
            document = await measure(
                *(options, target, described),
                vocab_size=llm.vocab_size,
                stats=target.stats,
                **callbacks,
            )
        if recorder is not None and record is not None:
            hello = recorder.hello(
                model=llm.model_name,
                mode=llm.batching_mode,
                num_seats=llm.num_seats,
                page_size=llm.page_size,
                max_seq_len=llm.max_seq_len,
            )
            recording = recorder.document(hello, document["summary"])
            record.write_text(json.dumps(recording) + "\n", encoding="utf-8")
        return document

    _run(options, measured)


@app.command(cls=ListedOptions)
@_with_bench_options
def serve(
    base_url: Annotated[
        str, typer.Option("--url", "--base-url", help="The URL that OpenAI's clients take.")
    ],
    model: Annotated[
        str | None, typer.Option(help="The model's name there; default: the first in its list.")
    ] = None,
    api_key: Annotated[
        str | None,
        key_option("OPENAI_API_KEY", "File with a key that is sent as a bearer token, as @FILE."),
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="ids, text, or auto = ids where the server takes them.")
    ] = "auto",
    *,
    bench: dict[str, Any],
) -> None:
    """Measure a server: infer's, llama.cpp's, vLLM's, OpenVINO's or another one."""
    from infer.bench.client import ServerTarget

    options = BenchOptions(**bench)
    if options.workload == "multi_turn":  # no server takes back the token ids of its answer
        if prompts == "ids":
            raise ConfigError("prompts", "multi_turn continues the server's text; use text")
        prompts = "text"

    async def measured(**callbacks: Any) -> dict[str, Any]:
        how: dict[str, Any] = {"model": model, "api_key": api_key}
        target = ServerTarget(base_url, **how, ignore_eos=options.ignore_eos)
        await target.connect(prompts)
        described = {"mode": "serve", "model": target.model, "base_url": base_url}
        return await measure(options, target, {**described, "prompts": target.prompts}, **callbacks)

    _run(options, measured)


def _check_writable(option: str, file: Path) -> None:
    """A file that cannot be written is found before the run, not after it."""
    try:
        file.touch()
    except OSError as error:
        raise ConfigError(option, f"{file} cannot be written: {error}") from None


def _run(
    options: BenchOptions, measured: Callable[..., Coroutine[Any, Any, dict[str, Any]]]
) -> None:
    """Measure, show the progress, and write the result to stderr, stdout and the `--json` file."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if options.json:
        _check_writable("json", Path(options.json))
    notes = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, TimeElapsedColumn(), console=notes, refresh_per_second=2)
    task = bar.add_task("getting ready", total=None)

    def on_run(run: int, total: int) -> None:
        title = f"{options.workload}, run {run + 1} of {options.repeat}"
        bar.reset(task, total=total, description=title)

    with bar:
        document = asyncio.run(measured(on_run=on_run, on_end=lambda: bar.advance(task)))
    _show(document, notes)
    if options.json:
        Path(options.json).write_text(json.dumps(document) + "\n", encoding="utf-8")
    runs = [{key: run[key] for key in run if key != "requests"} for run in document["runs"]]
    print(json.dumps({**document, "runs": runs}))
    if not document["summary"]["num_answered"]:
        raise typer.Exit(1)


def _show(document: dict[str, Any], notes: Console) -> None:
    """Print the summary for a person."""
    summary, target = document["summary"], document["target"]
    notes.print(
        f"[bold]{escape(document['label'])}[/] · {escape(document['workload']['name'])}:"
        f" {summary['num_answered']} of {summary['num_requests']} requests answered in"
        f" {summary['duration_s']:.2f} s; prompts as {target['prompts']}",
        highlight=False,
    )
    table = Table("ms", box=box.SIMPLE)
    columns = ("mean", "p50", "p95", "p99", "max")
    for column in columns:
        table.add_column(column, justify="right")
    for key, heading in _HEADINGS.items():
        if values := summary[key]:
            table.add_row(heading, *(f"{values[column]:,.1f}" for column in columns))
    notes.print(table)
    if groups := summary.get("groups"):
        notes.print(_group_table(groups))
    notes.print(
        f"[bold]{summary['output_tok_s']:,.1f}[/] output tok/s, {summary['total_tok_s']:,.1f} with"
        f" prompts, {summary['requests_per_s']:.2f} requests/s",
        highlight=False,
    )
    lines = []
    if goodput := summary.get("goodput"):
        lines.append(
            f"goodput {goodput['requests_per_s']:.2f} requests/s: {goodput['num_requests']} of"
            f" {summary['num_requests']} requests met the objectives"
        )
    if engine := summary.get("engine"):
        lines += _engine_lines(engine)
    elif summary["cached_tokens"]:
        lines.append(f"{summary['cached_tokens']} prompt tokens from the server's cache")
    if short := summary["num_short"]:
        lines.append(f"[yellow]{short} answers were shorter than asked[/]")
    for kind, count in summary["errors"].items():
        records = document["runs"][document["median_run"]]["requests"]
        message = next(record["message"] for record in records if record["error"] == kind)
        lines.append(f"[red]{count} × {escape(kind)}[/]: {escape(message)}")
    for line in lines:
        notes.print(line, highlight=False)


def _engine_lines(engine: dict[str, Any]) -> list[str]:
    """What the engine says of itself; what has no meaning is absent."""
    lines = [
        f"{engine['num_steps']} steps of {engine.get('mean_rows_per_step', 0)} sequences,"
        f" {engine['num_cached_tokens']} prompt tokens from the cache,"
        f" {engine['num_preemptions']} preemptions"
    ]
    if engine.get("num_draft_tokens"):
        lines.append(
            f"speculation: {engine['num_accepted_tokens']} of {engine['num_draft_tokens']} proposed"
            " tokens accepted"
        )
    if "mean_wait_ms" in engine:
        waits = [f"{name} {engine[f'{name}_wait_ms']:,.1f}" for name in ("mean", "p50", "p99")]
        lines.append(f"wait for a seat, ms: {', '.join(waits)}")
    if "mean_batch_size" in engine:
        lines.append(
            f"{engine['batches_formed']} static batches of {engine['mean_batch_size']} requests,"
            f" {engine['batches_per_minute']:,.1f} a minute"
        )
    return lines


def _group_table(groups: dict[str, Any]) -> Table:
    table = Table("ms", box=box.SIMPLE)
    shown = [(key, rank) for key in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")]
    for key, rank in shown:
        table.add_column(f"{_HEADINGS[key]} {rank}", justify="right")
    for group, rows in groups.items():
        cells = [rows.get(key) for key, _ in shown]
        columns = zip(cells, shown, strict=True)
        table.add_row(
            escape(group), *(f"{cell[rank]:,.1f}" if cell else "" for cell, (_, rank) in columns)
        )
    return table


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="The files that --json wrote.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the page and the plots.")
    ],
) -> None:
    """Turn results into a page with plots: report.md and three PNG files."""
    from infer.bench.report import write_report

    for path in write_report(files, output):
        print(path)


@app.command(cls=ListedOptions)
@with_engine_options(leave_out=("model", "device"))
def gpu(
    model: Annotated[
        str, typer.Option(help="Folder or hub id; with --load-format dummy, a config is enough.")
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the whole document.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Measure one stream and prompts only.")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure how near a model comes to the limits of this machine's GPU."""
    from infer.bench.gpu import measure_gpu
    from infer.bench.gpu_rows import Row

    notes = Console(stderr=True)

    def print_row(row: Row) -> None:
        share = "" if row.share is None else f"{100 * row.share:.0f} % of the limit"
        wanted = "" if row.wanted is None else f"wanted {row.wanted:g}: {'ok' if row.ok else 'NO'}"
        value = "unmeasured" if row.measured is None else f"{row.measured:,.3f}"
        notes.print(f"{row.what:<56}{value:>12} {row.unit:<12}{share:<20}{wanted}", markup=False)

    try:
        config = EngineConfig.from_kwargs(model=model, device="cuda", **settings)
        limits = measure_gpu(config, print_row, quick=quick)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    peaks = limits["peaks"]
    notes.print(
        f"{limits['gpu']}: copy {peaks['copy_tb_s']:.2f} TB/s, read {peaks['read_tb_s']:.2f} TB/s,"
        f" products {peaks['product_tflop_s']:.0f} Tflop/s",
        markup=False,
    )
    line = json.dumps(limits)
    if json_file is not None:
        json_file.write_text(line, encoding="utf-8")
    print(line)


@app.command()
def machine(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, GGUF file, package:NAME or hub id; only its config is read."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="The dtype of the layers; auto = the checkpoint's.")
    ] = "auto",
    num_threads: Annotated[int | None, typer.Option(help="Default: the physical cores.")] = None,
    device: Annotated[str, typer.Option(help="auto = a GPU if there is one; cpu; cuda.")] = "auto",
) -> None:
    """Measure this machine's bandwidth and products; with --model, the limits of its speed."""
    from infer.bench.machine import measure_machine

    notes = Console(stderr=True)
    settings: dict[str, Any] = {"dtype": dtype, "num_threads": num_threads, "device": device}
    config = EngineConfig(model=model, **settings)
    with notes.status("measuring; nothing else should run …"):
        limits = measure_machine(config)
    if peaks := limits.get("peaks"):
        heading = (
            f"{limits['gpu']}: copies [bold]{peaks['copy_tb_s']:.2f}[/] TB/s (read and written),"
            f" reads {peaks['read_tb_s']:.2f} TB/s,"
            f" multiplies [bold]{peaks['product_tflop_s']:,.0f}[/] Tflop/s in bfloat16"
        )
    else:
        heading = (
            f"{limits['machine']['cpu']}, {limits['threads']} threads,"
            f" torch: {limits['torch_isa']}, attention: {limits['attention']}"
            f"\nreads [bold]{limits['best_read_gb_s']:.1f}[/] GB/s"
            f" (a plain loop: best {limits['read_gb_s']['best']:.1f},"
            f" median {limits['read_gb_s']['median']:.1f})"
        )
    notes.print(heading, highlight=False)
    kinds = ", ".join(dict.fromkeys(layer["kind"] for layer in limits["layers"]))
    title = f"{limits['dtype']} layers ({kinds}): Gflop/s by number of rows"
    table = Table("layer", "×", "GB/s at 1", title=title, box=box.SIMPLE)
    for row in limits["layers"][0]["rows"]:
        table.add_column(str(row["rows"]), justify="right")
    for layer in limits["layers"]:
        rates = [f"{row['gflop_s']:,.0f}" for row in layer["rows"]]
        read = f"{layer['rows'][0]['gb_s']:.1f}"
        name = f"{layer['in']} → {layer['out']}"
        table.add_row(name, str(layer["count"]), read, *rates)
    notes.print(table)
    if floor := limits.get("floor"):
        notes.print(
            f"[bold]{escape(floor['model'])}[/]: a token reads"
            f" {floor['bytes_per_token'] / 1e6:,.1f} MB of weights; from memory, not a cache,"
            f" that is at most"
            f" [bold]{floor['one_stream_tok_s']:,.1f}[/] tok/s in one stream. The products alone"
            f" allow [bold]{floor['prefill_tok_s']:,.0f}[/] prompt tok/s.",
            highlight=False,
        )
    print(json.dumps(limits))
