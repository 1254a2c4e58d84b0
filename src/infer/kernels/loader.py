"""Loading the compiled C++ kernels (attention, linear, rotary, draw) through ctypes.

The package can be installed without a compiler. Then `available()` says so, attention uses
`SDPABackend`, and `make_linear` uses torch's products. The kernels have threads of their own
(`csrc/threads.cpp`), as many as torch is told to use. The instruction set is the best that the CPU
has, or the one that `INFER_ISA` names (`INSTRUCTION_SETS`); all kernels obey it. With
`INFER_ISA=none` there are no kernels. Signatures and records are read from `csrc/abi.h`. Pointers
are raw addresses here: `attention.cpu` and `kernels.linear` keep the memory alive.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ISA_VARIABLE = "INFER_ISA"
"""Environment variable that names the instruction set for all kernels, or is `NO_KERNELS`."""
NO_KERNELS = "none"
"""With this value a process computes as if the kernels had not been compiled."""
X86_SETS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")
"""Names of the instruction sets of x86-64, best first."""
ARM_SETS = ("neon_i8mm_bf16", "neon_dotprod", "neon")
"""Names of the instruction sets of 64-bit ARM, best first."""
INSTRUCTION_SETS = (*X86_SETS, *ARM_SETS, "portable")
"""Names of all instruction sets, best first. `portable` runs on every CPU."""
ABI = Path(__file__).parents[1] / "csrc" / "abi.h"
"""File with the signatures and records of the C interface."""

STRIP = 16
"""Number of cells of an int8 KV cache that are interleaved."""
SCALE_BYTES = 4
"""Size of the scale of an int8 key or value, in bytes; it is stored with the D numbers."""
POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, for which `mmap` has no name: allocate pages as by a write."""
HUGE_PAGE = 2 << 20
"""Size of a huge page of the system, in bytes."""
_POINTER = ctypes.c_void_p
_TYPES = {  # of C: (ctypes' type, code of `struct`)
    "void": (None, ""),
    "int": (ctypes.c_int, "i"),
    "long": (ctypes.c_long, "q"),
    "int64_t": (ctypes.c_int64, "q"),
    "uint64_t": (ctypes.c_uint64, "Q"),
    "float": (ctypes.c_float, "f"),
    "double": (ctypes.c_double, "d"),
}


def _type_of(declaration: str) -> tuple[type | None, str]:
    """Of `const float* x`, `long M` or a result: ctypes' type and the code of `struct`."""
    if "*" in declaration:
        is_text = declaration.strip() == "const char*"  # a result; parameters have names
        return (ctypes.c_char_p if is_text else _POINTER), "P"
    return _TYPES[declaration.split()[0]]


@functools.cache
def _interface() -> str:
    """The declarations of `abi.h` without comments and preprocessor lines."""
    text = re.sub(r"//[^\n]*|^#[^\n]*", "", ABI.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return text.replace('extern "C" {', "")


@functools.cache
def records() -> dict[str, struct.Struct]:
    """Layouts of the records in `abi.h`, by name; fields are in the order of their declaration."""
    return {
        name: struct.Struct("".join(_type_of(field)[1] for field in fields.split(";")[:-1]))
        for name, fields in re.findall(r"struct (\w+) \{(.*?)\};", _interface(), re.DOTALL)
    }


def _declare(library: ctypes.CDLL) -> None:
    """Set the types of all functions; `AttributeError` if the library lacks one."""
    functions = re.findall(r"([\w *]+?)(infer_\w+)\((.*?)\);", _interface(), re.DOTALL)
    for result, name, arguments in functions:
        function = getattr(library, name)
        function.restype = _type_of(result.strip())[0]
        parameters = [] if arguments == "void" else arguments.split(",")
        function.argtypes = [_type_of(parameter)[0] for parameter in parameters]


def library_file() -> Path:
    """The file of the compiled kernels, which may be absent."""
    return Path(__file__).with_name("_kernels.so")


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, or the reason why it cannot be used."""
    if os.environ.get(ISA_VARIABLE) == NO_KERNELS:
        return f"{ISA_VARIABLE}={NO_KERNELS} leaves the CPU kernels out"
    file = library_file()
    if not file.exists():
        return (
            "the CPU kernels were not compiled when this package was installed (they need a C++"
            " compiler; install one and reinstall)"
        )
    try:
        library = ctypes.CDLL(str(file))
        _declare(library)
        digest = library.infer_abi_digest()
    except (OSError, AttributeError) as error:
        return f"{file.name} cannot be loaded: {error}; reinstall the package"
    if digest.decode() != hashlib.sha256(ABI.read_bytes()).hexdigest():
        return f"{file.name} was built from other sources; reinstall the package"
    return library


def loaded() -> ctypes.CDLL:
    """The library; `RuntimeError` with the reason if it cannot be used."""
    if isinstance(functions := library(), str):
        raise RuntimeError(functions)
    return functions


class NativeCall:
    """A call of the library whose arguments are made before it is due.

    Arguments are addresses. Finding them takes the interpreter longer than a small kernel takes,
    since each layer's weights displace the interpreter's data from the CPU's caches. So whoever
    works one step ahead makes the calls of a step while the step before is being computed.
    """

    __slots__ = ("_arguments", "_function", "_kept")

    def __init__(self, function: Callable[..., Any], *arguments: Any, kept: object) -> None:
        """`kept`: the memory that the arguments are addresses of."""
        self._function, self._arguments, self._kept = function, arguments, kept

    def __call__(self) -> Any:
        """Call the function; returns its result."""
        return self._function(*self._arguments)


def page_aligned(num_bytes: int) -> torch.Tensor:
    """Zeros [num_bytes], uint8, aligned to a huge page (2 MiB) on Linux.

    The system allocates the memory when it is first written. Alignment makes reading packed weights
    2 % faster and attention in decoding 3 to 13 %, since a cell's lines are the CPU's cache lines.
    """
    import torch  # a plan of memory does without

    if sys.platform != "linux":
        return torch.zeros(num_bytes, dtype=torch.uint8)
    mapping, first = mapped(num_bytes)
    return torch.frombuffer(mapping, dtype=torch.uint8)[first:][:num_bytes]


def mapped(num_bytes: int) -> tuple[mmap.mmap, int]:
    """(memory of Linux in which there are `num_bytes` from a huge page on, their offset).

    Tensors that are made of it keep it."""
    import torch

    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE_PAGE
    advise(memory, mmap.MADV_HUGEPAGE, first, num_bytes // HUGE_PAGE * HUGE_PAGE)
    return mapping, first


def advise(
    tensor: torch.Tensor, advice: int, first_byte: int = 0, num_bytes: int | None = None
) -> bool:
    """Call `madvise` for the whole pages inside a contiguous tensor; whether it succeeded.

    With `first_byte` and `num_bytes` only that part of the tensor is advised.
    """
    end = tensor.nbytes if num_bytes is None else min(first_byte + num_bytes, tensor.nbytes)
    if tensor.device.type != "cpu":
        return False
    return advise_range(tensor.data_ptr() + first_byte, end - first_byte, advice)


def advise_range(first: int, num_bytes: int, advice: int) -> bool:
    """Call `madvise` for the whole pages of memory from the address `first` on; whether it
    succeeded."""
    begin = first + -first % mmap.PAGESIZE
    length = (first + num_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if os.name != "posix" or length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice) == 0)


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this machine can run, best first; () without the library."""
    if isinstance(loaded := library(), str):
        return ()
    names = ctypes.create_string_buffer(256)
    is_amd = loaded.infer_instruction_sets(names, len(names))
    sets = names.value.decode().split()
    if not is_amd and "avx512_bf16" in sets:
        # Intel's vdpbf16ps has a quarter of the rate of its FMA, so float32 is faster there.
        sets.remove("avx512_bf16")
        sets.insert(sets.index("avx512") + 1, "avx512_bf16")
    return tuple(sets)


def chosen_instruction_set() -> str:
    """The instruction set for new kernels; it is also set for linear layers, rotation and draws.

    `ValueError` if the variable `INFER_ISA` names one that cannot run here.
    """
    sets = instruction_sets()
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted and wanted not in sets:
        raise ValueError(
            f"{ISA_VARIABLE}={wanted!r} does not run here; use {', '.join(sets)}, or {NO_KERNELS}"
        )
    loaded().infer_set_isa((wanted or "amx").encode())
    return wanted or sets[0]


def available() -> str | None:
    """The reason why the kernels cannot be used; None if they can."""
    if isinstance(loaded := library(), str):
        return loaded
    try:
        chosen_instruction_set()
    except ValueError as error:
        return str(error)
    return None


def cell_bytes(head_dim: int, number_bytes: int) -> int:
    """The size of one head's key or value in a KV cache, in bytes.

    `number_bytes`: the size of a number; one of a byte is int8, with a scale.
    """
    return head_dim * number_bytes + (SCALE_BYTES if number_bytes == 1 else 0)


def int8_cache_obstacle(head_dim: int, page_size: int) -> str | None:
    """The reason why the KV cache cannot be int8 here; None if it can."""
    if head_dim not in (64, 128, 256):
        return f"int8 caches are for head sizes of 64, 128 and 256, not {head_dim}"
    if page_size % STRIP:
        return f"int8 caches are for pages of a multiple of {STRIP} tokens, not {page_size}"
    return available()
