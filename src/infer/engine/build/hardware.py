"""What the machine has, and what the settings mean on it: device, dtype, threads, free memory.

Used by `engine.build.memory_plan` and `engine.build.assemble`. It reads the operating system;
only `keep_freed_memory` changes anything, in this process.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import torch

from infer.config import EngineConfig
from infer.errors import ConfigError
from infer.kernels.linear import bfloat16_obstacle, quantization_obstacle
from infer.kernels.loader import chosen_instruction_set, int8_cache_obstacle
from infer.models.model_config import ModelConfig

log = logging.getLogger(__name__)

LARGE_HEAD = 128
"""numbers, from which an int8 cache pays by default on AMX: steps of many sequences read little
else, and prefill's attention is a tenth slower; with heads of 64 it is half as slow again. On
vectors prefill is no slower, with heads of any size."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16 itself (CUDA before Ampere emulates it)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def default_seats(device: torch.device) -> int:
    """Sequences that run at the same time by default: a GPU needs more to be busy."""
    return 256 if device.type == "cuda" else 32


def choose_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means here."""
    has_cuda = torch.cuda.is_available()
    if config.batch_invariant and has_cuda and config.device != "cpu":
        make_products_invariant()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device", "'cuda' was asked for, but torch finds no CUDA device here")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def make_products_invariant() -> None:
    """Ask cuBLAS never to cut a sum between programs; before the first product on a GPU.

    With next to no workspace it has nowhere to put parts of sums (vLLM's way, too)."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that `config.dtype` means for this model: of activations and cache, and of weights
    that are not quantised."""
    if quantization := config.weight_format:
        if device.type != "cpu":
            raise ConfigError(
                "quantization",
                f"{quantization!r} runs on CPUs, not on {device.type}; use device='cpu'",
            )
        if reason := quantization_obstacle():
            setting = "quantization" if config.quantization else "dtype"
            raise ConfigError(
                setting, f"{quantization!r} is not possible here: {reason}; use dtype='auto'"
            )
        return torch.float32 if bfloat16_obstacle() else torch.bfloat16
    name = model.dtype if config.dtype == "auto" else config.dtype
    if config.dtype == "auto" and name == "bfloat16" and not has_bfloat16(device):
        log.warning("this device has no bfloat16 arithmetic: computing in float16")
        name = "float16"
    if config.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "bfloat16"  # CPUs have no float16 arithmetic worth the name
    if config.dtype == "auto" and name == "bfloat16" and device.type == "cpu":
        name = "float32" if bfloat16_obstacle() else name
    return next(dtype for dtype in DTYPES if str(dtype) == f"torch.{name}")


def log_dtype(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> None:
    """Say it where a CPU's lack of arithmetic for bfloat16 decides the dtype, or costs time."""
    if not (reason := bfloat16_obstacle()):
        return
    if dtype == torch.bfloat16:
        log.warning("products in bfloat16 will be slow (%s); float32 is faster here", reason)
    elif dtype == torch.float32 and config.dtype != "float32" and model.dtype != "float32":
        log.info("computing in float32, which is faster here than bfloat16: %s", reason)


def choose_cache_dtype(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
) -> torch.dtype:
    """The dtype of keys and values that `config.kv_cache_dtype` means for this model."""
    wanted = config.kv_cache_dtype
    reason = int8_cache_obstacle(model.head_dim, page_size)
    if device.type != "cpu" or config.attention_backend == "sdpa" or dtype != torch.bfloat16:
        reason = "it needs a CPU and the native attention, in bfloat16"
    if reason and wanted == "int8":
        raise ConfigError("kv_cache_dtype", f"'int8' is not possible: {reason}; use 'auto'")
    if reason or wanted == "model":
        return dtype
    pays = model.head_dim >= LARGE_HEAD or chosen_instruction_set() != "amx"
    pays &= config.weight_format is not None
    return torch.int8 if pays or wanted == "int8" else dtype


def default_threads(spare: int = 0) -> int:
    """OMP_NUM_THREADS where it is set, else the physical cores this process may use but `spare`.

    Hyper-threads are not counted: two of them share one arithmetic unit.
    """
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = set()
    for cpu in allowed or ():
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            return max(1, len(allowed or ()) - spare)
    return max(1, (len(cores) or (os.cpu_count() or 2) // 2) - spare)


def keep_freed_memory() -> None:
    """Let the C library keep what the tensors of a step give back for those of the next one.

    By default glibc hands large blocks back to the operating system at once, and the next step's
    page faults cost a tenth of its time. Blocks above 32 MiB (weights) still go back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 512 << 20)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can still be taken (main memory: without swapping)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _proc_status("/proc/meminfo", "MemAvailable:")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return free


def used_bytes(device: torch.device) -> int | None:
    """Memory that this process has taken: of a GPU, else main memory."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return resident_bytes()


def resident_bytes() -> int | None:
    """Memory this process holds now that is not backed by a file; None where nobody tells."""
    return _proc_status("/proc/self/status", "RssAnon:")


def _proc_status(file: str, key: str) -> int | None:
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
