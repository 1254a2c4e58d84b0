"""Rotation, norms, gates and linear layers against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infer.kernels.cuda import int8
from infer.kernels.cuda import linear as few
from infer.kernels.cuda.norm import gate, rms_norm
from infer.kernels.cuda.rotary import apply_rope
from infer.kernels.linear.cuda_linear import CudaInt8Linear, CudaLinear
from infer.kernels.linear.fusion import Fusion, Norm
from tests.support.cases import one_of
from tests.support.kernel_dtypes import KINDS, LOADED, assert_near

NAN = float("nan")


def spaced(*shape: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """Random rows with NaN between one and the next."""
    whole = torch.full((*shape[:-1], shape[-1] + 5), NAN)
    whole[..., : shape[-1]] = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return whole.to(kind).to(device)[..., : shape[-1]]


# Rotation.


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = (table[..., :half].double() for table in (cos, sin))
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def tables(*shape: int, whole: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """[*shape, D/2], or both halves alike."""
    angles = torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 6
    angles = torch.cat((angles, angles), -1) if whole else angles
    return angles.cos().to(device), angles.sin().to(device)


@pytest.mark.parametrize("kind", LOADED, ids=str)
@pytest.mark.parametrize("rank", [2, 3])
def test_rope(kind: torch.dtype, rank: int, device: torch.device) -> None:
    batch, length = 2, 3
    for size, heads, groups, transposed in ((80, 9, 2, True), (64, 1, 1, False)):
        if transposed:
            q, k = (
                spaced(batch, length, n, size, kind=kind, device=device).transpose(1, 2)
                for n in (heads, groups)
            )
        else:
            q, k = (
                spaced(batch, n, length, size, kind=kind, device=device) for n in (heads, groups)
            )
        lead = (batch,) if rank == 3 else ()
        for whole in (False, True):
            cos, sin = tables(*lead, length, size // 2, whole=whole, device=device)
            before = q.clone()
            got = apply_rope(q, k, cos, sin)
            assert torch.equal(q, before)
            for x, out in zip((q, k), got, strict=True):
                assert (out.shape, out.dtype) == (x.shape, kind)
                assert_near(out, rotated(x.cpu(), cos.cpu(), sin.cpu()))


def test_rope_of_nothing(device: torch.device) -> None:
    q, k = torch.empty(2, 4, 0, 8, device=device), torch.empty(2, 1, 0, 8, device=device)
    cos, sin = torch.empty(0, 4, device=device), torch.empty(0, 4, device=device)
    assert apply_rope(q, k, cos, sin)[0].shape == q.shape


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (((2, 4, 3, 8), (2, 1, 3, 8), (4, 8)), "cos [4, 8]"),
        (((2, 4, 3, 8), (2, 1, 3, 8), (3, 3, 8)), "cos [3, 3, 8]"),
        (((2, 4, 3, 8), (2, 1, 4, 8), (3, 8)), "k [2, 1, 4, 8]"),
        (((2, 4, 3, 7), (2, 1, 3, 7), (3, 7)), "q [2, 4, 3, 7]"),
        (((4, 3, 8), (1, 3, 8), (3, 8)), "q [4, 3, 8]"),
    ],
)
def test_rope_names_shapes_that_do_not_go_together(
    shapes: tuple[tuple[int, ...], ...], named: str, device: torch.device
) -> None:
    q, k, table = (torch.zeros(shape, device=device) for shape in shapes)
    with pytest.raises(ValueError, match="got q") as caught:
        apply_rope(q, k, table, table)
    assert named in str(caught.value)
    assert "sin" in str(caught.value)


# Norms and gates.


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("kind", LOADED, ids=str)
@pytest.mark.parametrize("width", [37, 5000])
def test_rms_norm(kind: torch.dtype, width: int, device: torch.device) -> None:
    x = spaced(3, width, kind=kind, device=device)
    weight = torch.rand(width, device=device)
    residual = spaced(3, width, kind=kind, device=device) * 2
    for added in (None, residual):
        want = normed(x.cpu(), weight.cpu(), 1e-5) + (0 if added is None else added.double().cpu())
        assert_near(rms_norm(x, weight, 1e-5, added), want)


def acted(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("kind", LOADED, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gate(kind: torch.dtype, act: str, device: torch.device) -> None:
    for width in (37, 2100):
        x = spaced(3, 2 * width, kind=kind, device=device)
        first, second = x.double().cpu().chunk(2, -1)
        assert_near(gate(x, act), acted(first, act) * second)


# Linear layers.

FUSIONS = [
    {},
    {"bias": True, "residual": True},
    {"norm": True, "gate": "silu", "bias": True},
    {"norm": True, "gate": "gelu_tanh", "residual": True},
    {"norm": True, "residual": True, "float_out": True},
]


class Layer:
    """A weight [N, K], what is around it, and rows."""

    def __init__(
        self, rows: int, width: int, height: int, kind: torch.dtype, device: torch.device,
        *, norm: bool = False, gate: str = "", bias: bool = False, residual: bool = False,
        float_out: bool = False,
    ) -> None:  # fmt: skip
        numbers = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=numbers)

        outputs = height * 2 if gate else height
        self.weight = (random(outputs, width) * width**-0.5).to(kind).to(device)
        self.bias = random(outputs).to(kind).to(device) if bias else None
        self.norm = Norm(torch.rand(width, generator=numbers).to(device), 1e-5) if norm else None
        self.x = spaced(rows, width, kind=kind, device=device)
        self.residual = spaced(rows, height, kind=kind, device=device) if residual else None
        self.gate, self.dtype = gate, torch.float32 if float_out else kind
        self.fusion = Fusion(norm=self.norm, gate=gate or None, float_out=float_out)

    def expected(self) -> Tensor:
        x = self.x.double().cpu()
        if self.norm is not None:
            x = normed(x, self.norm.weight.cpu(), self.norm.eps)
        return self.finished(x @ self.weight.double().cpu().T)

    def finished(self, y: Tensor) -> Tensor:
        """A product in float64 with what follows it."""
        y = y if self.bias is None else y + self.bias.double().cpu()
        if self.gate:
            first, second = y.chunk(2, -1)
            y = acted(first, self.gate) * second
        return y if self.residual is None else y + self.residual.double().cpu()

    @property
    def norm_numbers(self) -> tuple[Tensor, float] | None:
        """Weight and eps of the norm, as kernels take them."""
        return None if self.norm is None else (self.norm.weight, self.norm.eps)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("around", FUSIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_few_rows(
    kind: torch.dtype, around: dict[str, Any], rows: int, device: torch.device
) -> None:
    config = (8, 64, 4, 1) if rows == 1 else (16, 32, 1, 4, 2, True)
    for width, height in ((136, 21), (48, 16)):
        layer = Layer(rows, width, height, kind, device, **around)
        got = few.few_rows(
            layer.x, layer.weight, bias=layer.bias, norm=layer.norm_numbers,
            gate=layer.gate or None, residual=layer.residual, dtype=layer.dtype, config=config,
        )  # fmt: skip
        assert got.dtype == layer.dtype
        assert_near(got, layer.expected(), kind)


@pytest.mark.parametrize("around", FUSIONS, ids=str)
def test_columns_that_programs_share(around: dict[str, Any], device: torch.device) -> None:
    layer = Layer(5, 200, 40, KINDS[0], device, **around)
    scratch = (
        torch.full((100_000,), NAN, device=device),
        torch.zeros(64, dtype=torch.int32, device=device),
    )
    for _ in range(2):  # the counters are as the next launch needs them
        got = few.few_rows(
            layer.x, layer.weight, bias=layer.bias, norm=layer.norm_numbers,
            gate=layer.gate or None, residual=layer.residual, dtype=layer.dtype,
            config=(16, 32, 3, 4, 2, False), scratch=scratch,
        )  # fmt: skip
        assert_near(got, layer.expected(), KINDS[0])
    assert not scratch[1].any()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("around", FUSIONS, ids=str)
def test_cuda_linear(around: dict[str, Any], invariant: bool, device: torch.device) -> None:
    """Each number of rows, by whatever the layer takes for it, in its own sizes of tiles."""
    kind = KINDS[0]
    for rows in (1, 3, 40):
        layer = Layer(rows, 264, 48, kind, device, **around)
        made = CudaLinear(layer.weight, layer.bias, layer.fusion, invariant=invariant)
        want = layer.expected()
        residual = None if layer.residual is None else layer.residual.clone()
        got = made(layer.x, residual)
        assert got.shape == want.shape
        assert_near(got, want, kind)


# Linear layers in int8.


@pytest.mark.parametrize("kind", LOADED, ids=str)
def test_rows_in_int8(kind: torch.dtype, device: torch.device) -> None:
    for width in (37, 5000):
        x = spaced(5, width, kind=kind, device=device)
        x[1], x[2, 3], x[3, 4] = 0.0, NAN, float("inf")
        for norm in (None, (torch.rand(width, device=device), 1e-5)):
            whole, scales = int8.to_int8(x, norm)
            wide = x.double() if norm is None else normed(x, norm[0], norm[1])
            for row in (0, 4):
                most = wide[row].abs().max()
                assert whole[row].abs().max() == 127
                assert abs(scales[row] * 127 / most - 1) < 1e-5
                # Half a step, and a little where the largest number was rounded.
                assert (
                    whole[row] * scales[row].double() - wide[row]
                ).abs().max() < 0.501 * most / 127
            assert scales[1] == 0
            assert not whole[1:4].any(), "what cannot be held in int8 is 0 with the scale NaN"
            assert scales[2:4].isnan().all()


def test_halves_are_rounded_to_even(device: torch.device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]], device=device)
    assert int8.to_int8(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126]]


def in_int8(layer: Layer, made: CudaInt8Linear) -> Tensor:
    """The result in float64, of the integers that the layer multiplies."""
    whole, row_scales = int8.to_int8(layer.x, layer.norm_numbers)
    y = whole.double().cpu() @ made.weight.double().cpu().T
    return layer.finished(y * row_scales.double().cpu()[:, None] * made.scales.double().cpu())


@pytest.mark.parametrize(
    ("kind", "around"), one_of(4, [(kind, each) for kind in KINDS for each in FUSIONS]), ids=str
)
def test_linear_in_int8(kind: torch.dtype, around: dict[str, Any], device: torch.device) -> None:
    for rows, width, height in ((1, 264, 48), (5, 136, 21), (40, 264, 48), (35, 131, 21)):
        layer = Layer(rows, width, height, kind, device, **around)
        made = CudaInt8Linear(layer.weight, layer.bias, layer.fusion)
        got = made(layer.x, layer.residual)
        assert got.dtype == layer.dtype
        assert_near(got, in_int8(layer, made), kind)
        # Half a step of 127 in each factor, over a sum whose errors are independent.
        error = (got.double().cpu() - layer.expected()).square().mean().sqrt()
        assert error < 0.03 * layer.expected().square().mean().sqrt() + 1e-6


@pytest.mark.parametrize("around", one_of(3, FUSIONS), ids=str)
def test_a_row_in_int8_is_the_same_in_any_company(
    around: dict[str, Any], device: torch.device
) -> None:
    layer = Layer(40, 264, 48, KINDS[0], device, **around)
    made = CudaInt8Linear(layer.weight, layer.bias, layer.fusion)
    together = made(layer.x, layer.residual)
    for rows in (slice(0, 1), slice(7, 12), slice(20, 36), slice(3, 40)):
        added = None if layer.residual is None else layer.residual[rows]
        assert torch.equal(made(layer.x[rows], added), together[rows])


def test_numbers_that_are_not_finite_reach_the_result(device: torch.device) -> None:
    layer = Layer(3, 264, 48, KINDS[0], device)
    layer.x[1, 5] = NAN
    layer.weight[7, 9] = float("inf")
    got = CudaInt8Linear(layer.weight)(layer.x)
    assert got[1].isnan().all()
    assert got[:, 7].isnan().all()
    assert got[[0, 2]][:, [*range(7), *range(8, 48)]].isfinite().all()


def test_all_layers_share_one_scratch(device: torch.device) -> None:
    partial, arrived = few._scratch(device)
    for width in (few.LEAST_WIDTH, 2048, 8192, 32768):
        for height in (64, 1024, 3071, 3072, 8192):
            splits = few.few_rows_config(width, height, gated=True)[2]
            if splits > 1 and 2 * width * height <= few.MAX_BYTES:
                blocks = -(-height // few._BLOCK_ROWS)
                assert len(arrived) >= blocks
                assert len(partial) >= blocks * splits * 3 * few._BLOCK_ROWS * few.MAX_ROWS
