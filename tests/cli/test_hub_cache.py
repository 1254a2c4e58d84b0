"""`infer pull`, `list` and `rm` over a hub cache as the hub's library makes it; no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from infer.cli.main import app
from infer.errors import LoadError
from tests.support.command_line import CliRunner

SHA = "a" * 40  # of both: a copy of a repository has the revisions of the other


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one checkpoint, `owner/kept`, that is not complete, and `owner/small`."""
    folder = tmp_path / "hub"
    for name in ("kept", "small"):
        repo = folder / f"models--owner--{name}"
        snapshot, blobs = repo / "snapshots" / SHA, repo / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        (repo / "refs").mkdir()
        (repo / "refs/main").write_text(SHA, encoding="ascii")
        (blobs / "c").write_text(
            json.dumps({"architectures": ["LlamaForCausalLM"]}), encoding="utf-8"
        )
        (snapshot / "config.json").symlink_to(blobs / "c")
    for constant in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, constant, str(folder), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_list_and_rm(cache: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["list"])
    assert (shown.exit_code, "owner/small" in shown.output) == (0, True), shown.output
    kept = runner.invoke(app, ["rm", "owner/small"], input="n\n")
    assert kept.exit_code == 1
    assert (cache / "models--owner--small").exists()
    gone = runner.invoke(app, ["rm", "owner/small"], input="y\n")
    assert gone.exit_code == 0, gone.output
    assert not (cache / "models--owner--small").exists()
    assert (cache / "models--owner--kept/snapshots" / SHA / "config.json").is_file()
    assert "owner/small" not in runner.invoke(app, ["list"]).output
    assert runner.invoke(app, ["rm", "-y", "owner/kept"]).exit_code == 0
    assert "No checkpoints" in runner.invoke(app, ["list"]).output


@pytest.mark.parametrize(
    ("name", "said"),
    [("owner/smal", "do you mean owner/small?"), ("zzz", "`infer list` shows what is there")],
)
def test_rm_of_what_is_not_there(name: str, said: str, cache: Path) -> None:
    refused = CliRunner().invoke(app, ["rm", "owner/kept", name, "-y"])
    assert said in str(refused.exception)
    assert (cache / "models--owner--kept").exists(), "all names are looked at first"


def test_rm_touches_no_folder_of_the_users_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["rm", "mine", "-y"])
    assert "is a folder or file of your own" in str(refused.exception)
    assert (tmp_path / "mine").is_dir()


def test_pull_of_what_is_there_and_of_what_is_not(cache: Path) -> None:
    runner = CliRunner()
    there = runner.invoke(app, ["pull", "owner/small"])
    assert there.exit_code == 0, there.exception
    assert Path(there.stdout.strip()) == cache / "models--owner--small/snapshots" / SHA
    assert "infer serve owner/small" in there.stderr
    absent = runner.invoke(app, ["pull", "owner/absent"])
    assert isinstance(absent.exception, LoadError)
    assert "not in the local hub cache and the hub cannot be reached" in str(absent.exception)
