"""Tests of locating a checkpoint: the demo model, folders, the hub's cache, and no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.errors import LoadError
from infer.models.hub import SHIPPED_FOLDER, SHIPPED_NAME, locate
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
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


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
    (repo / "refs" / "main").write_text(commit)
    result = in_a_process(tmp_path, "print(locate('owner/name'))", HF_HUB_OFFLINE="1")
    assert str(repo / "snapshots" / commit) in result.stdout, result.stderr
    pinned = f"print(locate('owner/name', revision='{commit}'))"
    result = in_a_process(tmp_path, pinned, HF_HUB_OFFLINE="1")
    assert str(repo / "snapshots" / commit) in result.stdout, result.stderr
    other = "locate('owner/name', revision='v2')"
    result = in_a_process(tmp_path, other, HF_HUB_OFFLINE="1")
    assert "owner/name (revision v2) is not in the local hub cache" in result.stderr
