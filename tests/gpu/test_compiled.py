"""Every kernel compiled for devices that are not here: spills, shared memory, tensor cores.

The wrappers are called with tensors without memory, and each launch is compiled instead of made:
so what is looked at has the constants, types and options that serving has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import infer.attention.triton as backends  # noqa: E402
from infer.attention.layout import BatchLayout  # noqa: E402
from infer.attention.triton import TritonBackend  # noqa: E402
from infer.kernels.cuda import draw, int8, linear, norm, rotary, step  # noqa: E402
from infer.kernels.cuda.launch import compiled_together  # noqa: E402
from infer.kernels.linear.fusion import Norm  # noqa: E402
from infer.kernels.rotary import HeadNorms, QKRotation  # noqa: E402

BF16 = torch.bfloat16
META = torch.device("meta")
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
"""Of a block, by compute capability."""
MAX_STACK = 224
"""Bytes of a thread. Tiles were chosen by the clock; one version of Triton or another then keeps a
few registers of the largest in memory (3.9: 216 bytes for 64 streams of Qwen3 0.6B, 168 of Llama
3.2 3B). A tile that is too large takes many hundreds."""
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_KINDS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass
class Compiled:
    """A kernel as a device would get it."""

    name: str
    constants: dict[str, Any]
    shared: int
    ptx: str
    cubin: bytes


def tool(name: str) -> str:
    found = TOOLS / name
    path = str(found) if found.is_file() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is neither in Triton's wheel nor on the path")
    return path


def compiled(fn: Any, args: tuple[Any, ...], settings: dict[str, Any], capability: int) -> Compiled:
    """What a launch with these arguments would compile, as Triton specialises it."""
    names = [p.name for p in fn.params]
    values = {**dict(zip(names, args, strict=False)), **settings}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(fn.params):
        value = values.pop(parameter.name)
        fixed = parameter.do_not_specialize
        kind = "constexpr"
        if isinstance(value, Tensor):
            kind = "*" + _KINDS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (value == 1 and isinstance(value, int) and not fixed):
            constants[parameter.name] = value
        elif isinstance(value, int):
            kind = "i32"
            if value % 16 == 0 and not fixed:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            kind = "fp32"
        signature[parameter.name] = kind
    source = ASTSource(fn, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=values)
    asm = made.asm
    return Compiled(fn.fn.__name__, constants, made.metadata.shared, asm["ptx"], asm["cubin"])


@contextmanager
def compiling(capability: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """Launches are compiled for a device and not made; the list has them."""
    made: list[Compiled] = []
    tool("ptxas")

    def run(fn: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        made.append(compiled(fn, args, settings, capability))

    def has_pdl(device: torch.device) -> bool:
        return capability >= 90

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        for module in (draw, int8, linear, norm, step):
            patch.setattr(module, "has_pdl", has_pdl)
        patch.setattr(linear, "_shared_bytes", lambda device: SHARED_BYTES[capability])
        yield made


def check(made: list[Compiled], capability: int, folder: Path) -> None:
    assert made
    for kernel in made:
        what = f"{kernel.name} {kernel.constants}"
        assert kernel.shared <= SHARED_BYTES[capability], f"{what}: {kernel.shared} bytes"
        path = folder / "kernel.cubin"
        path.write_bytes(kernel.cubin)
        usage = subprocess.run(
            [tool("cuobjdump"), "-res-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
        )
        stacks = [int(n) for n in re.findall(r"STACK:(\d+)", usage.stdout)]
        assert stacks, usage.stdout
        assert max(stacks) <= MAX_STACK, f"{what}: {usage.stdout}"
        assert "griddepcontrol" not in kernel.ptx or capability >= 90, what


# What is compiled, by the shapes of models.

# query heads, key heads, head size, norms of heads, window
ATTENTION = {
    "Qwen3 0.6B": (16, 8, 128, True, None),
    "Llama 3.2 1B": (32, 8, 64, False, None),
    "Llama 3.2 3B": (24, 8, 128, False, None),
    "Gemma 3 1B": (4, 1, 256, True, 512),
    "GPT-2": (12, 12, 64, None, None),
}
STEPS = {
    "one stream": [(500, 1)],
    "8 streams": [(500, 1)] * 8,
    "64 streams": [(500, 1)] * 64,
    "prompts": [(0, 1024), (300, 1), (10, 3)],
}


def attention(
    model: str, chunks: list[tuple[int, int]], pdl: bool, *, ordered: bool = False
) -> None:
    heads, groups, size, norms, window = ATTENTION[model]
    caches = [torch.empty(64, 16, groups, size, dtype=BF16, device=META) for _ in range(2)]
    backend = TritonBackend(
        caches[:1], caches[1:], num_heads=heads, scale=0.1, windows=[window], ordered=ordered
    )
    backend._pdl = pdl
    starts, lengths = [0], []
    for start, num in chunks:
        starts.append(starts[-1] + num)
        lengths.append(start + num)
    tokens = starts[-1]
    slots = torch.empty(tokens, dtype=torch.int32, device=META)
    tables = torch.empty(len(chunks), 128, dtype=torch.int64, device=META)
    backend.plan(BatchLayout(starts, lengths, slots, tables))
    qkv = torch.empty(tokens, heads + 2 * groups, size, dtype=BF16, device=META)
    rotation = None
    if norms is not None:
        cos, sin = (torch.empty(tokens, size // 2, device=META) for _ in range(2))
        weight = torch.empty(size, device=META)
        rotation = QKRotation(
            cos, sin, HeadNorms(Norm(weight, 1e-6), Norm(weight, 1e-6)) if norms else None
        )
    q, k, v = qkv.split((heads, groups, groups), 1)
    backend(0, q, k, v, rotation)


def layers(width: int, height: int, gate: str | None, rows: int) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=META)

    linear.few_rows(
        empty(rows, width), empty(height * (2 if gate else 1), width), gate=gate,
        norm=(empty(width), 1e-6) if rows == 1 else None, dtype=BF16,
        residual=None if gate else empty(rows, height),
        scratch=(torch.empty(8, device=META), torch.empty(8, dtype=torch.int32, device=META)),
    )  # fmt: skip


def layers_in_int8(width: int, height: int, gate: str | None, rows: int) -> None:
    outputs = height * (2 if gate else 1)
    whole, row_scales = int8.to_int8(
        torch.empty(rows, width, dtype=BF16, device=META), (torch.empty(width, device=META), 1e-6)
    )
    int8.linear(
        whole, row_scales, torch.empty(outputs, width, dtype=torch.int8, device=META),
        torch.empty(outputs, device=META), gate=gate, dtype=BF16,
        residual=None if gate else torch.empty(rows, height, dtype=BF16, device=META),
    )  # fmt: skip


def draws(vocab: int) -> None:
    def empty(kind: torch.dtype) -> Tensor:
        return torch.empty(16, dtype=kind, device=META)

    draw.draw(
        torch.empty(16, vocab, device=META), draw.DrawBuffers(16, vocab, META),
        temperatures=empty(torch.float32), narrowed=empty(torch.int32), top_ks=empty(torch.int32),
        top_ps=empty(torch.float32), min_ps=empty(torch.float32), seeds=empty(torch.int64),
        positions=empty(torch.int32), tokens=empty(torch.int32), flags=empty(torch.int32),
    )  # fmt: skip


def small() -> None:
    """Norms, gates, rotation and the beginning of a step."""
    x = torch.empty(16, 4096, dtype=BF16, device=META)
    norm.rms_norm(x, torch.empty(4096, device=META), 1e-6, x)
    norm.rms_norm(x[:, :1152], torch.empty(1152, dtype=BF16, device=META), 1e-6)
    for kind in ("silu", "gelu_tanh"):
        norm.gate(x, kind)
    for size in (64, 128, 256):
        q = torch.empty(2, 512, 16, size, dtype=BF16, device=META).transpose(1, 2)
        cos, sin = (torch.empty(512, size, device=META) for _ in range(2))
        rotary.apply_rope(q, q[:, :4], cos, sin)
    whole = torch.empty(512, dtype=torch.int32, device=META)
    step.begin(whole, whole, whole, whole.view(4, 128), (whole, whole, whole[:1]))


Work = Callable[[bool], None]
SHAPES = ((1024, 3072, "silu"), (3072, 1024, None), (2048, 151_936, None))
FEW: dict[str, Work] = {
    "attention of a prompt": lambda pdl: attention("Qwen3 0.6B", STEPS["prompts"], pdl),
}
ALL: dict[str, Work] = {
    "a gate of 16 rows": lambda pdl: layers(1024, 3072, "silu", 16),
    "draws": lambda pdl: draws(151_936),
    "draws of few": lambda pdl: draws(261),
    "small": lambda pdl: small(),
    **{
        f"{model}, {name}{', ordered' if ordered else ''}": (
            lambda pdl, m=model, s=chunks, o=ordered: attention(m, s, pdl, ordered=o)  # type: ignore[misc]
        )
        for model in ATTENTION
        for name, chunks in STEPS.items()
        for ordered in ((False, True) if name == "prompts" else (False,))
    },
    **{
        f"{width} → {height} {gate or ''} of {rows}": (
            lambda pdl, w=width, h=height, g=gate, r=rows: layers(w, h, g, r)  # type: ignore[misc]
        )
        for rows in (1, 4, 32)
        for width, height, gate in SHAPES
    },
    **{
        f"{width} → {height} {gate or ''} of {rows} in int8": (
            lambda pdl, w=width, h=height, g=gate, r=rows: layers_in_int8(w, h, g, r)  # type: ignore[misc]
        )
        for rows in (16, 32)
        for width, height, gate in SHAPES
    },
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was compiled before counts, and nothing is left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.parametrize("name", FEW)
def test_what_matters_most_is_compiled_for_hopper(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with compiling(90, monkeypatch) as made:
        FEW[name](True)
    check(made, 90, tmp_path)
    if name == "attention of a prompt":
        [long] = [kernel for kernel in made if kernel.constants.get("ROWS", 0) > 16]
        assert "wgmma" in long.ptx, "the tile of prompts has lost the tensor cores of Hopper"
        assert "cp.async" in long.ptx


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", [*FEW, *ALL])
def test_everything_is_compiled(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with compiling(capability, monkeypatch) as made:
        launch = FEW[name] if name in FEW else ALL[name]
        launch(capability >= 90)
    check(made, capability, tmp_path)
    if "of 16 in int8" in name:
        [product] = [kernel for kernel in made if kernel.name == "_few_rows"]
        assert ".s8.s8" in product.ptx, "the sums are not those of the matrix units"


class _Hopper:
    """A driver of Triton's for a device that is not here: it can only be compiled for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def test_launches_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    tool("ptxas")
    monkeypatch.setattr(driver, "_active", _Hopper())
    x = torch.ones(16, 1024, dtype=BF16)
    monkeypatch.setattr(norm, "has_pdl", lambda device: True)
    found = {getattr(kernel, "__name__", ""): kernel for kernel in vars(norm).values()}
    kernels = [found["_rms_norm"], found["_gate"]]
    for kernel in kernels:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    threads: set[str] = set()
    compile_ = triton.compiler.compile

    def noted(*args: Any, **settings: Any) -> Any:
        threads.add(threading.current_thread().name)
        return compile_(*args, **settings)

    monkeypatch.setattr(triton.compiler, "compile", noted)
    with compiled_together():
        norm.gate(x, "silu")
        norm.gate(norm.rms_norm(x, torch.ones(1024), 1e-6), "silu")
    made = [list(kernel.device_caches[0][0].values()) for kernel in kernels]
    assert [len(each) for each in made] == [1, 1]
    assert all("griddepcontrol" in each[0].asm["ptx"] for each in made)
    assert threads
    assert threading.current_thread().name not in threads


@pytest.mark.slow
def test_a_tile_that_spills_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = backends._Shape
    monkeypatch.setattr(
        backends, "_Shape", lambda rows, tile, warps, stages: real(rows, tile, 4, 2)
    )
    with compiling(90, monkeypatch) as made:
        attention("Qwen3 0.6B", STEPS["prompts"], True)
    with pytest.raises(AssertionError, match="STACK"):
        check(made, 90, tmp_path)
