"""1, 2, 4 … all cores, ours beside llama.cpp: `python benchmarks/cores.py FILE.gguf[:DTYPE]`.

Each round goes through the numbers of cores, and at each asks both engines for 1, 8 and 32 requests
of 128 tokens in and 64 out, and for a prompt of 1,024 tokens, one engine after the other; a process
ends before the next one begins. Ours lives where a server's engine would (`Placement`), the other
one on the same processors. FILE may be the folder of a checkpoint, of which ours has the shape with
random weights. `sh peers/setup.sh llamacpp` builds the other engine. The result is a file of
benchmarks/results, from which performance.py makes a table; a number of cores that this machine has
not stands in it as not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.bench.results import environment
from infer.engine.build.placement import Placement, live_on, place
from infer.engine.build.processors import Processors, read_processors

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
import files  # noqa: E402

COUNTS = (1, 2, 4, 8, 16, 32, 48, 64)
"""Numbers of cores that a table has, whatever the machine; and all that it has."""
ENGINES = ("ours", "llamacpp")
PAUSE_S = 300.0
"""Seconds that a process may take to load, or for a load."""


def counts_of(num_cores: int, wanted: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """The numbers of cores that are measured, and those of the table that this machine has not."""
    counts = sorted({*(wanted or (*COUNTS, num_cores))})
    return [n for n in counts if n <= num_cores], [n for n in counts if n > num_cores]


def engine_of(file: str, dtype: str, num_threads: int) -> Any:
    """Our engine, for all loads."""
    from infer import LLM

    settings: dict[str, Any] = {"device": "cpu", "num_threads": num_threads, "max_seq_len": 2048}
    settings["load_format"] = "auto" if file.endswith(".gguf") else "dummy"
    settings |= {"max_batch_size": 32, "kv_cache_memory_bytes": 1 << 30}
    return LLM(file, dtype=dtype or "auto", **settings)


def serve(file: str, dtype: str, num_threads: int) -> None:
    """The program of our process: it asks for each load once, and prints the rates."""
    processors = read_processors()
    live_on(place(processors, num_threads, "all"), processors)
    llm = engine_of(file, dtype, num_threads)
    for load in files.LOADS.values():
        files.ours(llm, *load[:2], min(8, load[2]))  # warm
    for line in sys.stdin:
        print(json.dumps(files.ours(llm, *files.LOADS[line.strip()])), flush=True)


class Ours:
    """Our engine in a process, asleep between loads."""

    def __init__(self, file: str, dtype: str, num_threads: int) -> None:
        own = [file, "--serve", "--dtype", dtype, "--threads", str(num_threads)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )

    def __call__(self, load: str) -> float:
        """Tokens a second."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{load}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PAUSE_S)


def theirs(file: str, load: str, placement: Placement) -> float | None:
    """The other engine on the same processors; None if it is not here, or cannot read the file."""
    if not file.endswith(".gguf") or not files.bench_program().exists():
        return None
    cpus = ",".join(str(min(core.cpus)) for core in placement.cores)
    before = ("taskset", "-c", cpus) if cpus else ()
    return files.theirs(file, *files.LOADS[load], threads=placement.num_threads, before=before)


def measure(file: str, dtype: str, counts: Sequence[int], processors: Processors) -> dict[str, Any]:
    """One round: number of cores → load → engine → tokens a second."""
    found: dict[str, Any] = {}
    for count in counts:
        placement = place(processors, count, "all")
        ours = Ours(file, dtype, count)
        try:
            for number, load in enumerate(files.LOADS):
                rates: dict[str, float | None] = {}
                for engine in ENGINES if number % 2 else reversed(ENGINES):
                    one = ours(load) if engine == "ours" else theirs(file, load, placement)
                    rates[engine] = one
                found.setdefault(str(count), {})[load] = rates
        finally:
            ours.close()
        print(count, json.dumps(found[str(count)]), f"load {os.getloadavg()[0]:.1f}", flush=True)
    return found


def median_rate(document: dict[str, Any], count: int, load: str, engine: str) -> float | None:
    """Tokens a second over the rounds; None where it was not measured."""
    rates = [each[str(count)][load][engine] for each in document["rounds"] if str(count) in each]
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None


def table(document: dict[str, Any]) -> str:
    """Tokens a second, and the share of so many times the rate of one core."""
    loads = list(document["loads"])
    lines = [["cores", "engine", *loads], ["---"] * (2 + len(loads))]
    for count in sorted((*document["counts"], *document["not_measured"])):
        for engine in ENGINES:
            rates = [median_rate(document, count, load, engine) for load in loads]
            cells = []
            for load, rate in zip(loads, rates, strict=True):
                one = median_rate(document, 1, load, engine)
                share = f" ({rate / (count * one):.0%})" if rate and one else ""
                cells.append(f"{rate:,.1f}{share}" if rate else "—")
            if not any(rates):
                cells = ["not measured", *[""] * (len(loads) - 1)]
            lines.append([str(count), engine, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="FILE.gguf[:DTYPE], or a folder")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=lambda text: [int(n) for n in text.split(",")], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="results/cores-NAME.json")
    options = parser.parse_args()
    if options.serve:
        return serve(options.file, options.dtype, options.threads)
    file, _, dtype = options.file.partition(":")
    processors = read_processors()
    counts, missing = counts_of(len(processors.cores) or processors.num_others, options.counts)
    rounds = [measure(file, dtype, counts, processors) for _ in range(options.rounds)]
    document = {
        "model": Path(file).name,
        "dtype": dtype or "auto",
        **environment(),
        "counts": counts,
        "not_measured": missing,
        "loads": files.LOADS,
        "rounds": rounds,
    }
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))


if __name__ == "__main__":
    main()
