"""The libraries of the page are what its lock file says, and its own code has no type errors.

These need Node and `ui/node_modules` (`npm ci` in `ui/`), and are skipped without them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from infer.server.ui.page import FOLDER

pytestmark = pytest.mark.browser

UI = Path(__file__).parents[2] / "ui"
VENDOR = FOLDER / "vendor"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("node") is None or not (UI / "node_modules").is_dir():
        pytest.skip("there is no Node here, or ui/node_modules is missing: run `npm ci` in ui/")
    return subprocess.run(
        command, cwd=UI, capture_output=True, text=True, timeout=120, encoding="utf-8"
    )


def test_the_same_lock_file_gives_the_same_bytes(tmp_path: Path) -> None:
    result = run("node", "vendor.mjs", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in VENDOR.iterdir() if path.suffix != ".ts")
    assert len(made) > 6
    for name in made:
        assert (tmp_path / name).read_bytes() == (VENDOR / name).read_bytes(), name


def test_the_types_of_the_page_hold() -> None:
    result = run("node_modules/.bin/tsc", "--noEmit", "-p", "tsconfig.json")
    assert result.returncode == 0, result.stdout


def test_the_page_of_libraries_has_their_hashes() -> None:
    listed = dict(re.findall(r"^\| `(\S+)` \|.*\| `(\w{64})` \|$", page(), re.MULTILINE))
    found = {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css")}
    assert listed.keys() == found
    for name, digest in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name


def test_the_page_of_libraries_has_the_pinned_versions() -> None:
    pinned = json.loads((UI / "package.json").read_text(encoding="utf-8"))["dependencies"]
    locked = json.loads((UI / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name, version in pinned.items():
        assert re.fullmatch(r"[0-9.]+", version), f"{name} is not pinned"
        assert locked[f"node_modules/{name}"]["version"] == version
        assert f"{name} {version} (" in page()
    assert not any("resolved" in each for each in locked.values())


def test_every_library_has_the_text_of_its_licence() -> None:
    texts = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^(\S+ [0-9.]+)\n=+\n", texts)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert found.keys() == set(re.findall(r"(\S+ [0-9.]+) \(", page()))
    for name, text in found.items():
        assert "opyright" in text, name
        assert len(text) > 500, f"{name} has no licence text"


def page() -> str:
    return (VENDOR / "VENDORED.md").read_text(encoding="utf-8")
