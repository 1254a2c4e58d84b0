"""What a number format costs is said wherever one is chosen, from one table."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from infer.cli.main import app
from infer.config import EngineConfig, Quantization
from infer.engine.build import diagnosis
from infer.engine.build.assemble import assemble
from infer.engine.build.exactness import FORMATS, MODELS, cost_of, table, trade_of
from infer.engine.build.planner import plan_for
from infer.kernels.native import quantization_obstacle
from tests.support.command_line import CliRunner

ROOT = Path(__file__).parents[2]
QUANTIZED = get_args(Quantization)
DTYPES = get_args(get_type_hints(EngineConfig)["dtype"])
needs_int8 = pytest.mark.skipif(quantization_obstacle("int4") is not None, reason="no int8 here")


def test_each_format_has_a_row() -> None:
    """A new dtype or quantisation is measured before it is offered."""
    names = [each.name for each in FORMATS]
    assert {*QUANTIZED, *DTYPES} - {"auto", "float16"} <= set(names)
    assert set(QUANTIZED) == {name for name in names if trade_of(name)}
    assert set(QUANTIZED) == {name for name in names if cost_of(name)}
    truth = FORMATS[0].perplexities
    for each in FORMATS:
        assert 1 <= len(each.perplexities) <= len(MODELS)
        for value, exact, rise in zip(each.perplexities, truth, each.rises, strict=False):
            assert value / exact - 1 == pytest.approx(rise, abs=0.006)
        if not each.rises:
            assert all(v / e < 1.01 for v, e in zip(each.perplexities, truth, strict=True))
    assert cost_of("int8") == "perplexity +0.09 % (SmolLM2-135M), +0.16 % (Gemma 3 270M)"
    assert cost_of("int4") == "perplexity +0.18 % (SmolLM2-135M), +18 % (Gemma 3 270M)"
    assert cost_of("bfloat16") == trade_of("bfloat16") == trade_of("unheard of") == ""


@needs_int8
@pytest.mark.parametrize("weight_format", QUANTIZED)
def test_a_plan_and_a_start_say_it(weight_format: str, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[dict[str, str]] = [{"quantization": weight_format}]
    asked += [{"dtype": weight_format}] * (weight_format in DTYPES)
    for settings in asked:
        plan = plan_for(EngineConfig(device="cpu", **settings))  # type: ignore[arg-type]
        assert dict(plan.rows())["exactness"] == trade_of(weight_format)
        assert plan.as_dict()["exactness"] == cost_of(weight_format)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assemble(EngineConfig(device="cpu", **settings))  # type: ignore[arg-type]
        line = f"weights in {weight_format}: {trade_of(weight_format)}"
        assert line in [record.getMessage() for record in caplog.records]
    shown = CliRunner().invoke(app, ["plan", "--device", "cpu", "--dtype", weight_format, "--json"])
    assert json.loads(shown.output)["exactness"] == cost_of(weight_format)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_costs_nothing_is_not_spoken_of(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(device="cpu", dtype=dtype)  # type: ignore[arg-type]
    assert "exactness" not in dict(plan_for(config).rows())
    with caplog.at_level(logging.INFO):
        assemble(config)
    assert "perplexity" not in caplog.text


def test_a_diagnosis_says_it_with_its_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "quantization_obstacle", lambda _: None)
    for obstacle, formats in ((None, QUANTIZED), ("slow", ("int8",))):
        monkeypatch.setattr(diagnosis, "bfloat16_obstacle", lambda reason=obstacle: reason)
        lines = {line.subject: line for line in diagnosis.diagnose(EngineConfig(device="cpu"))}
        for weight_format in formats:
            assert f"--dtype {weight_format}): {trade_of(weight_format)}" in lines["dtype"].advice
    monkeypatch.setattr(diagnosis, "quantization_obstacle", lambda _: "no oneDNN")
    lines = {line.subject: line for line in diagnosis.diagnose(EngineConfig(device="cpu"))}
    assert lines["dtype"].advice == ""
    reasons = {"int8": None, "int4": "no kernels"}
    monkeypatch.setattr(diagnosis, "quantization_obstacle", reasons.get)
    lines = {line.subject: line for line in diagnosis.diagnose(EngineConfig(device="cpu"))}
    assert "int8 is possible, int4 is not: no kernels" in lines["dtype"].state
    assert "int8" in lines["dtype"].advice
    assert "int4" not in lines["dtype"].advice


def test_the_documents_say_it() -> None:
    page = (ROOT / "docs/performance.md").read_text("utf-8")
    assert table() in page
    chart = (ROOT / "README.md").read_text("utf-8").partition("docs/performance/peers.png")[2]
    assert "docs/performance.md#what-int8-and-int4-cost" in chart[:300]
