"""Recordings of an engine's steps, and the comparison of the batching modes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer import LLM
from infer.bench.comparison import MODES, mixed, recorded
from infer.cli.main import app as command
from tests.support.command_line import CliRunner

SEATS = 3


def steps_of(recording: dict[str, Any]) -> int:
    return sum(sum(frame["steps"]["count"]) for frame in recording["frames"] if "steps" in frame)


@pytest.mark.slow
def test_a_recording_has_the_steps_of_generate() -> None:
    """The counts that `benchmarks/modes.py` takes, on fewer requests."""
    requests = mixed(5)
    steps = {}
    for mode in MODES:
        recording = recorded(mode, requests, SEATS, lambda: None)
        with LLM(dtype="float32", batching_mode=mode, max_batch_size=SEATS) as llm:
            llm.generate("warm up")
            before = llm.stats()["num_steps"]
            llm.generate(*requests, use_tqdm=False)
            steps[mode] = llm.stats()["num_steps"] - before
        summary = recording["summary"]
        assert recording["format"] == "infer-recording"
        assert recording["hello"]["mode"] == mode
        assert recording["hello"]["seats"] == (1 if mode == "sequential" else SEATS)
        assert summary["steps"] == steps[mode] == steps_of(recording)
        events = [event for frame in recording["frames"] for event in frame.get("events", [])]
        names = {event["name"] for event in events if event["event"] == "queued"}
        assert names == {f"request-{i}" for i in range(1, 6)}
        assert sum(event["event"] == "finished" for event in events) == 5
        tokens = [frame.get("tokens", {}) for frame in recording["frames"]]
        assert sum(sum(each.values()) for each in tokens) == summary["sampled_tokens"]
        assert (summary["padding"] is None) == (mode != "static")
        assert summary["first_token_p99_ms"] > 0
    assert steps["sequential"] > steps["static"] > steps["continuous"]


def test_bench_offline_records(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    arguments = ["bench", "offline", "--workload", "single", "--output-len", "8"]
    arguments += ["--warmup", "0", "--record", str(file)]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    recording = json.loads(file.read_text(encoding="utf-8"))
    assert recording["hello"]["model"] == "infer-demo"
    assert steps_of(recording) == recording["summary"]["engine"]["num_steps"] >= 8


def test_a_file_that_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    from infer.errors import ConfigError

    arguments = ["bench", "offline", "--record", str(tmp_path / "nowhere" / "x.json")]
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, ConfigError)
    assert "cannot be written" in str(done.exception)


@pytest.mark.slow
def test_the_whole_comparison_has_the_steps_of_the_page() -> None:
    """Those of the table in docs/architecture.md, which `benchmarks/modes.py` prints."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    of_page = {row[1].split()[0]: row[2].strip().replace(",", "") for row in rows if len(row) > 7}
    for mode, way in zip(MODES, ("cache", "static", "continuous"), strict=True):
        recording = recorded(mode, mixed(), 8, lambda: None)
        assert str(recording["summary"]["steps"]) == of_page[way]
