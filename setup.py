"""Builds the CPU kernels if there is a C++ compiler; everything else is in pyproject.toml.

The kernels are a plain shared library that ctypes loads, placed beside its sources. The package
works without it, slower, so a failure to build is one warning and the installation goes on.
"""

import warnings

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Extension(
    "infer.kernels._kernels",
    sources=[
        f"src/infer/csrc/{name}.cpp"
        for name in ("attention", "bandwidth", "draw", "layers", "linear", "rotary")
    ],
    depends=[
        f"src/infer/csrc/{name}.h"
        for name in (
            *("attention_bytes", "attention_isa", "attention_products"),
            *("cpu", "draw_isa", "kernels", "linear_vectors", "rotary", "rotary_isa"),
        )
    ],
    # No -ffast-math and no contraction: every code path sums in the order that is written. No
    # -march=native either: the paths are chosen when the library runs.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-fno-math-errno",
        "-ffp-contract=off",
        "-Wno-psabi",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,
)


class BuildKernels(build_ext):
    """`build_ext` that never stops an installation."""

    def run(self) -> None:
        """Build, or warn."""
        try:
            super().run()
        except Exception as error:
            warn(error)

    def build_extension(self, ext: Extension) -> None:
        """Build, or warn."""
        try:
            super().build_extension(ext)
        except Exception as error:
            warn(error)


def warn(error: Exception) -> None:
    """Say once what is lost."""
    warnings.warn(
        f"infer's CPU kernels were not built ({error}); attention on the CPU will be several"
        " times slower. Install a C++ compiler and reinstall.",
        stacklevel=2,
    )


setup(ext_modules=[KERNELS], cmdclass={"build_ext": BuildKernels})
