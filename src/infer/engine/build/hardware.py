"""The machine, and the settings that depend on it: device, dtype, threads, free memory

Used by `engine.build.memory_plan` and `engine.build.assemble`. Its functions read the operating
system; `make_products_invariant` changes settings of this process. torch is imported where a GPU is
asked about, and where a caller wants its types: a plan for a CPU does without.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from infer.config import EngineConfig
from infer.engine.build.processors import Cpu, Numa, Processors, may_have_gpu, read_processors
from infer.errors import ConfigError
from infer.kernels.loader import chosen_instruction_set, int8_cache_obstacle
from infer.kernels.native import bfloat16_obstacle, quantization_obstacle
from infer.main_memory import available_bytes, proc_bytes
from infer.models.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LARGE_HEAD = 128
"""Smallest head dimension for which an int8 cache is the default on AMX. Steps of many sequences
then read half the bytes, and prefill's attention is a tenth slower; with a head dimension of 64 it
is half as slow again. On vectors (no AMX) prefill is no slower with any head dimension."""
NUMBER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}
"""Dtypes of weights, activations and caches, each with the size of a number in bytes."""


def has_bfloat16(device: torch.device | Cpu) -> bool:
    """Whether a device multiplies in bfloat16 natively (CUDA devices before Ampere emulate it)."""
    if isinstance(device, Cpu) or device.type != "cuda":
        return True
    import torch

    return torch.cuda.get_device_capability(device) >= (8, 0)


def default_seats(device: torch.device | Cpu) -> int:
    """Default maximum of sequences in a batch; a GPU needs more of them to be busy."""
    return 256 if device.type == "cuda" else 32


def planned_device(config: EngineConfig) -> torch.device | Cpu:
    """The same as `choose_device`, without torch where that is enough to say that it is the CPU."""
    has_torch = "torch" in sys.modules
    is_cpu = config.device == "cpu" or (config.device == "auto" and not may_have_gpu())
    return Cpu() if is_cpu and not has_torch else choose_device(config)


def choose_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means on this machine; raises `ConfigError` if it is absent.

    With `batch_invariant` it also sets up cuBLAS, which must happen before CUDA is used.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if config.batch_invariant and has_cuda and config.device != "cpu":
        make_products_invariant()
    if not config.device.startswith("cuda"):
        return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
    asked = f"{config.device!r} was asked for, but torch finds"
    if not has_cuda:
        raise ConfigError("device", f"{asked} no CUDA device here")
    device, count = torch.device(config.device), torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError("device", f"{asked} {count} CUDA devices here, the first one is cuda:0")
    return device


def make_products_invariant() -> None:
    """Keep cuBLAS from splitting a sum between thread blocks; call it before the first product.

    With almost no workspace, cuBLAS has no place for partial sums. vLLM does the same."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The same as `planned_dtype`, as torch has it."""
    import torch

    dtype: torch.dtype = getattr(torch, planned_dtype(config, model, device))
    return dtype


def planned_dtype(config: EngineConfig, model: ModelConfig, device: torch.device | Cpu) -> str:
    """The dtype of activations, cache and unquantised weights that `config.dtype` means.

    One of `NUMBER_BYTES`. Raises `ConfigError` if a quantised format is not possible on this
    machine.
    """
    if config.weight_format:
        check_quantization(config, device)
        return "float32" if device.type == "cpu" and bfloat16_obstacle() else "bfloat16"
    name = model.dtype if config.dtype == "auto" else config.dtype
    if config.dtype == "auto" and name == "bfloat16" and not has_bfloat16(device):
        log.warning("this device has no bfloat16 arithmetic: computing in float16")
        name = "float16"
    if config.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "bfloat16"  # float16 arithmetic is slow on CPUs or missing
    if config.dtype == "auto" and name == "bfloat16" and device.type == "cpu":
        name = "float32" if bfloat16_obstacle() else name
    return name


def check_quantization(config: EngineConfig, device: torch.device | Cpu) -> None:
    """`ConfigError` if layers cannot be held in the format that `config` asks for on a device."""
    if (quantization := config.weight_format) is None:
        return
    setting = "quantization" if config.quantization else "dtype"
    if quantization == "int4" and device.type != "cpu":
        raise ConfigError(
            setting, f"'int4' runs on CPUs, not on {device.type}; use int8, or device='cpu'"
        )
    if isinstance(device, Cpu) or device.type == "cpu":
        reason = quantization_obstacle(quantization)
    else:
        from infer.kernels import cuda

        reason = cuda.obstacle(device)
    if reason:
        raise ConfigError(
            setting, f"{quantization!r} is not possible here: {reason}; use dtype='auto'"
        )


def log_dtype(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> None:
    """Log it if the CPU lacks fast bfloat16 products and that changes the dtype or costs time."""
    import torch

    if not (reason := bfloat16_obstacle()):
        return
    if dtype == torch.bfloat16:
        log.warning("products in bfloat16 will be slow (%s); float32 is faster here", reason)
    elif dtype == torch.float32 and config.dtype != "float32" and model.dtype != "float32":
        log.info("computing in float32, which is faster here than bfloat16: %s", reason)


def choose_cache_dtype(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    device: torch.device | Cpu,
    page_size: int,
) -> str:
    """The dtype of keys and values that `config.kv_cache_dtype` means for this model.

    `dtype` is that of activations, `page_size` is in tokens. One of `NUMBER_BYTES`. Raises
    `ConfigError` if int8 was asked for and is not possible.
    """
    wanted = config.kv_cache_dtype
    reason = int8_cache_obstacle(model.head_dim, page_size)
    if device.type != "cpu" or config.attention_backend == "sdpa" or dtype != "bfloat16":
        reason = "it needs a CPU and the native attention, in bfloat16"
    if reason and wanted == "int8":
        raise ConfigError("kv_cache_dtype", f"'int8' is not possible: {reason}; use 'auto'")
    if reason or wanted == "model":
        return dtype
    pays = model.head_dim >= LARGE_HEAD or chosen_instruction_set() != "amx"
    pays &= config.weight_format is not None
    return "int8" if pays or wanted == "int8" else dtype


def num_threads(config: EngineConfig, spare: int = 0, processors: Processors | None = None) -> int:
    """The number of threads of an engine with these settings; for the rest see `default_threads`.

    Raises `ConfigError` for more than this machine can use: each takes memory and system limits,
    and what fails for want of them would be told as something else.
    """
    if config.num_threads is None:
        return default_threads(spare, config.numa, processors)
    most = max(64, 4 * (os.cpu_count() or 1))
    if config.num_threads > most:
        raise ConfigError(
            "num_threads",
            f"must be at most {most} on this machine, which has {os.cpu_count()} processors; not"
            f" {config.num_threads}",
        )
    return config.num_threads


def default_threads(
    spare: int = 0, numa: Numa = "auto", processors: Processors | None = None
) -> int:
    """Default number of threads: OMP_NUM_THREADS if set, else the cores that `Processors` chooses,
    less `spare`. `processors`: the machine's, where they have been read."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return (processors or read_processors()).num_threads(spare, numa)


def free_bytes(device: torch.device | Cpu, share: float | None = None) -> int:
    """Bytes of the device's memory that are free; of main memory, those available without swapping
    and within the limits of the process's control groups.

    `share`: fraction of a GPU's whole memory beyond which this process may take nothing."""
    if isinstance(device, Cpu) or device.type != "cuda":
        return available_bytes()
    import torch

    torch.cuda.empty_cache()  # what torch keeps for later does not count as free
    free, total = torch.cuda.mem_get_info(device)
    if share is not None:
        free = min(free, int(share * total) - torch.cuda.memory_allocated(device))
    return max(0, int(free))


def used_bytes(device: torch.device) -> int | None:
    """Bytes that this process uses: of the GPU's memory, else of main memory; None if unknown."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    return resident_bytes()


def resident_bytes() -> int | None:
    """Bytes of main memory that this process holds and that no file backs; None if the operating
    system does not say."""
    return proc_bytes("/proc/self/status", "RssAnon:")
