"""Tests of head norms and rotation in the kernel: equal to torch's, with the same bits always."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from infer.attention.cpu import NativeBackend
from infer.attention.layout import BatchLayout
from infer.attention.sdpa import SDPABackend
from infer.kernels import loader
from infer.kernels.linear.fusion import Norm
from infer.kernels.rotary import HeadNorms, QKRotation
from tests.support import isas
from tests.support.attention_worlds import in_order

pytestmark = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))
NUM_TOKENS, PAGE = 300, 16


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=isas.each(loader.instruction_sets()), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_rotation(dim: int, norms: HeadNorms | None) -> QKRotation:
    angles = torch.rand((NUM_TOKENS, dim // 2), generator=torch.Generator().manual_seed(2)) * 100
    return QKRotation(angles.cos(), angles.sin(), norms)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: QKRotation | None,
    ends: tuple[int, ...] = (NUM_TOKENS,),
    make: type[NativeBackend | SDPABackend] = NativeBackend,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, keys, values) of one sequence, the last two from its cells; [T, heads, D] each."""
    num_pages = -(-NUM_TOKENS // PAGE)
    shape = (num_pages + 1, PAGE, *k.shape[1:])
    keys, values = torch.zeros(shape, dtype=k.dtype), torch.zeros(shape, dtype=k.dtype)
    backend = make([keys], [values], num_heads=q.shape[1], scale=q.shape[2] ** -0.5)
    table = torch.arange(1, num_pages + 1)[None]
    parts = []
    for begin, end in pairwise((0, *ends)):
        slots = torch.arange(begin, end) + PAGE
        backend.plan(BatchLayout([0, end - begin], [end], slots, table))
        rows = slice(begin, end)
        some = rotation
        if rotation is not None and rotation.cos is not None and rotation.sin is not None:
            some = QKRotation(rotation.cos[rows], rotation.sin[rows], rotation.norms)
        parts.append(backend(0, q[rows], k[rows], v[rows], some))
    caches = in_order(keys, values) if make is NativeBackend else (keys, values)
    key_cells, value_cells = (cache.flatten(0, 1)[PAGE : PAGE + NUM_TOKENS] for cache in caches)
    return torch.cat(parts), key_cells, value_cells


def rotation_of(dim: int, kind: str) -> tuple[QKRotation, Tensor]:
    """A rotation, and q, k and v: parts of one projection, whose other parts must not change."""
    q_norm, k_norm = Norm(random(dim), 1e-6), Norm(1 + random(dim, seed=3).float(), 1e-6)
    norms = HeadNorms(q_norm, k_norm) if "norms" in kind else None
    rotation = make_rotation(dim, norms) if "rotation" in kind else QKRotation(None, None, norms)
    return rotation, random(NUM_TOKENS, 24, dim, seed=1)


@functools.cache
def expected_of(dim: int, kind: str) -> tuple[Tensor, Tensor]:
    """Torch's turned keys and SDPA's output, with which each instruction set is compared."""
    rotation, around = rotation_of(dim, kind)
    q, k, v = around.split((20, 2, 2), dim=1)
    return rotation(q, k)[1], attend(q, k, v, rotation, make=SDPABackend)[0]


@pytest.mark.parametrize(
    ("dim", "threads"),
    [
        *((dim, 1) for dim in (8, 64, 256)),
        *((dim, 2) for dim in (24, 128)),
        *(pytest.param(dim, 1, marks=pytest.mark.slow) for dim in (24, 128)),
        *(pytest.param(dim, 2, marks=pytest.mark.slow) for dim in (8, 64, 256)),
    ],
)
@pytest.mark.parametrize("kind", ["rotation", "norms and rotation", "norms"])
def test_heads_turn(dim: int, kind: str, threads: int) -> None:
    torch.set_num_threads(threads)
    rotation, around = rotation_of(dim, kind)
    before = around.clone()
    q, k, v = around.split((20, 2, 2), dim=1)
    out, keys, values = attend(q, k, v, rotation)
    assert torch.equal(around, before)
    assert torch.equal(values, v)
    expected, theirs = expected_of(dim, kind)
    torch.testing.assert_close(keys, expected, rtol=2**-7, atol=2**-7)
    assert (keys != expected).float().mean() < 0.02
    torch.testing.assert_close(out, theirs, rtol=0.02, atol=0.02)
    again = attend(q, k, v, rotation, ends=(1, 2, 40, 211, NUM_TOKENS))
    for mine, other in zip((out, keys, values), again, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("heads", [1, 3, 40])
def test_queries_turn_as_keys_do(heads: int) -> None:
    """Equal queries and keys have the same bits after rotation."""
    dim = 64
    norm = Norm(random(dim), 1e-6)
    rotation = make_rotation(dim, HeadNorms(norm, norm))
    same, v = random(NUM_TOKENS, heads, dim, seed=1), random(NUM_TOKENS, heads, dim, seed=4)
    out, keys, _ = attend(same, same, v, rotation)
    assert torch.equal(out, attend(keys, keys, v, None)[0])


def test_a_turned_nan_is_one() -> None:
    """A NaN with any bits must stay NaN, because the row is failed for it later."""
    dim = 24
    norm = Norm(random(dim), 1e-6)
    for norms in (None, HeadNorms(norm, norm)):
        k = random(NUM_TOKENS, 2, dim)
        kinds = torch.tensor([0x7FFF, -1, 0x7F81, -0x7F], dtype=torch.int16)
        k[:4, 1, 3] = kinds.view(torch.bfloat16)
        _, keys, _ = attend(k, k, k, make_rotation(dim, norms))
        assert keys[:4, 1, 3].isnan().all()
        assert keys[:, 0].isfinite().all()
        assert keys[4:].isfinite().all()
