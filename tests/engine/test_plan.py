"""`infer plan`: exact sizes of weights, known budgets, and early refusals that show the table."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, EngineConfig
from infer.cli.main import app, main
from infer.engine.build import hardware
from infer.engine.build.memory_plan import make_plan, useful_pages
from infer.engine.build.planner import plan_for
from infer.errors import ConfigError
from infer.kernels import loader, native
from infer.kernels.linear import onednn
from infer.kernels.loader import int8_cache_obstacle
from infer.models.registry import parse_model_config, read_model_config
from tests.support import gguf_files
from tests.support.checkpoints import make_model, write_checkpoint
from tests.support.command_line import CliRunner
from tests.support.model_shapes import SHAPES

LLAMA_3B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_4B = {
    **LLAMA_3B,
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
GEMMA3_1B = {
    **LLAMA_3B,
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
}


@pytest.mark.parametrize(
    ("raw", "kv_gib", "parameters"),
    [(LLAMA_3B, 3.5, 3.213e9), (QWEN3_4B, 4.5, 4.022e9), (GEMMA3_1B, 0.8125, 0.9999e9)],
)
def test_the_budgets_of_real_models(raw: dict[str, Any], kv_gib: float, parameters: float) -> None:
    """The KV cache of 8 sequences of 4,096 tokens in bfloat16, and the number of parameters."""
    model = parse_model_config(raw, "test")
    config = EngineConfig(max_seq_len=4096, max_batch_size=8, device="cpu", dtype="bfloat16")
    plan = make_plan(config, model, "test", free=64 * 2**30)
    assert plan.kv_bytes_per_token * 8 * 4096 / 2**30 == pytest.approx(kv_gib, rel=1e-3)
    assert plan.num_parameters == pytest.approx(parameters, rel=1e-3)
    assert plan.dtype == "bfloat16"
    assert plan.fits
    assert plan.sequences_that_fit()[4096] >= 8


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """A checkpoint of each family, and the number of its parameters that are not for images."""
    root = tmp_path_factory.mktemp("families")
    images = ("visual.", "vision_tower.", "multi_modal_projector.")
    found = {}
    for family in SHAPES:
        parts = write_checkpoint(root / family, family).named_parameters()
        counted = [part.numel() for name, part in parts if not any(each in name for each in images)]
        found[family] = root / family, sum(counted)
    return found


@pytest.mark.parametrize("family", SHAPES)
def test_parameters_are_counted_exactly(family: str, written: dict[str, tuple[Path, int]]) -> None:
    folder, num_parameters = written[family]
    plan = plan_for(EngineConfig(model=str(folder), device="cpu"))
    assert plan.num_parameters == num_parameters


IMPORTS = """
import sys
import infer.replicas.child, infer.engine.build.assemble
# The start of an engine's process would wait for templates, tool calls and façades.
names = {"jinja2", "infer.text.tokenizer", "infer.engine.client.async_llm", "starlette"}
assert not names & sys.modules.keys(), names & sys.modules.keys()
# Torch's compiler takes as long as all the rest of a start, and 130 MB.
from pathlib import Path
from infer import LLM, EngineConfig, SamplingParams
from infer.engine.build.planner import plan_for
for folder in Path(sys.argv[1]).iterdir():
    plan_for(EngineConfig(model=str(folder), device="cpu"))
    assert "torch._dynamo" not in sys.modules, folder
with LLM(device="cpu") as llm:
    drawn = SamplingParams(max_tokens=4, presence_penalty=0.5, logprobs=2, prompt_logprobs=1)
    llm.generate(["Once upon", "a"], drawn)
assert "torch._dynamo" not in sys.modules, "a step"
"""


def test_a_start_imports_no_text_side_and_no_compiler(
    written: dict[str, tuple[Path, int]],
) -> None:
    root = written["llama"][0].parent
    subprocess.run([sys.executable, "-c", IMPORTS, str(root)], check=True)


PLANS = """
import json, runpy, sys
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["infer", "plan", *arguments, "--device", "cpu"]
    try:
        runpy.run_module("infer", run_name="__main__")
    except SystemExit as end:
        assert not end.code, (name, end.code)
    print(name, {"torch", "transformers", "gguf"} & {*sys.modules})
"""


def test_a_plan_imports_no_torch(tmp_path: Path) -> None:
    """It needs a second, the plan a third of one. A GPU is asked about with torch only."""
    if reason := native.native_obstacle():
        pytest.skip(f"torch says how fast its products are: {reason}")
    folder, file = str(tmp_path / "folder"), str(tmp_path / "m.gguf")
    write_checkpoint(tmp_path / "folder")
    gguf_files.write(tmp_path / "m.gguf", "llama", make_model("llama"))
    plans = {"folder": [folder], "GGUF": [file], "int8": [folder, "--dtype", "int8"], "demo": []}
    command = [sys.executable, "-c", PLANS, json.dumps(plans)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout.count("verdict") == len(plans)
    assert [line for line in done.stdout.splitlines() if line.split(" ")[0] in plans] == [
        f"{name} set()" for name in plans
    ]


def test_what_does_not_fit_is_refused_early_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infer.engine.build import memory_plan as planning

    write_checkpoint(tmp_path)
    model = read_model_config(tmp_path)
    for free, advice in ((50_000, "leave no room"), (2_500_000, "lower max_seq_len")):
        plan = make_plan(EngineConfig(max_seq_len=1024), model, "m", free=free)
        assert not plan.fits
        assert advice in plan.advice
        monkeypatch.setattr(planning, "free_bytes", lambda device, share, free=free: free)
        with pytest.raises(ConfigError) as caught:
            LLM(str(tmp_path), max_seq_len=1024)
        assert "does not fit" in str(caught.value)
        assert "KV cache a token" in str(caught.value)


def test_the_plan_is_what_is_built(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    settings: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 100, "page_size": 8}
    plan = plan_for(EngineConfig(model=str(tmp_path), **settings))
    with LLM(str(tmp_path), **settings) as llm:
        assert llm.stats()["num_pages"] == plan.num_pages
    assert plan.sequences_that_fit() == {100: plan.num_pages // 13}


def test_the_plan_says_which_factors_longrope_has(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "phi3", **SHAPES["phi3"]["longrope, long"])
    for length, wanted in ((2, "short factors"), (64, "long factors")):
        plan = plan_for(EngineConfig(model=str(tmp_path), max_seq_len=length))
        said = dict(plan.rows())["positions"]
        assert wanted in said
        assert f"a context of {length} tokens" in said
    write_checkpoint(tmp_path / "plain", "phi3")
    plain = plan_for(EngineConfig(model=str(tmp_path / "plain")))
    assert "positions" not in dict(plain.rows())


@pytest.mark.parametrize("seats", [1, 3, 32])
@pytest.mark.parametrize("length", [1, 100, 4096])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_the_default_cache_is_never_larger_than_its_seats_can_use(
    seats: int, length: int, page_size: int
) -> None:
    model = parse_model_config(LLAMA_3B, "test")
    settings: dict[str, Any] = {"max_batch_size": seats, "max_seq_len": length, "device": "cpu"}
    plan = make_plan(EngineConfig(**settings, page_size=page_size), model, "test", free=1 << 40)
    assert (
        plan.num_pages == seats * -(-length // page_size) == useful_pages(seats, length, page_size)
    )
    # Who names a size gets it.
    config = EngineConfig(**settings, page_size=page_size, kv_cache_pages=7 * plan.num_pages)
    assert make_plan(config, model, "test", free=1 << 40).num_pages == 7 * plan.num_pages


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path)
    runner = CliRunner()
    table = runner.invoke(app, ["plan", str(tmp_path), "--max-batch-size", "3"])
    assert table.exit_code == 0
    for word in ("weights", "KV cache", "activations", "seats: 3", "fits"):
        assert word in table.stdout
    result = runner.invoke(app, ["plan", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["fits"] is True
    small = runner.invoke(app, ["plan", str(tmp_path), "--json", "--free-gib", "0.0001"])
    assert small.exit_code == 1
    assert json.loads(small.stdout)["fits"] is False
    monkeypatch.setattr(sys, "argv", ["infer", "plan", "/nowhere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "neither a folder here nor a hub id" in capsys.readouterr().err


def test_models_lists_families_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["models"])
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma 3", "GPT-2"):
        assert family in result.stdout
    assert "No checkpoints in the local hub cache" in result.stdout
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    write_checkpoint(snapshot)
    result = CliRunner().invoke(app, ["models"])
    assert "some/model" in result.stdout


ISA = None if loader.available() else loader.chosen_instruction_set()
INT8_OBSTACLE = int8_cache_obstacle(128, 16) or native.bfloat16_obstacle()


@pytest.mark.skipif(INT8_OBSTACLE is not None, reason=str(INT8_OBSTACLE))
@pytest.mark.parametrize(
    ("settings", "head_dim", "held"),
    [
        ({"dtype": "int8"}, 128, "int8"),
        ({"quantization": "int8", "kv_cache_backend": "slotted", "max_seq_len": 77}, 128, "int8"),
        ({"dtype": "int8"}, 64, "bfloat16" if ISA == "amx" else "int8"),
        ({"dtype": "int8", "kv_cache_dtype": "int8"}, 64, "int8"),
        ({"dtype": "bfloat16"}, 128, "bfloat16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, 128, "int8"),
        ({"dtype": "int8", "kv_cache_dtype": "model"}, 128, "bfloat16"),
        ({"dtype": "int8", "page_size": 5}, 128, "bfloat16"),
        ({"dtype": "int8", "attention_backend": "sdpa"}, 128, "bfloat16"),
    ],
    ids=str,
)
def test_keys_and_values_in_int8(settings: dict[str, Any], head_dim: int, held: str) -> None:
    model = parse_model_config({**LLAMA_3B, "head_dim": head_dim}, "here")
    plan = make_plan(EngineConfig(**settings), model, "m", free=64 << 30)
    assert plan.kv_cache_dtype == held
    cell = head_dim + 4 if held == "int8" else 2 * head_dim
    assert plan.kv_bytes_per_token == 2 * 28 * 8 * cell
    assert f"bytes, {held}" in str(plan)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"page_size": 5, "dtype": "bfloat16"}, "multiple of 16 tokens, not 5"),
        ({"dtype": "float32"}, "in bfloat16"),
        ({"attention_backend": "sdpa"}, "native attention"),
    ],
)
def test_an_int8_cache_that_cannot_be_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: 'int8' is not possible: .*{problem}"):
        make_plan(
            EngineConfig(kv_cache_dtype="int8", **settings),
            parse_model_config(LLAMA_3B, "here"),
            "m",
            free=64 << 30,
        )


def test_without_arithmetic_for_bfloat16_the_default_is_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, cpu = parse_model_config(LLAMA_3B, "here"), torch.device("cpu")
    assert model.dtype == "bfloat16"

    def chosen(**settings: Any) -> torch.dtype:
        config = EngineConfig(**settings)
        dtype = hardware.choose_dtype(config, model, cpu)
        hardware.log_dtype(config, model, dtype)
        return dtype

    def said() -> list[logging.LogRecord]:
        return [r for r in caplog.records if r.name == hardware.__name__]

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(hardware, "bfloat16_obstacle", lambda: None)
    assert chosen() == chosen(dtype="int8") == torch.bfloat16
    assert not said()
    monkeypatch.setattr(hardware, "bfloat16_obstacle", lambda: "this CPU is old")
    assert chosen() == chosen(dtype="int8") == chosen(quantization="int8") == torch.float32
    assert {r.getMessage() for r in said()} == {
        "computing in float32, which is faster here than bfloat16: this CPU is old"
    }
    caplog.clear()
    assert chosen(dtype="float32") == torch.float32
    assert not said()
    assert chosen(dtype="bfloat16") == torch.bfloat16  # an explicit dtype is used, with a warning
    assert [r.levelno for r in said()] == [logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"dtype": "int8"}, "torch has no oneDNN"), ({"quantization": "int4"}, "the package's own")],
)
def test_whole_numbers_without_kernels_and_onednn_are_refused(
    settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "library", lambda: "no library")
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(onednn, "has_onednn", lambda *_: False)
    name, value = next(iter(settings.items()))
    model = parse_model_config(LLAMA_3B, "here")
    with pytest.raises(ConfigError, match=f"{name}: '{value}' is not possible here: {reason}"):
        make_plan(EngineConfig(**settings), model, "m", free=64 << 30)
