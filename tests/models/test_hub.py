"""Tests of locating a checkpoint: the demo model, folders, the hub's cache, and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.cli.planning import run_models
from infer.config import SHIPPED_NAME
from infer.errors import LoadError
from infer.models.gguf_names import select_gguf
from infer.models.hub import SHIPPED_FOLDER, cached_checkpoints, locate
from tests.support.checkpoints import write_checkpoint


def test_the_shipped_model_by_default_and_by_name() -> None:
    assert locate(None) == locate(SHIPPED_NAME) == (SHIPPED_FOLDER, SHIPPED_NAME)


def test_a_folder_is_served_under_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    write_checkpoint(folder)
    assert locate(str(folder)) == (folder, "my-model")


@pytest.mark.parametrize("name", ["/no/such", "./no", "~/no-such", "noslash", "a/b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id(name: str) -> None:
    with pytest.raises(LoadError, match="neither a folder here nor a hub id"):
        locate(name)


def in_a_process(hub: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, because the hub's library reads its environment when imported."""
    env = {**os.environ, "HF_HUB_CACHE": str(hub), **environment}
    command = [sys.executable, "-c", "from infer.models.hub import locate\n" + code]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, encoding="utf-8"
    )


def test_offline_and_absent_is_said_clearly(tmp_path: Path) -> None:
    result = in_a_process(tmp_path, "locate('owner/absent')", HF_HUB_OFFLINE="1")
    assert "owner/absent is not in the local hub cache" in result.stderr
    assert "HF_HUB_OFFLINE" in result.stderr
    assert "LoadError" in result.stderr.splitlines()[-1]


def test_offline_and_cached_is_found(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--owner--name"
    write_checkpoint(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    latest, pinned = "print(locate('owner/name')[0])", f"locate('owner/name', revision='{commit}')"
    code = f"{latest}\nprint({pinned}[0])\nlocate('owner/name', revision='v2')"
    result = in_a_process(tmp_path, code, HF_HUB_OFFLINE="1")
    assert result.stdout.splitlines() == [str(repo / "snapshots" / commit)] * 2, result.stderr
    assert "owner/name (revision v2) is not in the local hub cache" in result.stderr


FILES = [
    "README.md",
    "mmproj-model-f16.gguf",
    "model-Q4_K_M.gguf",
    "model-IQ4_XS.gguf",
    "model.Q8_0.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
    "model-UD-Q6_K-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("q8_0", ["model.Q8_0.gguf"]),
        ("iq4_xs", ["model-IQ4_XS.gguf"]),
        ("model-IQ4_XS.gguf", ["model-IQ4_XS.gguf"]),
        ("BF16", FILES[5:7]),
        ("model-BF16-00002-of-00002.gguf", FILES[5:7]),
        ("BF16/model-BF16-00001-of-00002.gguf", FILES[5:7]),
    ],
)
def test_a_gguf_file_is_named_by_its_quantisation_or_its_name(
    wanted: str, found: list[str]
) -> None:
    assert select_gguf(FILES, wanted, "owner/name") == found


@pytest.mark.parametrize(
    ("files", "wanted", "message"),
    [
        (FILES, "Q4_K", r"has no 'Q4_K'; there are: BF16, IQ4_XS, Q4_K_M, Q8_0, UD-Q6_K$"),
        (FILES, "other.gguf", "has no 'other.gguf'; there are: BF16"),
        (FILES, "", "has no ''; there are"),
        (FILES, "UD-Q6_K", "only 1 of the 2 parts of model-UD-Q6_K-00001-of-00002.gguf"),
        (FILES[:2], "Q4_0", "owner/name holds no GGUF files"),
        (["a-Q4_0.gguf", "b/b-Q4_0.gguf"], "Q4_0",
         "2 files of 'Q4_0'; name one: a-Q4_0.gguf, b/b-Q4_0.gguf"),
    ],
)  # fmt: skip
def test_what_there_is_instead_is_listed(files: list[str], wanted: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        select_gguf(files, wanted, "owner/name")


FAKE_HUB = """
import huggingface_hub, pathlib, sys
cache = pathlib.Path(sys.argv[1])

def download(repo, name, revision=None):
    path = cache / (revision or "main") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return str(path)

def snapshot(repo, **kwargs):
    return str(cache / "main")

huggingface_hub.HfApi.list_repo_files = lambda self, repo, revision=None: FILES
huggingface_hub.hf_hub_download = download
huggingface_hub.snapshot_download = snapshot
"""


def with_fake_hub(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which a hub has the files above."""
    lines = f"from infer.models.hub import locate\nFILES = {FILES}\n{FAKE_HUB}\n{code}"
    command = [sys.executable, "-c", lines, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")


def test_all_parts_are_downloaded_and_no_other_file(tmp_path: Path) -> None:
    result = with_fake_hub(tmp_path, "print(locate('owner/name:bf16', revision='v1'))")
    assert str(tmp_path / "v1" / FILES[5]) in result.stdout, result.stderr
    assert "'owner/name:bf16'" in result.stdout
    found = [path.relative_to(tmp_path / "v1") for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(map(str, found)) == FILES[5:7]


def test_a_hub_id_with_gguf_files_only_says_how_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    result = with_fake_hub(tmp_path, "locate('owner/name')")
    assert "holds GGUF files; name one of them, as owner/name:BF16" in result.stderr
    assert "Q4_K_M, Q8_0" in result.stderr


def test_a_cached_gguf_file_is_found_offline(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model-Q4_K_M.gguf").touch()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    result = in_a_process(tmp_path, "print(locate('owner/name:Q4_K_M'))", HF_HUB_OFFLINE="1")
    assert str(snapshot / "model-Q4_K_M.gguf") in result.stdout, result.stderr
    result = in_a_process(tmp_path, "locate('owner/name:Q8_0')", HF_HUB_OFFLINE="1")
    assert "has no 'Q8_0'; there are: Q4_K_M" in result.stderr
    result = in_a_process(tmp_path, "locate('owner/absent:Q8_0')", HF_HUB_OFFLINE="1")
    assert "owner/absent is not in the local hub cache" in result.stderr


BROKEN: dict[str, str | bytes] = {
    "a-list": "[1]",
    "deep": "[" * 100_000,
    "latin": b'{"architectures": ["\xe9"]}',
    "mapping": '{"architectures": {"a": 1}}',
    "number": '{"architectures": 5}',
    "numbers": '{"architectures": [[1]]}',
    "text": '{"architectures": "LlamaForCausalLM"}',
    "nothing": "",
}


def test_what_cannot_be_read_in_the_cache_is_a_row_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: dict[str, str | bytes] = {**BROKEN, "good": '{"architectures": ["GPT2LMHeadModel"]}'}
    for name, config in configs.items():
        repository = tmp_path / f"models--them--{name}"
        snapshot = repository / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40, encoding="utf-8")
        content = config if isinstance(config, bytes) else config.encode()
        (snapshot / "config.json").write_bytes(content)
    (tmp_path / "models--them--odd").mkdir()  # without snapshots
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    found = {each.name.removeprefix("them/"): each for each in cached_checkpoints()}
    assert found.keys() == {*configs, "odd"}
    assert {name for name, each in found.items() if each.unreadable} == {*BROKEN, "odd"}
    assert found["good"].architecture == "GPT2LMHeadModel"
    run_models()
    shown = capsys.readouterr().out
    assert shown.count("unreadable: ") == len(BROKEN) + 1
    assert "them/good" in shown


def test_the_cache_is_listed_with_the_format_of_quantised_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = {"four": {"quant_method": "gptq", "bits": 4, "group_size": 128},
               "other": {"quant_method": "aqlm"}, "plain": None}  # fmt: skip
    for name, method in methods.items():
        snapshot = tmp_path / f"models--them--{name}" / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("a" * 40, encoding="utf-8")
        config = {"architectures": ["LlamaForCausalLM"], "quantization_config": method}
        (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    run_models()
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM, gptq, 4 bits in groups of 128" in shown
    assert "quant_method 'aqlm' is not supported; take" in shown
    assert all(name in shown for name in ("compressed-tensors", "bitsandbytes"))
