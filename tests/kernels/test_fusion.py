"""Tests of int8 weights and of fused operations: correct, and equal in any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infer.kernels import loader, native
from infer.kernels.invariance import batch_invariance_problem
from infer.kernels.linear import onednn
from infer.kernels.linear.choose import make_linear
from infer.kernels.linear.fusion import Fusion, Linear, Norm
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.linear.onednn import Int8Linear
from infer.kernels.linear.plain_linear import PlainLinear
from tests.support import isas
from tests.support.cases import over

SHAPES = [(16, 2), (33, 34), (64, 64), (100, 258), (513, 96), (2048, 160), (8192, 32)]  # K, N


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix: entry i, j is -1 to the number of bits that i and j have in common."""
    bits = [[(i & j).bit_count() % 2 for j in range(size)] for i in range(size)]
    return 1 - 2 * torch.tensor(bits, dtype=torch.float64)


def turned(rows: Tensor) -> Tensor:
    """The definition of a rotation, in float64: each 64 numbers times H / 8."""
    wide = torch.nn.functional.pad(rows.double(), (0, -rows.shape[1] % 64))
    return (wide.unflatten(1, (-1, 64)) @ hadamard(64) / 8).flatten(1)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of int8: one scale per row, and the largest magnitude becomes 127."""
    most = rows.float().abs().amax(dim=1, keepdim=True)
    return (rows.float() * (torch.tensor(127.0) / most)).round().double(), most.double() / 127


Make = Callable[..., Linear]


@pytest.fixture(params=[*isas.each(loader.INSTRUCTION_SETS), "onednn", "onednn, in halves"])
def make(
    request: pytest.FixtureRequest,
    ask_for: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    ask_for(request.param.partition(",")[0])
    if "halves" in request.param:
        monkeypatch.setattr(onednn, "onednn_is_exact", lambda: False)
    if request.param.startswith("onednn"):
        return Int8Linear
    return lambda weight, *rest: NativeLinear([weight], *rest, bits=8)


@over(("k", "n"), SHAPES)
@over("num_rows", [1, 16, 33, 300])
def test_int8_is_an_exact_sum_between_two_scales(make: Make, k: int, n: int, num_rows: int) -> None:
    weight, x, bias = random(n, k), random(num_rows, k, seed=1), random(n, seed=2)
    (w, w_scales), (a, a_scales) = quantized(turned(weight)), quantized(turned(x))
    exact = (a @ w.T) * a_scales * w_scales.T + bias.double()
    # Numbers halfway between two steps may be rounded either way, by one step of their row.
    edges = (
        4 * (w.abs().sum(1, keepdim=True).T + a.abs().sum(1, keepdim=True)) * a_scales * w_scales.T
    )
    error = (make(weight, bias)(x).double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + edges / k + 1e-6).all()
    assert (error <= 2**-8 * exact.abs() + 1e-5).float().mean() > 0.9


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("num_rows", [1, 33])
def test_int8_without_a_rotation(num_rows: int) -> None:
    """For weights that were calibrated for one scale a row."""
    weight, x = random(96, 513), random(num_rows, 513, seed=1)
    (w, w_scales), (a, a_scales) = quantized(weight), quantized(x)
    exact = (a @ w.T) * a_scales * w_scales.T
    fusion = Fusion(float_out=True)
    found = NativeLinear([weight], None, fusion, bits=8, rotated=False)(x).double()
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_whole_numbers_rows_keep_to_themselves(make: Make) -> None:
    layer, x = make(random(258, 200)), random(400, 200, seed=1)
    alone = torch.cat([layer(row[None]) for row in x])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for num_rows in (2, 15, 17, 33, 65, 300):
            first = num_rows * 7 % (400 - num_rows)
            assert torch.equal(layer(x[first : first + num_rows]), alone[first : first + num_rows])
    bad = x.clone()
    bad[3], bad[7], bad[9] = torch.nan, torch.inf, 0
    some = layer(bad)
    assert not some[[3, 7]].isfinite().any()
    assert (some[9] == 0).all()
    good = [i for i in range(400) if i not in (3, 7, 9)]
    assert torch.equal(some[good], alone[good])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE"])
def test_whole_numbers_are_exact_on_older_cpus(isa: str) -> None:
    """The method for CPUs without VNNI, on which oneDNN's sums of two products saturate."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", here, "-p", "no:cacheprovider", "-k", "onednn"]
    command += ["-m", ""]
    done = subprocess.run(
        command,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


OUTLIERS = torch.ones(320).index_fill_(0, torch.tensor([3, 70, 200]), 60.0)


def test_inputs_that_are_much_larger_do_not_cost_the_others(make: Make) -> None:
    """A few inputs of real models are tens of times larger than the others, in each row."""
    weight, x = (random(96, 320) * 0.1).bfloat16(), (random(30, 320, seed=1) * OUTLIERS).bfloat16()
    exact = x.double() @ weight.double().T
    errors = make(weight, None, Fusion(float_out=True))(x).double() - exact
    a, scales = quantized(x)  # one scale a row without a rotation
    plain = (a * scales) @ weight.double().T - exact
    assert errors.square().mean() < plain.square().mean() / 8


def test_the_largest_products_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of two products that saturate in 16 bits are detected; layers then avoid them."""
    weight, x = random(40, 64), random(3, 64, seed=1)
    expected = Int8Linear(weight)(x)
    whole, linear_onednn = onednn._onednn_int8, onednn.onednn_is_exact

    def saturated(x: Tensor, zero: int, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return whole(x, zero, weight, scales, zeros).clamp(-(2**15), 2**15 - 1)

    linear_onednn.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(onednn, "_onednn_int8", saturated)
        assert not onednn.onednn_is_exact()
        other = Int8Linear(weight)
    linear_onednn.cache_clear()
    assert other._halves
    torch.testing.assert_close(other(x), expected)


def composed(weight: Tensor, bias: Tensor | None, fusion: Fusion) -> Linear:
    """The definition of a fused layer, with its product in float64."""

    class Exact(PlainLinear):
        def product(self, x: Tensor) -> Tensor:
            y = x.double() @ weight.double().T
            return y if bias is None else y + bias.double()

    return Exact(weight, bias, fusion)


FUSIONS = {
    "norm": lambda k: Fusion(norm=Norm(1 + random(k, seed=3) / 4, 1e-5)),
    "norm in float32": lambda k: Fusion(norm=Norm(1 + random(k, seed=3).float() / 4, 1e-6)),
    "silu": lambda _: Fusion(gate="silu"),
    "gelu": lambda _: Fusion(gate="gelu_tanh"),
    "float": lambda _: Fusion(float_out=True),
    "all": lambda k: Fusion(norm=Norm(random(k, seed=3), 1e-5), gate="silu", float_out=True),
}


@pytest.mark.usefixtures("isa")
@over("kind", FUSIONS)
@over(("k", "n"), SHAPES)
@over("with_bias", [False, True])
def test_the_fused_layer_is_the_composed_one(kind: str, k: int, n: int, with_bias: bool) -> None:
    fusion = FUSIONS[kind](k)
    weight, x = random(n, k) * k**-0.5, random(45, k, seed=1) * 3
    bias = random(n, seed=2) if with_bias else None
    residual = random(45, n // 2 if fusion.gate else n, seed=4)
    parts = [weight[: n // 2], weight[n // 2 :]]
    fused, exact = NativeLinear(parts, bias, fusion), composed(weight, bias, fusion)
    assert fused(x).dtype == (torch.float32 if fusion.float_out else torch.bfloat16)
    torch.testing.assert_close(fused(x).double(), exact(x).double(), rtol=2**-7, atol=2**-7)
    if not fusion.float_out:
        total = exact(x) + residual
        torch.testing.assert_close(fused(x, residual).double(), total, rtol=2**-7, atol=2**-7)
    assert torch.equal(fused(x), torch.cat([fused(row[None]) for row in x]))


@pytest.mark.usefixtures("isa")
def test_a_gate_far_from_zero() -> None:
    """exp must not overflow or be clipped: silu(-100) is 0, silu(100) is 100."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16()
    x = torch.tensor([[-1e30, 1], [-100, 1], [-20, 1], [0, 1], [20, 1], [1e30, 1]]).bfloat16()
    for gate, act in (("silu", torch.nn.functional.silu), ("gelu_tanh", torch.nn.functional.gelu)):
        y = NativeLinear([weight], None, Fusion(gate=gate, float_out=True))(x)
        torch.testing.assert_close(y[:, 0], act(x[:, 0].float()), rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sizes", [[5, 11, 40], [64, 16, 16], [1, 1, 30, 32]])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_parts_of_whole_numbers_are_one_weight(sizes: list[int], gate: str | None) -> None:
    weight, x = random(sum(sizes), 200), random(70, 200, seed=1)
    fusion = Fusion(gate=gate)
    whole = NativeLinear([weight], None, fusion, bits=8)(x)
    assert torch.equal(NativeLinear(weight.split(sizes), None, fusion, bits=8)(x), whole)


@pytest.mark.parametrize("k", [200, 1100])
def test_all_instruction_sets_agree_in_whole_numbers(
    k: int, ask_for: Callable[[str], None]
) -> None:
    """Packed weights and results have the same bits, and so have the norm, the bias and the sum."""
    sets = loader.instruction_sets()
    if len(sets) < 2:
        pytest.skip("one instruction set at most")
    norm = Norm(1 + random(k, seed=3) / 4, 1e-5)
    layers = []
    for isa in sets:
        ask_for(isa)
        layers.append(
            NativeLinear([random(258, k)], random(258, seed=2), Fusion(norm=norm), bits=8)
        )
    for num_rows in (1, 2, 3, 4, 6, 7, 12, 14, 15, 33, 35, 300):
        x, residual = random(num_rows, k, seed=num_rows), random(num_rows, 258, seed=7)
        wanted = layers[0](x, residual)
        for isa, other in zip(sets, layers, strict=True):
            assert torch.equal(other.packed, layers[0].packed), isa
            assert torch.equal(other(x, residual), wanted), (isa, num_rows)


def test_whole_numbers_are_held_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    weight, x = random(20, 48), random(3, 48, seed=1)
    best = make_linear(weight.split([8, 12]), quantization="int8")
    assert isinstance(best, Int8Linear if native.native_obstacle() else NativeLinear)
    monkeypatch.setenv(native.VARIABLE, "onednn")
    other = make_linear(weight.split([8, 12]), quantization="int8")
    assert isinstance(other, Int8Linear)
    torch.testing.assert_close(best(x), other(x), rtol=0.02, atol=0.1)
    assert batch_invariance_problem([best, other]) is None
    assert best.num_weights == other.num_weights == 20 * 48
