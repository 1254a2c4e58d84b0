"""What an engine computes beside other busy processes: `python benchmarks/company.py`.

Milliseconds a step, one or two threads, idle and in company: a busy loop for each core, a second
engine, a quota of 1.5 cores. Workloads: 1 and 32 streams that decode, and prompts of 384 tokens.
Engines are processes that are there from the beginning and are measured in turns, so that all see
the same minutes. A line has the medians of the turns, and those of the ratios to the first engine
within a turn. `--other FOLDER` measures the source tree of another version beside this one. A quota
needs a control group that may be made, and is left out elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKLOADS = {"1 stream": (1, 100), "32 streams": (32, 100), "prompts": (1, 384)}
"""Name → number of streams, length of their prompts."""
SOURCE = Path(__file__).parents[1] / "src"
QUOTA = Path("/sys/fs/cgroup/cpu/company")
PERIOD_US = 100_000
ROUND = 500
"""Steps after which streams begin anew."""
BUSY = """
import time
ends_s = time.monotonic() + 240
while time.monotonic() < ends_s:
    for _ in range(1_000_000):
        pass
"""
"""Program of a neighbour; it ends by itself, whatever becomes of this one."""


def compute(core: Any, name: str, seconds: float, turn: int) -> dict[str, float]:
    """Steps of a workload for some seconds: the mean of their durations in milliseconds."""
    from infer.types import Request, SamplingParams

    streams, length = WORKLOADS[name]
    is_prompts = name == "prompts"
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)

    def add(number: int) -> None:
        prompt = tuple((number * 7 + turn * 31 + p * 13) % 400 + 1 for p in range(length))
        core.add(Request(f"{name}-{turn}-{number}", prompt, sampling, seed=0,
                         max_tokens=1 if is_prompts else 600))  # fmt: skip

    def begin() -> None:
        core.abort_all()
        for number in range(streams):
            add(number)
        while core.scheduler.waiting or any(s.num_output < 2 for s in core.scheduler.running):
            core.step()

    took_s, steps = 0.0, 0
    while took_s < seconds:
        if not is_prompts and steps % ROUND == 0:
            begin()
        started_s = time.perf_counter()
        if is_prompts:
            add(steps)
        core.step()
        took_s += time.perf_counter() - started_s
        steps += 1
    core.abort_all()
    return {"ms": took_s / steps * 1e3}


def serve(model: str, dtype: str, threads: int) -> None:
    """The program of an engine's process: workloads come as lines of JSON, results go."""
    import torch

    import infer.engine.build.assemble as assemble
    from infer.config import EngineConfig

    settings: dict[str, Any] = {"num_threads": threads, "kv_cache_memory_bytes": 1 << 30}
    settings |= {"enable_prefix_caching": False, "max_seq_len": 768, "dtype": dtype}
    if model != "shipped":
        settings["model"] = model
        settings["load_format"] = "auto" if model.endswith(".gguf") else "dummy"
    with torch.inference_mode():
        core = assemble.assemble(EngineConfig(**settings)).core
        for line in sys.stdin:
            print(json.dumps(compute(core, **json.loads(line))), flush=True)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, label: str, source: Path, options: argparse.Namespace, threads: int) -> None:
        self.label = f"{label}, {threads} threads"
        own = ["--serve", options.model, "--dtype", options.dtype, "--threads", str(threads)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, *own],
            env={**os.environ, "PYTHONPATH": str(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )

    def begin(self, name: str, seconds: float, turn: int) -> None:
        """Have it compute."""
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"name": name, "seconds": seconds, "turn": turn}) + "\n"
        )
        self.process.stdin.flush()

    def end(self) -> float:
        """Milliseconds a step."""
        assert self.process.stdout is not None
        return float(json.loads(self.process.stdout.readline())["ms"])

    def measure(self, name: str, seconds: float, turn: int) -> float:
        """Both."""
        self.begin(name, seconds, turn)
        return self.end()


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A busy process for each core."""
    count = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    neighbours = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count or 1)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for each in neighbours:
            each.kill()
            each.wait()


@contextlib.contextmanager
def quota_of(engines: list[Engine], cores: float) -> Iterator[None]:
    """A control group of some cores for each engine; `OSError` where none can be made."""
    folders = [QUOTA.with_name(f"company-{engine.process.pid}") for engine in engines]
    try:
        for folder, engine in zip(folders, engines, strict=True):
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US), "utf-8")
            (folder / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * cores)), "utf-8")
            (folder / "cgroup.procs").write_text(str(engine.process.pid), "utf-8")
        yield
    finally:
        for folder, engine in zip(folders, engines, strict=True):
            if folder.exists():
                (QUOTA.parent / "cgroup.procs").write_text(str(engine.process.pid), "utf-8")
                folder.rmdir()


def show(company: str, name: str, found: dict[str, list[float]]) -> None:
    """A line of medians, with each engine's ratio to the first one, turn by turn."""
    first = next(iter(found.values()))
    cells = []
    for label, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(first, times, strict=True))
        cells.append(f"{label} {statistics.median(times):.2f} ms (×{ratio:.2f})")
    load = os.getloadavg()[0]
    print(f"{company:8} {name:10} load {load:.1f}: " + "; ".join(cells), flush=True)


def in_turns(company: str, engines: list[Engine], options: argparse.Namespace) -> None:
    """Measure engines one after the other, several times."""
    for name in options.workloads.split(","):
        found: dict[str, list[float]] = {engine.label: [] for engine in engines}
        for turn in range(options.turns):
            for engine in engines if turn % 2 else reversed(engines):
                found[engine.label].append(engine.measure(name, options.seconds, turn))
        show(company, name, found)


def in_pairs(engine: Engine, other: Engine, options: argparse.Namespace) -> None:
    """Steps of two engines at the same time, together, as a share of those of one alone."""
    for name in options.workloads.split(","):
        shares = []
        for turn in range(options.turns):
            alone = engine.measure(name, options.seconds, turn)
            for each in (engine, other):
                each.begin(name, options.seconds, turn)
            shares.append(alone * (1 / engine.end() + 1 / other.end()))
        shown = ", ".join(f"{share:.2f}" for share in sorted(shares))
        median = statistics.median(shares)
        print(f"pair     {name:10} {engine.label}: ×{median:.2f} of one ({shown})", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="shipped", help="shipped, a GGUF file or a folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--other", type=Path, help="the folder `src` of another version")
    parser.add_argument("--company", default="idle,busy,pair,quota")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.dtype, options.threads)
    engines = [Engine("this", SOURCE, options, count) for count in (1, options.threads)]
    if options.other:
        engines.append(Engine("other", options.other, options, options.threads))
    try:
        for engine in engines:  # ready, and warm
            for name in options.workloads.split(","):
                engine.begin(name, 0.1, 99)
                engine.end()
        wanted = options.company.split(",")
        if "idle" in wanted:
            in_turns("idle", engines, options)
        if "busy" in wanted:
            with busy_cores():
                in_turns("busy", engines, options)
        if "pair" in wanted:
            engines.append(Engine("this", SOURCE, options, options.threads))
            in_pairs(engines[1], engines[-1], options)
        if "quota" in wanted:
            try:
                in_turns("idle", engines[1:2], options)
                with quota_of(engines[1:2], 1.5):
                    in_turns("quota", engines[1:2], options)
            except OSError as error:
                print(f"quota    no control group can be made here: {error}")
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.wait()


if __name__ == "__main__":
    main()
