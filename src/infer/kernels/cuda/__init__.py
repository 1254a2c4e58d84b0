"""Triton kernels for CUDA devices; `obstacle` says why they cannot run.

Triton comes with every CUDA build of torch. It is imported in this package only, and only after
`obstacle` has returned None: the modules beside this one import it when they are imported.

Rules that every kernel here keeps, because Triton's interpreter (which the tests use) and the
versions 3.6 to 3.9 differ in them: operands are widened to float32 after each load, a masked load
names its `other`, helpers are functions of the module, there are no block pointers and no
`libdevice`, and nothing is tuned while requests are served.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

MIN_CAPABILITY = (8, 0)
"""compute capability of the first devices with bfloat16 products"""


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. For tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
    return not interpreting() and torch.cuda.get_device_capability(device) >= (9, 0)


def obstacle(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it comes with a CUDA build of torch)"
    if interpreting():
        return None
    if device.type != "cuda":
        return f"the kernels are for CUDA devices, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        return f"the device has compute capability {have}; the kernels need 8.0"
    return _compiler_obstacle()


def _compiler_obstacle() -> str | None:
    """Triton up to 3.8 compiles a small launcher in C when a kernel is first used."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return None
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        return "Triton needs a C compiler (gcc or clang, or CC) to start its kernels"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Triton needs Python's headers (Python.h: the package python3-dev)"
    return None
