"""Tests of the kernels without Python: kernel_checks.cpp on this CPU, on ARM's under qemu, and with
address and undefined-behaviour sanitizers.

The program reads csrc/abi.h and nothing else, and says how many of its checks passed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infer.kernels import loader
from tests.support.kernel_sources import kernel_sources

PROGRAM = Path(__file__).with_name("kernel_checks.cpp")
FLAGS = ["-std=c++17", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi", "-pthread"]
X86, ARM = loader.X86_SETS, loader.ARM_SETS
ARM_CPUS = {  # of qemu, and the sets that they have
    "cortex-a72": ["neon", "portable"],
    "neoverse-n1": ["neon_dotprod", "neon", "portable"],
    "max": ["neon_i8mm_bf16", "neon_dotprod", "neon", "portable"],
}
is_x86 = platform.machine() == "x86_64"


def run(*command: object, **settings: object) -> str:
    """What a command prints; its error fails the test."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        **settings,
        encoding="utf-8",
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return str(done.stdout)


def build(folder: Path, compiler: str, sets: tuple[str, ...], *flags: str) -> Path:
    """The program with the kernels of some instruction sets in it."""
    sources = [*kernel_sources(sets), PROGRAM]
    defined = [f"-DINFER_{name.upper()}" for name in sets]
    objects = [folder / f"{source.parent.name}_{source.stem}.o" for source in sources]

    def compile_one(source: Path, made: Path) -> None:
        run(compiler, *FLAGS, *flags, *defined, "-c", source, "-o", made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    run(compiler, "-pthread", *flags, *objects, "-o", folder / "checks")
    return folder / "checks"


def passed(output: str) -> int:
    """The number of checks that passed; none failed."""
    found = re.search(r"^(\d+) passed, 0 failed$", output, re.MULTILINE)
    assert found, output[-3000:]
    return int(found[1])


@pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
def test_the_kernels_of_this_machine(tmp_path: Path) -> None:
    library = loader.library_file()
    program = tmp_path / "checks"
    where = f"-Wl,-rpath,{library.parent}"
    run("g++", *FLAGS, "-O1", PROGRAM, library, where, "-o", program)
    output = run(program, "short")
    assert passed(output) > 60 * len(loader.instruction_sets())


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64"),
    reason="g++-aarch64-linux-gnu and qemu-user are needed",
)
def test_arm_under_emulation(tmp_path: Path) -> None:
    program = build(tmp_path, "aarch64-linux-gnu-g++", ARM, "-O2", "-static")
    for cpu, sets in ARM_CPUS.items():
        output = run("qemu-aarch64", "-cpu", cpu, program, "quick", *sets)
        assert output.splitlines()[0].split() == sets
        passed(output)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not is_x86 or not shutil.which("g++"), reason="for x86 with g++")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_no_memory_that_is_not_ours_and_no_race(tmp_path: Path, sanitizers: str) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer on all sets that this CPU has, and
    ThreadSanitizer, which sees the library's own threads."""
    flags = ("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined")
    program = build(tmp_path, "g++", X86, *flags)
    # ThreadSanitizer needs addresses where it expects them.
    passed(run("setarch", "-R", program, "quick"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not is_x86 or not shutil.which("clang++"), reason="for x86 with clang")
def test_another_compiler(tmp_path: Path) -> None:
    """clang compiles all of it, too, for the same results: what macOS builds with."""
    program = build(tmp_path, "clang++", X86, "-O2", "-Wno-unknown-warning-option")
    passed(run(program, "quick"))
