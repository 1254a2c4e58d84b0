"""Defaults of requests are the checkpoint's, in `LLM` and on the command line, in both formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.cli.main import app
from infer.config import EngineConfig
from infer.engine.build.planner import request_defaults
from infer.errors import ConfigError, LoadError
from tests.support import gguf_files
from tests.support.checkpoints import make_model, write_llama
from tests.support.command_line import CliRunner

pytestmark = pytest.mark.usefixtures("kept_templates")

FILE = "generation_config.json"
SHAPE = {"num_hidden_layers": 1, "max_position_embeddings": 128}
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that says nothing about sampling."""
    folder = tmp_path_factory.mktemp("plain")
    write_llama(folder, **SHAPE)
    return folder


def with_settings(plain: Path, folder: Path, **settings: Any) -> Path:
    """The same checkpoint with further settings in its generation_config.json."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    config = json.loads((folder / FILE).read_text(encoding="utf-8"))
    (folder / FILE).write_text(json.dumps({**config, **settings}), encoding="utf-8-sig")
    return folder


def texts(model: Path, params: dict[str, Any] | None = None, **settings: Any) -> set[Any]:
    """What three seeds sample, in all ways of `LLM` to ask."""
    found = set()
    settings = {"dtype": "float32", "max_batch_size": 4, **settings}
    with LLM(model=str(model), **settings) as llm:
        for seed in SEEDS:
            sampling = SamplingParams(
                seed=seed, ignore_eos=True, **{"max_tokens": 8, **(params or {})}
            )
            [output] = llm.generate("Once", sampling)
            pieces = llm.stream("Once", sampling)
            assert tuple(i for piece in pieces for i in piece.token_ids) == output.token_ids
            found.add(output.token_ids)
    return found


def test_three_seeds_give_one_text_if_the_file_says_so(plain: Path, tmp_path: Path) -> None:
    folder = with_settings(plain, tmp_path / "m", top_k=1)
    assert len(texts(plain)) == 3
    assert len(texts(folder)) == 1
    assert len(texts(folder, {"top_k": 0})) == 3  # what is given wins
    assert len(texts(folder, generation_config="none")) == 3
    assert texts(plain, generation_config=str(folder)) == texts(folder)


def test_a_gguf_file_says_it_too(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    sampling = {"top_k": 1, "temp": 0.6, "penalty_repeat": 1.0}
    gguf_files.write(file, "llama", make_model("llama", **SHAPE), sampling=sampling)
    assert len(texts(file)) == 1
    assert len(texts(file, {"top_k": -1})) == 3
    assert len(texts(file, generation_config="none")) == 3
    defaults = request_defaults(EngineConfig(model=str(file)))
    assert defaults.values == {"temperature": 0.6, "top_k": 1, "repetition_penalty": 1.0}


def test_without_parameters_everything_is_the_checkpoints(plain: Path, tmp_path: Path) -> None:
    folder = with_settings(
        plain, tmp_path / "m", do_sample=False, max_new_tokens=11, min_new_tokens=11
    )
    with LLM(model=str(folder), dtype="float32") as llm:
        outputs = [llm.generate("Once")[0] for _ in SEEDS]
        [answer] = llm.chat([{"role": "user", "content": "Once"}])
        streamed = list(llm.stream([{"role": "user", "content": "Once"}]))
        assert {output.token_ids for output in outputs} == {outputs[0].token_ids}
        assert [len(output.token_ids) for output in (*outputs, answer)] == [11] * 4
        assert sum(len(piece.token_ids) for piece in streamed) == 11
        assert llm.sampling_defaults.source == FILE
        # A default is cut to the room that there is; what is given is refused.
        assert len(llm.generate("x" * 120)[0].token_ids) == 7
        assert len(llm.score("Once upon")[0]) == 9


def test_the_command_line(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = with_settings(plain, tmp_path / "m", top_k=1, max_new_tokens=9, min_new_tokens=9)

    def ran(*arguments: str, text: str = "") -> Any:
        done = CliRunner().invoke(app, [*arguments, "--dtype", "float32"], input=text)
        assert done.exit_code == 0, done.output
        return done

    def generated(*more: str) -> int:
        model = ("--model", str(folder), "--max-batch-size", "1")
        seeds = map(str, SEEDS)
        done = [ran("generate", "Once", *model, "--seed", seed, *more) for seed in seeds]
        assert ("max_tokens 9" in done[0].stderr) is ("none" not in more)
        return len({each.stdout for each in done})

    assert generated() == 1
    assert generated("--generation-config", "none", "--max-tokens", "9") == 3
    shown = {ran("chat", str(folder), "--seed", seed, text="Hi\n/exit\n").stdout for seed in "123"}
    assert len(shown) == 1
    plan = json.loads(ran("plan", str(folder), "--json").stdout)["sampling_defaults"]
    assert plan == {"top_k": 1, "max_tokens": 9, "min_tokens": 9, "source": FILE}
    assert "top_k 1" in ran("plan", str(folder)).stdout
    assert "the fixed ones" in ran("plan", str(plain)).stdout


def test_files_that_cannot_be_read(plain: Path, tmp_path: Path) -> None:
    broken = with_settings(plain, tmp_path / "m")
    (broken / FILE).write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match=FILE):
        LLM(model=str(broken))
    for chosen in (broken, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="generation_config") as raised:
            LLM(model=str(plain), generation_config=str(chosen))
        assert FILE in str(raised.value)
    odd = with_settings(plain, tmp_path / "odd", temperature=9, top_k="x", typical_p=0.5)
    assert request_defaults(EngineConfig(model=str(odd))).values == {}


def test_what_is_not_used_is_logged(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = with_settings(plain, tmp_path / "odd", temperature=9, typical_p=0.5, top_p=0.9)
    with caplog.at_level("INFO"):
        LLM(model=str(odd), dtype="float32").close()
    assert "defaults of requests: top_p 0.9 (from generation_config.json)" in caplog.text
    assert "temperature is not used: temperature must be between 0 and 2, not 9" in caplog.text
    assert "typical_p (0.5)" in caplog.text
