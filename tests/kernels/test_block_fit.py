"""Tests of int4: weights that the kernels round to blocks of 4 bits themselves."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from infer.kernels import loader, native
from infer.kernels.blocks import BlockWeight, fitted, fitted_bytes, fitted_kind
from infer.kernels.linear.choose import make_linear
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.linear.onednn import PackedLinear
from infer.kernels.linear.plain_linear import PlainLinear
from infer.kernels.native import quantization_obstacle

obstacle = quantization_obstacle("int4")
pytestmark = pytest.mark.skipif(obstacle is not None, reason=str(obstacle))

SHAPES = [(5, 256), (70, 512), (33, 576), (3, 100), (1, 32), (40, 2048), (7, 31)]


def weights(count: int, width: int, *, outliers: bool = False) -> Tensor:
    made_by = torch.Generator().manual_seed(width)
    found = torch.randn((count, width), generator=made_by) * 0.03
    if outliers:
        found[:, ::37] *= 8
    return found.bfloat16()


def numbers_of(weight: BlockWeight) -> np.ndarray:
    """The numbers [out, in] as the `gguf` package reads them."""
    assert weight.rows is not None
    read = gguf.quants.dequantize(weight.rows, Q[weight.kind])
    return np.asarray(read).reshape(len(weight.rows), -1)[:, : weight.shape[1]]


def errors(found: np.ndarray, exact: Tensor) -> np.ndarray:
    """The squared error of each 32 inputs, relative to the squares of all."""
    off = np.pad((found - exact.float().numpy()) ** 2, ((0, 0), (0, -found.shape[1] % 32)))
    return np.asarray(off.reshape(len(off), -1, 32).sum(2) / exact.float().square().mean().item())


def plain(exact: Tensor) -> np.ndarray:
    """Each 32 inputs rounded between the smallest and the largest of them."""
    count, width = exact.shape
    y = np.pad(exact.float().numpy(), ((0, 0), (0, -width % 32))).reshape(count, -1, 32)
    low, high = y.min(2, keepdims=True), y.max(2, keepdims=True)
    step = np.maximum(high - low, 1e-30) / 15
    return np.asarray((np.round((y - low) / step) * step + low).reshape(count, -1)[:, :width])


@pytest.mark.parametrize(("count", "width"), SHAPES)
@pytest.mark.parametrize("outliers", [False, True])
def test_the_fit_is_better_than_rounding_between_the_extremes(
    count: int, width: int, outliers: bool
) -> None:
    exact = weights(count, width, outliers=outliers)
    ours, theirs = errors(numbers_of(fitted(exact)), exact), errors(plain(exact), exact)
    assert ours.mean() < 0.92 * theirs.mean()
    if width % 256:  # else a group's scale is a multiple of one for 256 inputs, and may lose
        assert (ours <= 1.02 * theirs + 1e-3).all()


@pytest.mark.parametrize("width", [256, 576])
def test_numbers_that_blocks_can_hold_are_kept(width: int) -> None:
    """Whole multiples of a scale, from a minimum on: what a file in 4 bits once was."""
    made_by = np.random.default_rng(width)
    codes = made_by.integers(0, 16, (20, width // 32, 32))
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    exact = torch.from_numpy(codes * 2.0**-7 - 2.0**-4).flatten(1).bfloat16()
    error = errors(numbers_of(fitted(exact)), exact)
    assert error.max() < 1e-3 if width % 256 == 0 else error.max() == 0


@pytest.mark.parametrize("width", [256, 544])
def test_bad_and_constant_numbers(width: int) -> None:
    exact = weights(6, width)
    exact[0] = 0
    exact[1] = 0.5
    exact[2, 40], exact[3, 40], exact[4, 40] = torch.nan, torch.inf, -torch.inf
    found = numbers_of(fitted(exact))
    assert (found[0] == 0).all()
    assert np.abs(found[1] - 0.5).max() < 0.01
    assert not np.isfinite(found[2:5, 32:64]).any()
    assert np.isfinite(found[5]).all()
    y = make_linear(exact, quantization="int4")(torch.ones((1, width)).bfloat16())
    assert y[0, [0, 1, 5]].isfinite().all()
    assert not y[0, 2:5].isfinite().any()


def test_all_instruction_sets_find_the_same_blocks() -> None:
    exact = weights(9, 1280, outliers=True)
    sets, found = loader.instruction_sets(), []
    try:
        for name in sets:
            loader.loaded().infer_set_isa(name.encode())
            found.append([numbers_of(fitted(exact[:, :width])) for width in (1280, 1184)])
    finally:
        loader.loaded().infer_set_isa(loader.chosen_instruction_set().encode())
    for each in found:
        assert all(map(np.array_equal, each, found[0]))


@pytest.mark.usefixtures("isa")
def test_int4_is_the_numbers_of_its_blocks() -> None:
    for width in (256, 544):
        parts = weights(24, width), weights(40, width)
        layer = make_linear(list(parts), quantization="int4")
        assert isinstance(layer, NativeLinear)
        blocks = NativeLinear([fitted(part) for part in parts])
        x = weights(9, width)
        assert torch.equal(layer(x), blocks(x))
        numbers = torch.cat([torch.from_numpy(numbers_of(fitted(part))) for part in parts])
        exact, terms = x.float() @ numbers.T, x.float().abs() @ numbers.T.abs()
        assert ((layer(x).float() - exact).abs() <= terms / 127).all()  # activations are in int8


def test_with_other_activations_it_has_the_same_numbers() -> None:
    exact = weights(40, 256)
    layer = make_linear(exact.float(), quantization="int4")
    assert not isinstance(layer, NativeLinear)
    assert layer.dtype == torch.float32
    found = layer(torch.eye(256)).T.numpy()
    np.testing.assert_allclose(found, numbers_of(fitted(exact)), rtol=2**-8)


def test_sizes() -> None:
    assert (fitted_kind(4096), fitted_bytes(4096)) == ("Q4_K", 4.5 / 8)
    assert (fitted_kind(576), fitted_bytes(576)) == ("Q4_1", 5 / 8)


def test_it_needs_the_kernels(
    ask_for: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.VARIABLE, "onednn")
    assert "own kernels do not run" in str(quantization_obstacle("int4"))
    planned = make_linear(torch.empty((32, 64), device="meta").bfloat16(), quantization="int4")
    assert isinstance(planned, (PlainLinear, PackedLinear))
