"""Tests of the kernels' code for AMX and for AVX-VNNI on a CPU with AVX-512 only.

The library is built again: with the tiles of tiles.h in software, and with AVX-VNNI's instructions
in the encoding of AVX-512. The tests of attention and linear layers run with it in another process.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infer.kernels import loader
from tests.support.kernel_sources import kernel_sources

ROOT = Path(__file__).parents[2]
HEADER = Path(__file__).with_name("tiles.h")
RUN = """
import sys, pytest
from infer.kernels import loader
loader.__file__ = sys.argv[1]
assert loader.chosen_instruction_set() == "amx", loader.library()
assert set(loader.instruction_sets()) == {*loader.X86_SETS, "portable"}
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a build, and the kernels' tests with tiles in software
@pytest.mark.skipif(
    "avx512_bf16" not in loader.instruction_sets(), reason="around tiles there are AVX-512 vectors"
)
def test_what_tiles_compute(tmp_path: Path) -> None:
    build = ["build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path / "objects")]
    defined = {"CPPFLAGS": f"-DINFER_TILES='\"{HEADER}\"' -DINFER_EVEX_VNNI"}
    built = subprocess.run(
        [sys.executable, "setup.py", *build],
        cwd=ROOT, env={**os.environ, **defined}, capture_output=True, text=True, check=True,
    encoding="utf-8")  # fmt: skip
    found = list(tmp_path.glob("infer/kernels/_kernels*.so"))
    assert found, built.stderr
    tests = ["tests/attention", "tests/kernels", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(found[0].with_name("loader.py")), *tests],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    encoding="utf-8")  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "aarch64-linux-gnu-g++"])
def test_the_sources_compile_without_warnings(compiler: str) -> None:
    """Each file by itself; those of an instruction set only for its kind of CPU."""
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    is_x86 = compiler == "g++" and platform.machine() == "x86_64"
    sets = loader.X86_SETS if is_x86 else loader.ARM_SETS
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    for source in kernel_sources(sets):
        done = subprocess.run(
            [compiler, *flags, str(source)], capture_output=True, text=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr[-3000:]
