"""Builds the CPU kernels if there is a C++ compiler; everything else is in pyproject.toml.

The kernels are a plain shared library that ctypes loads: it needs nothing of Python, so one wheel
for each platform is for all versions of Python (py3-none-PLATFORM). Each file of `csrc/isa` is for
one instruction set; a compiler that is too old for one of them loses that file only. The package
works without the library, slower, so a failure to build is one warning and the installation goes
on. With INFER_REQUIRE_KERNELS=1, for wheels that are given to others, each failure is an error.
"""

import hashlib
import os
import platform
import sysconfig
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # an older setuptools, which only builds in place
    bdist_wheel = None

CSRC = Path("src/infer/csrc")
DRIVERS = sorted(CSRC.glob("*.cpp"))
"""what calls the kernels of an instruction set"""
DISPATCH = CSRC / "isa/dispatch.cpp"
"""which sets there are: it needs to know which of them were compiled"""
X86 = ("avx512", "avx2", "avx512_vnni", "avx2_vnni", "avx512_bf16", "amx")
"""one file of `csrc/isa` each, and those of FURTHER; what takes longest to compile first"""
PORTABLE = "portable"
"""the file of `csrc/isa` that each machine has"""
FURTHER = {"amx": ("amx_blocks",)}
ARM = ("neon", "neon_dotprod", "neon_i8mm_bf16")
# What is built for, which is not always the machine that builds: an arm64 Mac builds for x86_64.
MACHINE = sysconfig.get_platform().rsplit("-", 1)[-1].replace("universal2", platform.machine())
INSTRUCTION_SETS = {"x86_64": X86, "aarch64": ARM, "arm64": ARM}.get(MACHINE, ())
if sysconfig.get_platform().endswith("universal2"):
    os.environ.setdefault("ARCHFLAGS", f"-arch {MACHINE}")
REQUIRED = os.environ.get("INFER_REQUIRE_KERNELS") == "1"

KERNELS = Extension(
    "infer.kernels._kernels",
    sources=[path.as_posix() for path in [*DRIVERS, DISPATCH]],
    depends=[path.as_posix() for path in sorted(CSRC.rglob("*")) if path.is_file()],
    # No -ffast-math and no contraction: every code path sums in the order that is written. No
    # -march=native either: the paths are chosen when the library runs.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-fno-math-errno",
        "-ffp-contract=off",
        "-Wno-psabi",
        "-Wno-uninitialized",  # GCC 12 warns of its own header of AVX-512
        "-Wno-maybe-uninitialized",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    # The library and abi.h, which Python reads, must have the same digest.
    define_macros=[
        (
            "INFER_ABI_DIGEST",
            f'"{hashlib.sha256((CSRC / "abi.h").read_bytes()).hexdigest()}"',
        )
    ],
    language="c++",
    optional=not REQUIRED,
)


class BuildKernels(build_ext):
    """`build_ext` that stops an installation only if the kernels are required."""

    def get_ext_filename(self, fullname: str) -> str:
        """A name without the version of Python."""
        return f"{fullname.replace('.', '/')}.so"

    def run(self) -> None:
        """Build, or warn."""
        try:
            super().run()
        except Exception as error:
            if REQUIRED:
                raise
            warn(error)

    def build_extension(self, ext: Extension) -> None:
        """Build, or warn."""
        try:
            # All compilers at once, what takes longest first: the last ones leave no core idle.
            sets = [PORTABLE, *INSTRUCTION_SETS]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                of_sets = [pool.submit(self.compile_instruction_set, name) for name in sets]
                of_drivers = [pool.submit(self.compile_files, [path]) for path in DRIVERS]
            for name, made in zip(sets, (each.result() for each in of_sets), strict=True):
                if made:
                    ext.extra_objects += made
                    ext.define_macros.append((f"INFER_{name.upper()}", None))
                elif name == PORTABLE:
                    raise RuntimeError(f"the kernels for {PORTABLE} are needed on each machine")
            ext.extra_objects += [path for each in of_drivers for path in each.result()]
            ext.sources = [DISPATCH.as_posix()]
            super().build_extension(ext)
        except Exception as error:
            if REQUIRED:
                raise
            warn(error)

    def compile_instruction_set(self, name: str) -> list[str]:
        """The object files of an instruction set; none if the compiler does not know it."""
        try:
            return self.compile_files(
                [CSRC / "isa" / f"{file}.cpp" for file in (name, *FURTHER.get(name, ()))]
            )
        except Exception as error:
            if REQUIRED:
                raise
            warnings.warn(f"the kernels for {name} were not built ({error})", stacklevel=2)
            return []

    def compile_files(self, sources: list[Path]) -> list[str]:
        """Their object files, unless those that are there are newer than all of `csrc`."""
        made = [Path(self.build_temp) / source.with_suffix(".o") for source in sources]
        newest = max(Path(path).stat().st_mtime for path in KERNELS.depends)
        is_made = all(path.exists() and path.stat().st_mtime > newest for path in made)
        if is_made and not self.force:
            return [str(path) for path in made]
        return list(
            self.compiler.compile(
                [source.as_posix() for source in sources],
                output_dir=self.build_temp,
                extra_postargs=KERNELS.extra_compile_args,
            )
        )


def warn(error: Exception) -> None:
    """Say once what is lost."""
    warnings.warn(
        f"infer's CPU kernels were not built ({error}); attention on the CPU will be several"
        " times slower. Install a C++ compiler and reinstall.",
        stacklevel=2,
    )


COMMANDS = {"build_ext": BuildKernels}
if bdist_wheel is not None:

    class BuildWheel(bdist_wheel):
        """`bdist_wheel` for any Python on this platform."""

        def get_tag(self) -> tuple[str, str, str]:
            """The tags of Python, its ABI and the platform."""
            platform_tag = super().get_tag()[2].replace("universal2", MACHINE)
            return "py3", "none", platform_tag

    COMMANDS["bdist_wheel"] = BuildWheel

setup(ext_modules=[KERNELS], cmdclass=COMMANDS)
