"""Triton kernels for CUDA devices; `obstacle` says why they cannot run.

Triton comes with every CUDA build of torch. The other modules of this package import it at their
top, so they may be imported only after `obstacle` has returned None.

All kernels here keep some rules, because Triton's interpreter, which the tests use, and Triton's
versions 3.6 to 3.9 differ where they are broken. Operands are widened to float32 after each load. A
masked load names its `other`. Helpers are functions of the module. There are no block pointers and
no `libdevice`. Besides, no kernel is tuned while requests are served.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability: that of the first devices with bfloat16 products."""


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter on the CPU, as they do in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (PDL).

    With PDL a kernel may start before the preceding kernel has ended.
    """
    return not interpreting() and torch.cuda.get_device_capability(device) >= (9, 0)


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels are launched on this device: Triton launches them on the calling
    thread's current one. It changes nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def obstacle(device: torch.device) -> str | None:
    """The reason why the kernels cannot run on this device; None if they can."""
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
    """The reason why Triton cannot compile its launchers; None if it can.

    Triton up to 3.8 compiles a small launcher in C when a kernel is first used.
    """
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return None
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        return "Triton needs a C compiler (gcc or clang, or CC) to start its kernels"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Triton needs Python's headers (Python.h: the package python3-dev)"
    return None
