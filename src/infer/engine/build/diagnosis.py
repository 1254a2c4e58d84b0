"""`diagnose`: what this machine has, what an engine makes of it, and what would make it faster"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from infer.config import EngineConfig
from infer.control_groups import ROOT, memory_limit, text_of_file
from infer.engine.build import hardware
from infer.engine.build.exactness import trade_of
from infer.engine.build.placement import PINNED_FROM
from infer.engine.build.processors import Processors, read_processors
from infer.engine.build.server_memory import kept_bytes
from infer.errors import ConfigError
from infer.kernels import loader
from infer.kernels.blocks import NUMBERS
from infer.kernels.cuda import obstacle as cuda_obstacle
from infer.kernels.native import bfloat16_obstacle, native_obstacle, products, quantization_obstacle
from infer.main_memory import available_bytes, gib
from infer.version import VERSION

FEATURES = (
    *("sse4_1", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""Names of the instructions that kernels are written for, as Linux names them."""

BUSY_PERCENT = 25
"""Share of the last minute in which a process waited for a core that is worth an advice."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis."""

    subject: str
    state: str
    """What is there, or what will be used."""
    advice: str = ""
    """What would make an engine faster here; empty if nothing would."""


def diagnose(config: EngineConfig, root: Path = ROOT) -> list[Finding]:
    """What an engine with these settings finds on this machine. No model is read.

    `root`: folder below which the operating system's files are read."""
    processors = read_processors(root)
    device = hardware.choose_device(config)
    return [
        Finding("infer", _versions()),
        _processor(root),
        _cores(processors),
        _memory(device, root),
        _gpu(device, root),
        _kernels(),
        _linear_layers(),
        _dtype(),
        _cache(),
        _threads(config, processors),
        _company(root),
    ]


def as_dicts(findings: list[Finding]) -> list[dict[str, str]]:
    """The findings for a JSON document."""
    return [asdict(finding) for finding in findings]


def _versions() -> str:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"{VERSION}, Python {platform.python_version()}, torch {torch.__version__}, {system}"


def _processor(root: Path) -> Finding:
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return Finding("processor", platform.processor() or platform.machine())
    entries = [line.partition(":") for line in lines]
    fields = {key.strip().lower(): value.strip() for key, _, value in reversed(entries)}
    flags = fields.get("flags", fields.get("features", "")).split()
    has = " ".join(feature for feature in FEATURES if feature in flags)
    name = fields.get("model name", platform.machine())
    return Finding("processor", f"{name}: {has or 'no instructions that kernels are written for'}")


def _cores(processors: Processors) -> Finding:
    if not processors.cores:
        return Finding("cores", f"about {processors.num_others}")
    slow = sum(core.is_efficient for core in processors.cores)
    parts = [f"{len(processors.cores)} that this process may use"]
    if slow:
        parts.append(f"{slow} of them efficiency cores, which take part in prompts only")
    if len(processors.nodes) > 1:
        parts.append(f"on {len(processors.nodes)} NUMA nodes")
    if len(processors.sockets) > 1:
        parts.append(f"of {len(processors.sockets)} sockets")
    advice = ""
    if processors.quota is not None:
        parts.append(f"with a CPU quota of {processors.quota:g} cores")
        if processors.quota < len(processors.cores):
            advice = "a larger CPU quota of the container"
    return Finding("cores", ", ".join(parts), advice)


def _memory(device: torch.device, root: Path) -> Finding:
    limit = memory_limit(root)
    text = f"{gib(available_bytes(root))} free for a server's processes, weights and KV cache"
    if limit is not None:
        kept = gib(kept_bytes(limit))
        text += f"; the container's limit is {gib(limit)}, of which {kept} are left to others"
    try:
        huge = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return Finding("memory", text)
    advice = ""
    if "[never]" in huge and device.type == "cpu":
        text += ", no huge pages"
        advice = "huge pages: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("memory", text, advice)


def _gpu(device: torch.device, root: Path) -> Finding:
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(device if device.type == "cuda" else 0)
        if device.type != "cuda":
            return Finding("GPU", f"{name}, not used", "the GPU (--device cuda)")
        reason = cuda_obstacle(device)
        if reason:
            return Finding("GPU", f"{name}, without the Triton kernels", reason)
        return Finding("GPU", f"{name}, with the Triton kernels")
    if (root / "proc/driver/nvidia/version").exists():
        return Finding("GPU", "one is there, but this torch cannot use it", "torch with CUDA")
    return Finding("GPU", "none")


def _kernels() -> Finding:
    if reason := loader.available():
        return Finding("kernels", f"torch's own: {reason}", "the package's native kernels")
    chosen, sets = loader.chosen_instruction_set(), loader.instruction_sets()
    others = f" (this machine also runs {', '.join(sets[1:])})" if sets[1:] else ""
    if chosen != sets[0]:
        variable = f"{loader.ISA_VARIABLE}={chosen}"
        state = f"native, {chosen}, because {variable} is set"
        return Finding("kernels", state, f"{sets[0]}: unset {loader.ISA_VARIABLE}")
    return Finding("kernels", f"native, {chosen}{others}")


def _linear_layers() -> Finding:
    if reason := native_obstacle():
        return Finding("linear layers", f"torch's: {reason}")
    return Finding("linear layers", products("bfloat16", None))


def _dtype() -> Finding:
    formats = "int8 and int4 are possible"
    if native_obstacle() is None:
        formats += f"; GGUF files keep {', '.join(NUMBERS)}"
    obstacles = {
        quantization: quantization_obstacle(quantization) for quantization in ("int8", "int4")
    }
    if reason := obstacles["int8"]:
        formats = f"int8 and int4 are not possible: {reason}"
    elif reason := obstacles["int4"]:
        formats = f"int8 is possible, int4 is not: {reason}"
    advice = "; ".join(
        _narrower(quantization) for quantization, reason in obstacles.items() if not reason
    )
    if reason := bfloat16_obstacle():
        state = f"float32, as bfloat16 is slower here: {reason}; {formats}"
        return Finding("dtype", state, advice)
    return Finding("dtype", f"bfloat16; {formats}", advice)


def _narrower(weight_format: str) -> str:
    return f"weights in {weight_format} (--dtype {weight_format}): {trade_of(weight_format)}"


def _cache() -> Finding:
    if reason := loader.int8_cache_obstacle(128, loader.STRIP):
        return Finding("KV cache", f"as the model's dtype; int8 is not possible: {reason}")
    return Finding("KV cache", "as the model's dtype, or int8")


def _threads(config: EngineConfig, processors: Processors) -> Finding:
    if config.num_threads is not None:
        return Finding("threads", f"{config.num_threads}, as num_threads says")
    count = hardware.default_threads(numa=config.numa, processors=processors)
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        usual = processors.num_threads(numa=config.numa)
        advice = f"{usual} threads: unset OMP_NUM_THREADS" if usual > count else ""
        return Finding("threads", f"{count}, as OMP_NUM_THREADS says", advice)
    advice = ""
    if len(processors.sockets) > 1 and config.numa == "auto":
        num = len(processors.sockets)
        advice = f"an engine on each of the {num} sockets: --replicas {num}"
    elif len(processors.nodes) > 1 and config.numa == "one":
        advice = "all nodes of the socket: --numa auto"
    state = f"{count}; one less beside the server for a small model"
    if count >= PINNED_FROM:
        state = f"{count - 1}, one on each core; one core is for the rest of the server"
    return Finding("threads", state, advice)


def _company(root: Path) -> Finding:
    """Whether processes wait for cores, as Linux's pressure statistics say it."""
    words = text_of_file(root / "proc/pressure/cpu").replace("=", " ").split()
    if words[3:4] != ["avg60"]:
        return Finding("other processes", "the system does not say whether they need the cores")
    percent = float(words[4])
    state = f"there was a wait for a core in {percent:.0f} % of the last minute"
    many = "cores that others do not need; until then fewer threads are used where that helps"
    return Finding("other processes", state, many if percent >= BUSY_PERCENT else "")


def check_instruction_set() -> None:
    """Raise `ConfigError` if `INFER_ISA` or `INFER_LINEAR` names what this CPU lacks."""
    try:
        if not isinstance(loader.library(), str):
            loader.chosen_instruction_set()
        native_obstacle()
    except ValueError as error:
        raise ConfigError("environment", str(error)) from None
