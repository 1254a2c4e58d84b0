"""The programs of `benchmarks/`: all answer --help, and those without a server run on tiny sizes.

The pages that are made from recorded results are the ones that the results give.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from infer.kernels import loader
from infer.kernels.native import native_obstacle
from infer.models.hub import SHIPPED_FOLDER

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
NO_PROGRAMS = {"k_quants"}
PROGRAMS = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - NO_PROGRAMS)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 4096,
}
HEADS = (4, 2, 64)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": (
        "--rounds 1 --rotate-mb 1 --threads 1",
        {
            "DECODE": [(HEADS, 2, 20)],
            "PREFILL": [(HEADS, 1, 20)],
            "ROTATION": [(HEADS, 1, 20, 20)],
        },
    ),
    "cells": (
        "",
        {"NUM_SEQS": 2, "NUM_STEPS": 2, "NUM_ROUNDS": 1, "PROMPTS": [[1, 2, 3], [4, 5, 6]]},
    ),
    "floor": (
        f"--model {SHIPPED_FOLDER} --rounds 1 --input-len 32 --dtypes int8",
        {"READ_BYTES": 1 << 20},
    ),
    "linear": ("1 2 --shapes 256x256 --rounds 1 --rotate-mb 1", {}),
    "overhead": ("--follow", {"STEPS": 10}),
    "overhead_runner": ("--rounds 1 --threads 1", {"COUNTS": (1, 2), "CONTEXTS": (32,)}),
    "quality": ("--tokens 60 --formats int8", {}),
    "sampling": ("--rounds 1 --threads 1", {"VOCABULARIES": (512,), "ROWS": (1, 2)}),
    "speculation": ("", {"NUM_TOKENS": 8, "NUM_PAIRS": 1}),
}
"""Program → its arguments, and constants of it with smaller values."""
NEED_KERNELS = {
    "attention": loader.available(),
    "floor": native_obstacle(),
    "linear": native_obstacle(),
    "overhead_runner": loader.available(),
    "quality": native_obstacle(),
}

Load = Callable[..., ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a program and gives it arguments and other values of its constants."""
    num_threads = torch.get_num_threads()

    def load(name: str, *arguments: object, **constants: Any) -> ModuleType:
        monkeypatch.syspath_prepend(BENCHMARKS)
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        return module

    yield load
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(name, "--help").main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")


@pytest.mark.parametrize("name", TINY)
def test_tiny_sizes(name: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := NEED_KERNELS.get(name):
        pytest.skip(reason)
    arguments, constants = TINY[name]
    load(name, *arguments.split(), **constants).main()
    shown = capsys.readouterr().out
    assert any(character.isdigit() for character in shown)
    assert "nan" not in shown


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
def test_quality_of_a_gguf_file(load: Load, tmp_path: Path) -> None:
    """The coarser the type to which the numbers are rounded anew, the larger the deviation."""
    from gguf import GGMLQuantizationType as Q

    from tests.support.checkpoints import make_model
    from tests.support.gguf_files import write

    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    write(tmp_path / "m.gguf", "llama", make_model("llama", **shape), Q.Q8_0, chat=False)
    (tmp_path / "text").write_text("Two engines read one text. " * 4, encoding="utf-8")
    program = load("quality", tmp_path / "m.gguf", "--tokens", 60, "--window", 25, "--text",
                   tmp_path / "text", "--formats", "f32,blocks,q8_0,q4_k,q4_0", "--json",
                   tmp_path / "rows.json")  # fmt: skip
    program.main()
    rows = {
        row["format"]: row
        for row in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    }
    assert rows["float32"]["error"] == rows["f32"]["error"] == 0
    assert rows["blocks"]["error"] == rows["q8_0"]["error"], "rounding Q8_0 to Q8_0 changes nothing"
    assert 0 < rows["q8_0"]["error"] < rows["q4_k"]["error"]
    assert rows["q8_0"]["error"] < rows["q4_0"]["error"]
    assert rows["q8_0"]["num_bytes"] > rows["q4_k"]["num_bytes"]


def test_overhead_of_the_runner_for_gpus(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    load("overhead", "--ahead", STEPS=10, AHEAD_COUNTS=(1, 3)).main()
    assert capsys.readouterr().out.count("\n") == 4


def test_draft_model(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"WIDTH": 64, "INNER": 64, "HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 32}
    sizes |= {"VOCAB": 4096, "LAYERS": 4, "NUM_TOKENS": 8, "NUM_PAIRS": 1}
    module = load("draft_model", "write", tmp_path, **sizes)
    load("draft_model", "write", tmp_path, CONFIG=module.CONFIG | SMALL).main()
    load("draft_model", tmp_path, *([] if native_obstacle() else ["int8"])).main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["streams"] for line in lines] == [1, 32]
    assert all(line["plain"] > 0 < line["draft model"] for line in lines)


def test_a_checkpoint_of_a_shape(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infer.engine.build.checkpoint import find_checkpoint

    shapes = load("shapes", "qwen3-0.6b", tmp_path)
    monkeypatch.setitem(shapes.SHAPES, "qwen3-0.6b", shapes.SHAPES["qwen3-0.6b"] | SMALL)
    shapes.main()
    assert find_checkpoint(str(tmp_path)).config.num_layers == SMALL["num_hidden_layers"]


def test_modes(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    from infer.bench.comparison import mixed

    prompts, params = mixed(3)
    lengths = zip(params, (4, 16, 16), strict=True)
    short = [dataclasses.replace(each, max_tokens=most) for each, most in lengths]
    load("modes", mixed=lambda: (prompts, short), NUM_REQUESTS=3).main()
    shown = capsys.readouterr().out
    assert shown.count("\n| ") == 4
    assert "greedy tokens of all 3 requests equal in the four ways: True" in shown


def test_the_page_of_gpus_is_made_from_the_results(load: Load, tmp_path: Path) -> None:
    load("gpu", PAGE=tmp_path / "gpu.md").main()
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == (ROOT / "docs/gpu.md").read_text(
        encoding="utf-8"
    )


def test_the_page_of_performance_is_made_from_the_results(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plots are not drawn here."""
    module = load("performance", PAGE=tmp_path / "performance.md", PLOTS=tmp_path)
    for plot in ("plot_peers", "plot_batching"):
        monkeypatch.setattr(module, plot, lambda *given: None)
    monkeypatch.setattr(module, "write_report", lambda *given: [])
    module.main()
    assert (tmp_path / "performance.md").read_text(encoding="utf-8") == (
        ROOT / "docs/performance.md"
    ).read_text(encoding="utf-8")


def test_numbers_of_cores_that_are_not_here_are_not_measured(load: Load) -> None:
    cores = load("cores")
    assert cores.counts_of(6) == ([1, 2, 4, 6], [8, 16, 32, 48, 64])
    assert cores.counts_of(2, [2, 1, 128]) == ([1, 2], [128])
    rounds = [
        {"1": {"8": {"ours": rate, "llamacpp": None}}, "2": {"8": {"ours": 15.0, "llamacpp": 4.0}}}
        for rate in (9.0, 10.0, 100.0)
    ]
    document = {"counts": [1, 2], "not_measured": [4], "loads": {"8": ()}, "rounds": rounds}
    assert cores.table(document).splitlines()[2:] == [
        "| 1 | ours | 10.0 (100%) |",
        "| 1 | llamacpp | not measured |",
        "| 2 | ours | 15.0 (75%) |",
        "| 2 | llamacpp | 4.0 |",
        "| 4 | ours | not measured |",
        "| 4 | llamacpp | not measured |",
    ]
