"""The machine, and the settings that depend on it: device, dtype, threads, free memory

Used by `engine.build.memory_plan` and `engine.build.assemble`. Its functions read the operating
system; `make_products_invariant` changes settings of this process.
"""

from __future__ import annotations

import logging
import os

import torch

from infer.config import EngineConfig
from infer.engine.build.processors import Numa, read_processors
from infer.errors import ConfigError
from infer.kernels import cuda
from infer.kernels.linear import bfloat16_obstacle, quantization_obstacle
from infer.kernels.loader import chosen_instruction_set, int8_cache_obstacle
from infer.main_memory import available_bytes, proc_bytes
from infer.models.model_config import ModelConfig

log = logging.getLogger(__name__)

LARGE_HEAD = 128
"""smallest head dimension for which an int8 cache is the default on AMX. Steps of many sequences
then read half the bytes, and prefill's attention is a tenth slower; with a head dimension of 64 it
is half as slow again. On vectors (no AMX) prefill is no slower with any head dimension."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""dtypes in which a model can be computed"""


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16 natively (CUDA devices before Ampere emulate it)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def default_seats(device: torch.device) -> int:
    """Default maximum of sequences in a batch; a GPU needs more of them to be busy."""
    return 256 if device.type == "cuda" else 32


def choose_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means on this machine; raises `ConfigError` if it is absent.

    With `batch_invariant` it also sets up cuBLAS, which must happen before CUDA is used.
    """
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
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of activations, cache and unquantised weights that `config.dtype` means.

    Raises `ConfigError` if a quantised format is not possible on this machine.
    """
    if config.weight_format:
        check_quantization(config, device)
        return torch.float32 if device.type == "cpu" and bfloat16_obstacle() else torch.bfloat16
    name = model.dtype if config.dtype == "auto" else config.dtype
    if config.dtype == "auto" and name == "bfloat16" and not has_bfloat16(device):
        log.warning("this device has no bfloat16 arithmetic: computing in float16")
        name = "float16"
    if config.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "bfloat16"  # float16 arithmetic is slow on CPUs or missing
    if config.dtype == "auto" and name == "bfloat16" and device.type == "cpu":
        name = "float32" if bfloat16_obstacle() else name
    return next(dtype for dtype in DTYPES if str(dtype) == f"torch.{name}")


def check_quantization(config: EngineConfig, device: torch.device) -> None:
    """`ConfigError` if layers cannot be held in the format that `config` asks for on a device."""
    if (quantization := config.weight_format) is None:
        return
    setting = "quantization" if config.quantization else "dtype"
    if quantization == "int4" and device.type != "cpu":
        raise ConfigError(
            setting, f"'int4' runs on CPUs, not on {device.type}; use int8, or device='cpu'"
        )
    reason = quantization_obstacle(quantization) if device.type == "cpu" else cuda.obstacle(device)
    if reason:
        raise ConfigError(
            setting, f"{quantization!r} is not possible here: {reason}; use dtype='auto'"
        )


def log_dtype(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> None:
    """Log it if the CPU lacks fast bfloat16 products and that changes the dtype or costs time."""
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
    """The dtype of keys and values that `config.kv_cache_dtype` means for this model.

    `dtype` is that of activations, `page_size` is in tokens. Raises `ConfigError` if int8 was asked
    for and is not possible.
    """
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


def num_threads(config: EngineConfig, spare: int = 0) -> int:
    """The number of threads of an engine with these settings; `spare`: see `default_threads`.

    Raises `ConfigError` for more than this machine can use: each takes memory and system limits,
    and what fails for want of them would be told as something else.
    """
    if config.num_threads is None:
        return default_threads(spare, config.numa)
    most = max(64, 4 * (os.cpu_count() or 1))
    if config.num_threads > most:
        raise ConfigError(
            "num_threads",
            f"must be at most {most} on this machine, which has {os.cpu_count()} processors; not"
            f" {config.num_threads}",
        )
    return config.num_threads


def default_threads(spare: int = 0, numa: Numa = "auto") -> int:
    """Default number of threads: OMP_NUM_THREADS if set, else the cores that `Processors` chooses,
    less `spare`."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return read_processors().num_threads(spare, numa)


def free_bytes(device: torch.device, share: float | None = None) -> int:
    """Bytes of the device's memory that are free; of main memory, those available without swapping
    and within the limits of the process's control groups.

    `share`: fraction of a GPU's whole memory beyond which this process may take nothing."""
    if device.type != "cuda":
        return available_bytes()
    torch.cuda.empty_cache()  # what torch keeps for later does not count as free
    free, total = torch.cuda.mem_get_info(device)
    if share is not None:
        free = min(free, int(share * total) - torch.cuda.memory_allocated(device))
    return max(0, int(free))


def used_bytes(device: torch.device) -> int | None:
    """Bytes that this process uses: of the GPU's memory, else of main memory; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return resident_bytes()


def resident_bytes() -> int | None:
    """Bytes of main memory that this process holds and that no file backs; None if the operating
    system does not say."""
    return proc_bytes("/proc/self/status", "RssAnon:")
