"""The programs that record the batching modes, on small checkpoints."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import write_llama

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of `benchmarks/`, which finds the package where this process does."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    command = [sys.executable, str(ROOT / "benchmarks" / arguments[0]), *arguments[1:]]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, encoding="utf-8"
    )


@pytest.mark.slow
def test_published_checkpoints(tmp_path: Path) -> None:
    """One that transformers writes: equal greedy texts, and a run for each workload and mode."""
    write_llama(tmp_path / "small", max_position_embeddings=2048)
    done = run(
        *("published.py", str(tmp_path / "small"), "--quick", "--dtype", "float32"),
        *("--tokens", "8", "--json", str(tmp_path / "results")),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("small: equal: ") for line in lines) == 4
    document = json.loads(
        (tmp_path / "results" / "published-small.json").read_text(encoding="utf-8")
    )
    found = {(run["workload"], run["mode"]) for run in document["runs"]}
    assert len(found) == len(document["runs"]) == 9
    for each in document["runs"]:
        summary = each["summary"]
        assert summary["num_answered"] == summary["num_requests"] > 0
        assert set(summary["ttft_ms"]) >= {"p50", "p95", "p99"}
        assert all(request["ttft_s"] > 0 for request in each["requests"])
    assert sum(line.startswith("| small | mixed | ") for line in lines) == 3
    arrivals = [
        [request["arrival_s"] for request in each["requests"]]
        for each in document["runs"]
        if each["workload"] == "continuous_batching"
    ]
    assert arrivals == [[0.0, 0.25]] * 3


def test_the_shapes_are_those_of_the_real_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published numbers of weights, in billions; a tied head counts once."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from benchmarks import shapes

    counts = {
        name: round(sum(map(math.prod, shapes.tensor_shapes(raw).values())) / 1e9, 2)
        for name, raw in shapes.SHAPES.items()
    }
    assert counts == {
        "llama-3.2-1b": 1.24,
        "llama-3.2-3b": 3.21,
        "qwen3-0.6b": 0.60,
        "qwen3-1.7b": 1.72,
        "qwen3-4b": 4.02,
        "gemma-3-1b": 1.00,
        "gemma-3-4b": 3.88,
        "phi-4-mini": 3.84,
    }


def test_answers_that_differ_between_modes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from benchmarks.batching_modes import differing

    runs = [
        {"workload": name, "mode": mode, "answers_sha256": f"{name} {mode == odd}"}
        for name, odd in (("single", None), ("mixed", "static"))
        for mode in ("sequential", "static", "continuous")
    ]
    assert differing({"runs": runs}) == ["mixed"]


def test_texts_that_differ_are_wrong_but_for_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from benchmarks.published import Compared

    assert Compared("p", "a", "a", 0.0).is_right
    assert Compared("p", "a", "b", 1e-6).is_right
    assert not Compared("p", "a", "b", 0.5).is_right
    assert "not 'b'" in str(Compared("p", "a", "b", 0.5))
