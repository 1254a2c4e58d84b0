"""The time of decode steps outside of the kernels: `python benchmarks/overhead.py --steps`.

An engine's loop runs as in its process: with reports that are encoded and sent to another process.
Every 24 steps it changes between committing each step before the next one is scheduled and working
one step ahead, so both ways have the same company. The table has medians over such periods, for
several numbers of sequences: a step's time, the part of it in which no kernel computed, and the
ratio of the two ways. `runner.ahead_choice` says which of them an engine takes.
"""

from __future__ import annotations

import argparse
import gc
import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from infer.config import EngineConfig
from infer.engine.build.assemble import prepare
from infer.engine.commands import Command, Stop
from infer.engine.core import EngineCore
from infer.engine.loop import EngineLoop, freeze_heap
from infer.kernels import loader
from infer.replicas import messages
from infer.types import Request, SamplingParams, StepOutput

PERIOD = 24
"""Number of steps of a period."""
SETTLING = 6
"""Number of steps of a period that are not counted."""
COUNTS = (1, 32, 128)


class Clock:
    """The time that the kernels take, as their callers see it."""

    def __init__(self) -> None:
        """Count looking tokens up in packed weights, and drawing, of every engine."""
        self.spent_s = 0.0
        library: Any = loader.loaded()
        library.infer_linear_columns = self.timed(library.infer_linear_columns)
        library.infer_sample = self.timed(library.infer_sample)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted."""

        def counted(*args: Any) -> Any:
            began_s = time.perf_counter()
            result = call(*args)
            self.spent_s += time.perf_counter() - began_s
            return result

        return counted

    def watch(self, core: EngineCore) -> None:
        """Count the layers and the output head of an engine."""
        model: Any = core.runner.model  # type: ignore[attr-defined]
        for part in (model.stack, model.lm_head):
            part._apply = self.timed(part._apply)


def measure(options: argparse.Namespace, clock: Clock, num_sequences: int) -> str:
    """One row of the table."""
    settings = EngineConfig(
        model=options.model,
        max_batch_size=num_sequences,
        num_threads=options.threads,
        max_seq_len=512 if options.model is None else 2048,
    )
    core, _ = prepare(settings, num_fronts=1).build(lambda request_id: None)
    clock.watch(core)
    num_steps = PERIOD * (2 * options.periods + 2)
    marks: list[tuple[float, float]] = []
    runner: Any = core.runner
    runner.goes_ahead = lambda running: len(marks) // PERIOD % 2 == 1
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    ours, theirs = socket.socketpair()
    reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    theirs.close()
    channel = messages.Channel(ours)

    def report(outputs: list[StepOutput], step_events: Any) -> None:
        for part in messages.reports(outputs, core.stats(), step_events):
            channel.send(part)
        marks.append((time.perf_counter(), clock.spent_s))
        if len(marks) == num_steps:
            commands.put(Stop())

    for i in range(num_sequences):
        prompt = tuple((7 * i + j) % 300 + 5 for j in range(20))
        sampling = SamplingParams(temperature=options.temperature)
        core.add(Request(f"{i}", prompt, sampling, i, num_steps + 50))
    freeze_heap()
    EngineLoop(core, report, commands).run()
    gc.unfreeze()
    ours.close()
    reader.wait()
    return row(num_sequences, marks)


def row(num_sequences: int, marks: list[tuple[float, float]]) -> str:
    """A row from the times at which steps ended, and of the kernels until then."""
    steps: tuple[list[float], list[float]] = ([], [])
    outside: tuple[list[float], list[float]] = ([], [])
    for begin in range(2 * PERIOD, len(marks), PERIOD):
        (began_s, before_s), (ended_s, after_s) = marks[begin + SETTLING], marks[begin + PERIOD - 1]
        count, way = PERIOD - 1 - SETTLING, begin // PERIOD % 2
        steps[way].append((ended_s - began_s) / count)
        outside[way].append((ended_s - began_s - (after_s - before_s)) / count)
    ratio = statistics.median(b / a for a, b in zip(*steps, strict=True))
    cells = [
        f"{1e6 * statistics.median(part[way]):.0f}" for way in (0, 1) for part in (steps, outside)
    ]
    return f"| {num_sequences} | {' | '.join(cells)} | {ratio:.3f} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the table; `arguments`: None for those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: the model that ships")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--periods", type=int, default=7, help="of each way")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    options = parser.parse_args(arguments)
    sys.setswitchinterval(0.001)  # as an engine's process does
    gc.set_threshold(700, 2, 2)
    print("| sequences | step µs | outside µs | ahead: step µs | outside µs | ahead / not |")
    print("|---|---|---|---|---|---|")
    clock = Clock()
    for num_sequences in options.counts:
        print(measure(options, clock, num_sequences), flush=True)
