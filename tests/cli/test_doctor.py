"""`infer doctor` on this machine, and on others that files describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer.cli.main import app
from infer.config import EngineConfig
from infer.engine.build import diagnosis
from infer.engine.build.diagnosis import diagnose
from infer.errors import ConfigError
from infer.kernels import loader, native
from tests.support.command_line import CliRunner

SUBJECTS = [
    *("infer", "processor", "cores", "memory", "GPU"),
    *("kernels", "linear layers", "dtype", "KV cache", "threads", "other processes"),
]


def test_a_line_for_each_subject() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert all(subject in shown.output for subject in SUBJECTS)
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json"]).output)
    assert [line["subject"] for line in as_json] == SUBJECTS


def found(root: Path, subject: str) -> tuple[str, str]:
    lines = {line.subject: line for line in diagnose(EngineConfig(device="cpu"), root)}
    return lines[subject].state, lines[subject].advice


def test_what_other_machines_have(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "model name\t: A laptop\nflags\t\t: fpu avx2 fma avx_vnni\n\nmodel name\t: A laptop\n",
        encoding="utf-8",
    )
    assert found(tmp_path, "processor")[0] == "A laptop: avx2 fma avx_vnni"
    (tmp_path / "proc/cpuinfo").write_text(
        "processor : 0\nFeatures : fp asimd i8mm\n", encoding="utf-8"
    )
    assert found(tmp_path, "processor")[0].endswith(": asimd i8mm")
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    pages.parent.mkdir(parents=True)
    pages.write_text("always madvise [never]\n", encoding="utf-8")
    assert found(tmp_path, "memory")[1].startswith("huge pages: ")
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.write_text("1", encoding="utf-8")
    assert found(tmp_path, "GPU") == (
        "one is there, but this torch cannot use it",
        "torch with CUDA",
    )
    group = tmp_path / "sys/fs/cgroup/cpu.max"
    group.parent.mkdir(parents=True)
    group.write_text("50000 100000", encoding="utf-8")
    state, _ = found(tmp_path, "threads")
    assert state.startswith("1")
    assert found(tmp_path, "other processes")[0].startswith("the system does not say")
    pressure = tmp_path / "proc/pressure/cpu"
    pressure.parent.mkdir()
    for percent, advice in (("3.20", ""), ("61.70", "cores that others do not need")):
        line = f"some avg10=96.95 avg60={percent} avg300=51.54 total=8114125227\n"
        pressure.write_text(line + "full avg10=0.00 avg60=0.00\n", encoding="utf-8")
        state, advised = found(tmp_path, "other processes")
        assert f"{float(percent):.0f} % of the last minute" in state
        assert advised.startswith(advice)
        assert bool(advised) == bool(advice)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available", lambda: "no compiler")
    monkeypatch.setattr(diagnosis, "native_obstacle", lambda: "no compiler")
    monkeypatch.setattr(diagnosis, "bfloat16_obstacle", lambda: "no arithmetic")
    monkeypatch.setattr(diagnosis, "quantization_obstacle", lambda _: "no oneDNN")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    root = Path("/")
    assert found(root, "kernels") == ("torch's own: no compiler", "the package's native kernels")
    assert found(root, "linear layers")[0] == "torch's: no compiler"
    assert found(root, "dtype")[0].startswith("float32, as bfloat16 is slower here: no arithmetic")
    assert found(root, "threads")[0] == "7, as OMP_NUM_THREADS says"


def test_an_instruction_set_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(loader.library(), str):
        pytest.skip("no kernels were compiled")
    monkeypatch.setenv("INFER_ISA", "neon" if "amx" in loader.instruction_sets() else "amx")
    with pytest.raises(ConfigError, match=r"INFER_ISA=.* does not run here; use "):
        diagnosis.check_instruction_set()
    monkeypatch.delenv("INFER_ISA")
    monkeypatch.setenv(native.VARIABLE, "no")
    with pytest.raises(ConfigError, match="use onednn or one of amx, "):
        diagnosis.check_instruction_set()
