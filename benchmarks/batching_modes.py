"""One request, mixed requests and arrivals in each batching mode, on the shape of a real model.

`python benchmarks/batching_modes.py llama-3.2-1b` writes results/batching-llama-3.2-1b.json, from
which performance.py makes a table and a plot. The weights are random (`shapes.py`), so nothing is
downloaded. Arrivals, lengths and tokens are the same in each mode. `--modes` and `--workloads`
measure a part and leave the rest of the file as it is. published.py does the same with real
weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
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
SEATS = 8
WORKLOADS: dict[str, dict[str, Any]] = {
    "single": {},
    "mixed": {"num_requests": 6},
    "continuous_batching": {"num_requests": 12, "rate": 0.25},
}
"""The workloads of `infer bench`, with so few requests that two cores need less than eight minutes
for all of them in all modes, with a model of a billion weights."""
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
            options = BenchOptions(workload=name, warmup=0 if number else 1, **sizes)
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
    same mode and workload; returns the document. `config`: all settings but the mode."""
    document: dict[str, Any] = {"format": 1, "runs": []}
    if file.exists():
        document = json.loads(file.read_text(encoding="utf-8"))
    settings = {
        key: value for key, value in dataclasses.asdict(config).items() if value is not None
    }
    document |= {"model": name, "engine": {**settings, "model": name, "batching_mode": "each"}}
    for mode in modes:
        each = EngineConfig.from_kwargs(**{**dataclasses.asdict(config), "batching_mode": mode})
        runs = asyncio.run(measured(each, WORKLOADS if workloads is None else workloads))
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
    """The engine that all modes have: 8 seats and no prefix cache, which no prompt here needs."""
    return EngineConfig.from_kwargs(
        model=model,
        dtype=dtype,
        max_batch_size=SEATS,
        max_seq_len=2048,
        enable_prefix_caching=False,
        seed=0,
        **settings,
    )


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", default="int8", help="default: int8")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="default: results/batching-SHAPE.json")
    arguments = parser.parse_args()
    shape = arguments.shape
    file = arguments.json or RESULTS / f"batching-{shape}.json"
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder) / shape, shape)
        config = engine_config(str(Path(folder) / shape), arguments.dtype, load_format="dummy")
        workloads = {name: WORKLOADS[name] for name in arguments.workloads}
        document = record(shape, config, file, modes=arguments.modes, workloads=workloads)
    if wrong := differing(document):
        raise SystemExit(f"the answers differ between the modes: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
