"""The compiled kernels (attention, linear, rotary, draw): found, loaded through ctypes and typed.

The package installs without a compiler; then `available()` says so and the caller uses
`SDPABackend`, and `make_linear` torch's products. Threads are those of the OpenMP runtime that
torch brings: its `GOMP_parallel` is handed to the kernels, because a second pool on the same cores
makes both slow. The instruction set is the best that the CPU has, or what `INFER_ISA` says
(portable, avx2, avx512, avx512_bf16, amx): all kernels obey it. Pointers are raw addresses here:
`attention.cpu` and `linear` keep what they point to alive.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from pathlib import Path

import torch

ISA_VARIABLE = "INFER_ISA"
VERSION = 10
"""Of the C interface: a library that was left over from other sources is not used."""

INT8_CACHES = ("amx", "avx512_bf16")
"""the code paths that have them"""
STRIP = 16
"""cells of an int8 KV cache that lie as one"""
SCALE_BYTES = 4
"""beside the D numbers of an int8 key or value"""
POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, for which `mmap` has no name: pages come as by a first write."""
_HUGE_PAGE = 2 << 20
_POINTER = ctypes.c_void_p
_TYPES = {
    **{"i": ctypes.c_int, "l": ctypes.c_long, "u": ctypes.c_uint64, "f": ctypes.c_float},
    **{"p": _POINTER, "s": ctypes.c_char_p, "-": None},
}
_SIGNATURES = {  # result, arguments
    "infer_attention_isas": ("i", "si"),
    "infer_set_isa": ("-", "s"),
    "infer_attention_new": ("p", "siiilifpip"),
    "infer_attention_free": ("-", "p"),
    "infer_attention_plan": ("i", "pippppli"),
    "infer_attention_attend": ("-", "pipppppplllppppf"),
    "infer_linear_runs_here": ("i", "i"),
    "infer_linear_packed_bytes": ("l", "llii"),
    "infer_linear_new": ("p", "plliiiippfp"),
    "infer_linear_free": ("-", "p"),
    "infer_linear_pack": ("-", "ppllli"),
    "infer_linear": ("-", "pplppli"),
    "infer_draw": ("-", "pplllslppi"),
    "infer_layers": ("-", "pppippfppllllli"),
    "infer_read": ("u", "plpi"),
}


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    found = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not found:
        return (
            "the CPU kernels were not compiled when this package was installed (they need a C++"
            " compiler; install one and reinstall)"
        )
    try:
        library = ctypes.CDLL(str(found[0]))
        version = library.infer_kernels_version()
    except (OSError, AttributeError) as error:
        return f"{found[0].name} cannot be loaded: {error}"
    if version != VERSION:
        return f"{found[0].name} was built from other sources; reinstall the package"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = _TYPES[result], [_TYPES[each] for each in arguments]
    return library


def loaded() -> ctypes.CDLL:
    """The library where there is one; `RuntimeError` with the reason."""
    if isinstance(found := library(), str):
        raise RuntimeError(found)
    return found


def page_aligned(num_bytes: int) -> torch.Tensor:
    """Zeros, for which Linux finds memory when they are written; they begin on a huge page. So
    reading packed weights takes 2 % less time and decode's attention 3 to 13 %: no line of a cell
    lies in two of the CPU's."""
    if sys.platform != "linux":
        return torch.zeros(num_bytes, dtype=torch.uint8)
    own = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(own, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _HUGE_PAGE :][:num_bytes]
    advise(memory[: num_bytes // _HUGE_PAGE * _HUGE_PAGE], mmap.MADV_HUGEPAGE)
    return memory


def advise(
    tensor: torch.Tensor, advice: int, first_byte: int = 0, num_bytes: int | None = None
) -> bool:
    """`madvise` for the whole pages under a contiguous tensor, or under `num_bytes` of it from
    `first_byte` on; whether the system took it."""
    end = tensor.nbytes if num_bytes is None else min(first_byte + num_bytes, tensor.nbytes)
    first = tensor.data_ptr() + first_byte
    begin = first + -first % mmap.PAGESIZE
    length = (tensor.data_ptr() + end - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if os.name != "posix" or tensor.device.type != "cpu" or length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice) == 0)


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """The code paths this machine can run, best first; empty without the library."""
    if isinstance(loaded := library(), str):
        return ()
    names = ctypes.create_string_buffer(256)
    is_amd = loaded.infer_attention_isas(names, len(names))
    sets = names.value.decode().split()
    if not is_amd and "avx512_bf16" in sets:
        # Intel's vdpbf16ps runs at a quarter of the rate of its FMA: float32 is faster there.
        sets.remove("avx512_bf16")
        sets.insert(sets.index("avx512") + 1, "avx512_bf16")
    return tuple(sets)


def chosen_instruction_set() -> str:
    """The code path for new kernels; `ValueError` if the environment asks for an impossible one.

    Linear layers, rotation and draws keep to it from now on, too."""
    sets = instruction_sets()
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted and wanted not in sets:
        raise ValueError(f"{ISA_VARIABLE}={wanted!r} does not run here; use {', '.join(sets)}")
    loaded().infer_set_isa((wanted or "amx").encode())
    return wanted or sets[0]


def available() -> str | None:
    """None if the kernel can be used, else the reason."""
    if isinstance(loaded := library(), str):
        return loaded
    try:
        chosen_instruction_set()
    except ValueError as error:
        return str(error)
    return None


def cell_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Of one head's key or value in a KV cache."""
    return head_dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)


def int8_cache_obstacle(head_dim: int, page_size: int) -> str | None:
    """Why there can be no KV cache in int8 here; None if it can be."""
    if head_dim not in (64, 128, 256):
        return f"int8 caches are for head sizes of 64, 128 and 256, not {head_dim}"
    if page_size % STRIP:
        return f"int8 caches are for pages of a multiple of {STRIP} tokens, not {page_size}"
    if (reason := available()) is None and (isa := chosen_instruction_set()) not in INT8_CACHES:
        return f"int8 caches are for CPUs with {' or '.join(INT8_CACHES)}, not {isa}"
    return reason


@functools.cache
def parallel() -> int | None:
    """Address of `GOMP_parallel` in torch's own runtime; None: the kernel starts threads itself."""
    try:
        # Symbols are looked up in a library's dependencies too, whatever their files are called.
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, _POINTER).value
    except (OSError, AttributeError):
        return None
