"""Which products linear layers have on this CPU, and how large their weights are

`kernels.linear` has the layers. A plan of memory needs to know only what they would be, so this
module imports torch where its products are asked about, and nowhere else.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from infer.kernels import loader
from infer.kernels.blocks import fitted_bytes

BFLOAT16_SETS = ("amx", "avx512_bf16", "neon_i8mm_bf16")
"""Instruction sets that multiply in bfloat16; with the others it is widened in registers."""

VARIABLE = "INFER_LINEAR"
"""Environment variable that selects the implementation: an instruction set, or `onednn`.

It is for comparisons. Unset, the instruction set is that of all kernels.
"""


def instruction_set() -> str:
    """The instruction set of new linear layers, by its name in `loader.INSTRUCTION_SETS`."""
    wanted = os.environ.get(VARIABLE) or "onednn"
    return loader.chosen_instruction_set() if wanted == "onednn" else wanted


def native_obstacle() -> str | None:
    """The reason why `NativeLinear` cannot be used here; None if it can.

    `ValueError` if the variable `INFER_LINEAR` is not valid or asks for what cannot run here.
    """
    wanted = os.environ.get(VARIABLE) or ""
    if wanted not in ("", "onednn", *loader.INSTRUCTION_SETS):
        names = ", ".join(loader.INSTRUCTION_SETS)
        raise ValueError(f"{VARIABLE}={wanted!r}: use onednn or one of {names}")
    reason = loader.available()
    if reason is None:
        isa = instruction_set()
        if not loader.loaded().infer_linear_runs_here(isa.encode()):
            reason = f"{isa} does not run here"
    if reason and wanted not in ("", "onednn"):
        raise ValueError(f"{VARIABLE}={wanted} is not possible: {reason}")
    return f"{VARIABLE}={wanted}" if wanted == "onednn" else reason


def products(dtype: str, quantization: str | None, blocks: Sequence[str] = ()) -> str:
    """How linear layers on this CPU multiply, and why, for the log and the plan.

    `dtype`: of the activations, such as bfloat16; `quantization`: int8, int4 or None; `blocks`:
    what is said of the GGUF blocks in which weights are held.
    """
    if blocks or (quantization == "int4" and native_obstacle() is None):
        return f"native, {instruction_set()}, {'; '.join(blocks) or 'in blocks of 4 bits'}"
    if dtype != "bfloat16" or (reason := native_obstacle()) is not None:
        reason = bfloat16_obstacle() if dtype == "float32" else native_obstacle()
        return f"torch's products in {dtype}" + (f" ({reason})" if reason else "")
    isa = instruction_set()
    if quantization is None and isa not in BFLOAT16_SETS:
        return f"native, {isa}, which widens bfloat16 weights in registers"
    return f"native, {isa}"


def lm_head_quantization(quantization: str | None) -> str | None:
    """The quantization of the output head: int8 where other layers have int4.

    The head's errors directly change the probabilities.
    """
    return "int8" if quantization == "int4" else quantization


def embedding_is_packed(dtype: str, quantization: str | None) -> bool:
    """Whether an embedding that is not in blocks has one memory with the output head tied to it.

    `quantization`: of the linear layers. A head in int8 has other numbers than the embedding.
    """
    return (
        dtype == "bfloat16"
        and lm_head_quantization(quantization) is None
        and native_obstacle() is None
    )


def weight_bytes(quantization: str | None, number_bytes: int, width: int) -> float:
    """The size of one weight of a layer with `width` inputs in memory on this machine, in bytes.

    `quantization`: int8, int4 or None; `number_bytes`: the size of an activation, and of a weight
    that is not quantized.
    """
    if quantization == "int4":
        return fitted_bytes(width) if number_bytes == 2 else number_bytes
    return 1.0 if quantization else number_bytes


def quantization_obstacle(quantization: str) -> str | None:
    """The reason why weights cannot be held in int8 or int4 on this CPU; None if they can."""
    if (reason := native_obstacle()) is None:
        return None
    if quantization == "int4":
        return f"the package's own kernels do not run: {reason}"
    from infer.kernels.linear.onednn import has_onednn  # imports torch

    if has_onednn("onednn", "qlinear_pointwise"):
        return None
    return f"torch has no oneDNN, and the package's own kernels do not run: {reason}"


def bfloat16_obstacle() -> str | None:
    """The reason why bfloat16 products are slower than float32 ones here; None if they are not."""
    if native_obstacle() is None:
        return None
    import torch

    from infer.kernels.linear.onednn import onednn_has_bfloat16

    if not onednn_has_bfloat16():
        return "this CPU has no arithmetic for bfloat16 that oneDNN could use"
    if platform.machine().lower() in ("x86_64", "amd64") and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        return "this CPU has neither AVX-512 with BF16 nor AMX"
    return None
