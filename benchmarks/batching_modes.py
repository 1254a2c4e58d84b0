"""One request, mixed requests and arrivals in each batching mode, on the shape of a real model.

`python benchmarks/batching_modes.py llama-3.2-1b` writes results/batching-llama-3.2-1b.json, from
which performance.py makes lines of a table and a plot. The weights are random (`shapes.py`), so
nothing is downloaded. `--model MODEL` measures real weights under a shape's name instead. Arrivals,
lengths and tokens are the same in each mode. `--modes` and `--workloads` measure a part and leave
the rest of the file as it is. published.py also compares texts with those of transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_config

from infer.bench.drive import Piece, Prompt
from infer.bench.engine import EngineTarget, engine_target
from infer.bench.measure import BenchOptions, measure
from infer.bench.workloads import Planned
from infer.config import EngineConfig

MODES = ("sequential", "static", "continuous")
WORKLOADS: dict[str, dict[str, Any]] = {"single": {}, "mixed": {}, "continuous_batching": {}}
"""The workloads of `infer bench` as they are defined: one request, 16 at once, and 32 of which four
come each second."""
SEATS = {"single": 8, "mixed": 8, "continuous_batching": 32}
"""`max_batch_size` for each: half of what comes at once, and all of what comes one by one."""
LONGEST_S = 4 * 3600
"""Time for an answer in seconds; one by one, the last of 32 waits for all others."""
RESULTS = Path(__file__).parent / "results"
LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")


class AnswerRecorder:
    """A target that passes everything on to an engine and keeps the token ids of the answers."""

    def __init__(self, target: EngineTarget) -> None:
        self._target = target
        self._answers: dict[Prompt, list[Any]] = {}

    def prompt(self, planned: Prompt) -> Prompt:
        return self._target.prompt(planned)

    async def send(
        self, prompt: Prompt, output_len: int, temperature: float = 0.0
    ) -> AsyncGenerator[Piece, None]:
        answer = self._answers[prompt] = []
        async with contextlib.aclosing(self._target.send(prompt, output_len)) as pieces:
            async for piece in pieces:
                answer.extend(piece.answer)
                yield piece

    def digest(self, plan: Sequence[Planned]) -> str:
        """A hash of the answers to the requests of a plan; equal where all answers are."""
        answers = [self._answers[self.prompt(planned.prompt)] for planned in plan]
        return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


async def measured(
    config: EngineConfig, workloads: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The results of the workloads, one after the other, with one engine."""
    runs = []
    async with engine_target(config, ignore_eos=True) as target:
        for number, (name, sizes) in enumerate(workloads.items()):
            warmup = 0 if number else 1
            options = BenchOptions(workload=name, warmup=warmup, timeout_s=LONGEST_S, **sizes)
            recorder = AnswerRecorder(target)
            document = await measure(
                options,
                recorder,
                {"model": target.llm.model_name},
                vocab_size=target.llm.vocab_size,
                stats=target.stats,
            )
            (run,) = document["runs"]
            for row in run["requests"]:
                first_s, *_ = row.pop("token_s")
                row["ttft_s"] = round(first_s - row["arrival_s"], 5)
            runs.append(
                {
                    "workload": name,
                    "mode": config.batching_mode,
                    "seats": config.max_batch_size,
                    "options": document["workload"],
                    "started": document["started"],
                    "versions": document["versions"],
                    "machine": document["machine"],
                    "answers_sha256": recorder.digest(options.plan(0, target.llm.vocab_size)),
                    **run,
                }
            )
            print(line_of(runs[-1]), flush=True)
    return runs


def line_of(run: Mapping[str, Any]) -> str:
    """The figures of a run, for a person who waits."""
    summary = run["summary"]
    cells = [f"{run['workload']:<20} {run['mode']:<11} {summary['output_tok_s']:8.1f} tok/s"]
    for key in LATENCIES:
        values = summary[key] or {}
        ranks = " / ".join(f"{values[rank]:,.0f}" for rank in ("p50", "p95", "p99") if values)
        cells.append(f"{key} {ranks}")
    return "  ".join(cells)


def record(
    name: str,
    config: EngineConfig,
    file: Path,
    *,
    modes: Sequence[str] = MODES,
    workloads: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Measure a model in each mode and put the runs into a file, in place of former runs of the
    same mode and workload; returns the document. `config`: all settings but mode and seats."""
    document: dict[str, Any] = {"format": 1, "runs": []}
    if file.exists():
        document = json.loads(file.read_text(encoding="utf-8"))
    settings = {
        key: value for key, value in dataclasses.asdict(config).items() if value is not None
    }
    document |= {"model": name, "engine": {**settings, "model": name, "batching_mode": "each"}}
    workloads = WORKLOADS if workloads is None else workloads
    for mode, seats in itertools.product(modes, sorted({SEATS[name] for name in workloads})):
        changed = {"batching_mode": mode, "max_batch_size": seats}
        each = EngineConfig.from_kwargs(**{**dataclasses.asdict(config), **changed})
        mine = {name: sizes for name, sizes in workloads.items() if SEATS[name] == seats}
        runs = asyncio.run(measured(each, mine))
        new = {(run["workload"], run["mode"]) for run in runs}
        old = [run for run in document["runs"] if (run["workload"], run["mode"]) not in new]
        document["runs"] = old + runs
        file.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return document


def differing(document: Mapping[str, Any]) -> list[str]:
    """The workloads whose answers were not the same tokens in all modes."""
    found: dict[str, set[str]] = {}
    for run in document["runs"]:
        found.setdefault(run["workload"], set()).add(run["answers_sha256"])
    return [name for name, digests in found.items() if len(digests) > 1]


def engine_config(model: str, dtype: str, **settings: Any) -> EngineConfig:
    """The engine that all modes have: without a prefix cache, which no prompt here needs."""
    return EngineConfig.from_kwargs(
        model=model,
        dtype=dtype,
        max_seq_len=2048,
        enable_prefix_caching=False,
        seed=0,
        **settings,
    )


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}; with --model any name")
    parser.add_argument("--model", help="real weights: what `infer serve --model` takes")
    parser.add_argument("--dtype", help="default: int8, and with --model auto")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="default: results/batching-SHAPE.json")
    arguments = parser.parse_args()
    shape = arguments.shape
    file = arguments.json or RESULTS / f"batching-{shape}.json"
    workloads = {name: WORKLOADS[name] for name in arguments.workloads}
    how: dict[str, Any] = {"modes": arguments.modes, "workloads": workloads}
    if arguments.model is not None:
        config = engine_config(arguments.model, arguments.dtype or "auto")
        document = record(shape, config, file, **how)
    elif shape not in SHAPES:
        parser.error(f"a shape must be one of {', '.join(SHAPES)}; real weights need --model")
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder) / shape, shape)
            model = str(Path(folder) / shape)
            config = engine_config(model, arguments.dtype or "int8", load_format="dummy")
            document = record(shape, config, file, **how)
    if wrong := differing(document):
        raise SystemExit(f"the answers differ between the modes: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
