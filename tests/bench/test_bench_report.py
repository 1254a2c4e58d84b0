"""Reports are written from results; the floor is arithmetic; the machine is measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.bench import machine
from infer.bench.drive import Record
from infer.bench.gpu_rows import Peaks
from infer.bench.report import write_report
from infer.bench.results import environment, run_document, summarize
from infer.cli.bench import app
from infer.config import EngineConfig
from infer.engine.build.checkpoint import find_checkpoint
from infer.errors import ConfigError
from infer.kernels.native import bfloat16_obstacle
from tests.support.command_line import CliRunner

PNG = b"\x89PNG\r\n\x1a\n"


def write_result(file: Path, label: str, *, broken: bool = False) -> Path:
    groups, starts = ("first", "others", "others"), (0.0, 0.25, 0.5)
    records = [
        Record(group, at, at, [at + 0.1, at + 0.2, at + 0.4])
        for group, at in zip(groups, starts, strict=True)
    ]
    for record in records:
        record.end_s, record.output_tokens, record.prompt_tokens = record.token_s[-1], 3, 10
    if broken:
        records = [
            dataclasses.replace(record, error="connection", token_s=[]) for record in records
        ]
    summary = summarize(records, slo_ttft_ms=50)
    engine = ("num_steps", "mean_rows_per_step", "num_cached_tokens", "num_preemptions")
    summary["engine"] = dict.fromkeys(engine, 7)
    document = {
        "format": 1,
        "label": label,
        "target": {"mode": "offline", "model": "m", "prompts": "token ids"},
        "workload": {"name": "burst"},
        "started": "now",
        **environment(),
        "summary": summary,
        "median_run": 0,
        "runs": [run_document(summary, records)],
    }
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def test_a_report_of_several_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [
        write_result(tmp_path / "a.json", "one"),
        write_result(tmp_path / "b.json", "one"),
        write_result(tmp_path / "c.json", "broken", broken=True),
        write_result(tmp_path / "d.json", "old"),
    ]
    old = json.loads(files[-1].read_text(encoding="utf-8"))
    engine = old["summary"]["engine"]
    del engine["mean_rows_per_step"]
    engine["mean_batch_size"] = 8
    files[-1].write_text(json.dumps(old), encoding="utf-8")
    result = CliRunner().invoke(app, ["report", *map(str, files), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    for name in ("latency", "timeline", "throughput"):
        data = (tmp_path / "out" / f"{name}.png").read_bytes()
        assert data.startswith(PNG)
        assert len(data) > 5000
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| one | burst | 3 of 3 | 10.0 | 0% | 100.0 / 100.0 / 100.0 |" in page
    assert "| one (b) | burst |" in page
    assert "| broken | burst | 0 of 3 | 0.0 | 0% | — | — | — |" in page
    assert "| one | first | 100.0 / 100.0 / 100.0 |" in page
    assert "![timeline](timeline.png)" in page
    tables = [line.count("|") for line in page.splitlines() if line.startswith("| one |")]
    assert tables == [9, 6, 6, 19, 8]
    assert "| one | — | 7 | 7 | — | — |" in page  # what has no meaning is a dash
    assert "| old | — | 7 | 8 | — | — |" in page  # `mean_batch_size` was the rows of a step


@pytest.mark.parametrize("text", ["", "[]", '{"runs": []}', '{"format": 9}'])
def test_what_is_no_result_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.json is no result that `infer bench"):
        write_report([file], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install .*(bench|matplotlib)"):
        write_report([write_result(tmp_path / "a.json", "one")], tmp_path / "out")


def layer(width: int, height: int, count: int, us: float) -> dict[str, Any]:
    rows = [{"rows": 1, "us": 1.0}, {"rows": 512, "us": us}]
    return {"in": width, "out": height, "count": count, "bytes": 2 * width * height, "rows": rows}


def test_the_floor_by_hand() -> None:
    layers = [layer(1000, 2000, 10, 51.2), layer(1000, 50_000, 1, 9e9)]
    limits = machine.floor(layers, 14.0, (1000, 50_000))
    assert limits["bytes_per_token"] == 140e6
    assert limits["one_stream_tok_s"] == pytest.approx(100)
    assert limits["prefill_tok_s"] == pytest.approx(1e6)  # without the head: 1 µs a token


def test_the_layers_of_the_model_that_ships() -> None:
    import torch

    config = find_checkpoint(None, dummy=True).config
    shapes = machine.layer_shapes(config, torch.bfloat16)
    assert shapes == {
        (256, 512): 6, (256, 256): 6, (256, 1536): 6, (768, 256): 6, (256, 2048): 1
    }  # fmt: skip


def test_measuring_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "ROTATED_BYTES", 1 << 20)
    folder = Path(machine.__file__).parents[1] / "demo_model"
    result = CliRunner().invoke(app, ["machine", "--model", str(folder)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found["layers"]) == 5
    assert found["best_read_gb_s"] > 0
    assert found["floor"]["one_stream_tok_s"] > 0
    assert found["dtype"] == ("float32" if bfloat16_obstacle() else "bfloat16")
    assert "demo_model" in result.stderr


def test_a_dtype_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "ROTATED_BYTES", 1)
    monkeypatch.setattr(machine, "DEFAULT_SHAPES", {(64, 32): 1})
    found = machine.measure_machine(EngineConfig(dtype="float32", num_threads=1))
    assert (found["dtype"], found["threads"]) == ("float32", 1)
    assert "floor" not in found


def test_measuring_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own peaks and products, not the CPU's; here without a GPU, on tensors without memory."""
    import torch

    timed: list[int] = []

    def timed_us(work: Callable[[], None]) -> float:
        work()
        timed.append(1)
        return 200.0

    monkeypatch.setattr(machine, "choose_device", lambda config: torch.device("meta"))
    monkeypatch.setattr(machine, "measure_peaks", lambda device: Peaks(3.0, 3.25, 790.0))
    monkeypatch.setattr(machine, "timed_us", timed_us)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(machine, "read_rates", lambda: pytest.fail("the CPU's memory is measured"))
    folder = Path(machine.__file__).parents[1] / "demo_model"
    result = CliRunner().invoke(app, ["machine", "--model", str(folder)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["gpu"] == "NVIDIA H100"
    assert found["peaks"]["copy_tb_s"] == 3.0
    assert found["best_read_gb_s"] >= 3250
    assert len(timed) == 5 * len(machine.ROWS)
    assert found["layers"][0]["rows"][0]["us"] > 0
    assert "790" in result.stderr
    assert "NVIDIA H100" in result.stderr


def test_weights_in_int4_are_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(machine, "choose_device", lambda config: torch.device("meta"))
    with pytest.raises(ConfigError, match="device='cpu'"):
        machine.measure_machine(EngineConfig(dtype="int4"))
