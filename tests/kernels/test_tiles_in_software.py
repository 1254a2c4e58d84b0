"""Tests of the kernels' code for AMX on a CPU without AMX, with the tiles of tiles.h in software.

The library is built again with that header, and the tests of attention and linear layers run with
it in another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.kernels import loader

ROOT = Path(__file__).parents[2]
HEADER = Path(__file__).with_name("tiles.h")
RUN = """
import sys, pytest
from infer.kernels import loader
loader.__file__ = sys.argv[1]
assert loader.chosen_instruction_set() == "amx", loader.library()
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "avx512_bf16" not in loader.instruction_sets(), reason="around tiles there are AVX-512 vectors"
)
def test_what_tiles_compute(tmp_path: Path) -> None:
    build = ["build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path / "objects")]
    defined = {"CPPFLAGS": f"-DINFER_TILES='\"{HEADER}\"'"}
    built = subprocess.run(
        [sys.executable, "setup.py", *build],
        cwd=ROOT, env={**os.environ, **defined}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = list(tmp_path.glob("infer/kernels/_kernels*.so"))
    assert found, built.stderr
    tests = ["tests/attention", "tests/kernels", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(found[0].with_name("loader.py")), *tests],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
