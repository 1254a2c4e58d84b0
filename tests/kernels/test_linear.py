"""Tests of linear layers: correct, the same bits in any batch, and chosen for the machine."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from infer.config import EngineConfig
from infer.engine.build import assemble
from infer.kernels import loader, native
from infer.kernels.invariance import batch_invariance_problem, linears
from infer.kernels.linear import onednn
from infer.kernels.linear.choose import make_linear
from infer.kernels.linear.fusion import PRODUCT_ONLY
from infer.kernels.linear.native_linear import NativeLinear, PackedEmbedding
from infer.kernels.linear.onednn import PackedLinear
from infer.kernels.linear.plain_linear import PlainLinear
from infer.models.model import build_model
from infer.models.registry import parse_model_config
from infer.models.weights import dummy_source
from tests.support.cases import one_of, over

SHAPES = [  # K, N, bias
    (1, 1, True),
    (31, 33, False),
    (32, 32, True),
    (40, 16, False),
    (100, 257, True),
    (256, 688, False),
    (513, 95, True),
    (1024, 64, False),
    (1055, 513, True),
    (2048, 1056, False),
    (2049, 7, True),
    (8192, 96, False),
]
ROWS = [*range(1, 71), *range(127, 131), *range(500, 521)]


def layer(k: int, n: int, bias: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(k * n)
    weight = torch.randn((n, k), generator=generator).mul_(k**-0.5).bfloat16()
    return weight, torch.randn(n, generator=generator).bfloat16() if bias else None


def rows(num: int, k: int) -> Tensor:
    return torch.randn((num, k), generator=torch.Generator().manual_seed(num)).bfloat16()


@pytest.mark.usefixtures("isa")
@over(("k", "n", "bias"), SHAPES)
@over("num_rows", [1, 16, 33, 300])
def test_it_multiplies(k: int, n: int, bias: bool, num_rows: int) -> None:
    weight, b = layer(k, n, bias)
    x = rows(num_rows, k)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    terms = x.double().abs() @ weight.double().abs().T
    error = (NativeLinear([weight], b)(x).double() - exact).abs()
    # Half a unit in the last place of bfloat16, and the rounding of float32 sums.
    assert (error <= 2**-8 * exact.abs() + 2**-20 * (terms + 1)).all()


@pytest.mark.parametrize(("k", "n", "bias"), one_of(2, SHAPES))
def test_a_row_is_the_same_in_any_company(isa: str, k: int, n: int, bias: bool) -> None:
    some_rows = ROWS[::9] if isa == "portable" and k * n > 10**5 else ROWS  # it is slow
    weight, b = layer(k, n, bias)
    product, x = NativeLinear([weight], b), rows(600, k)
    torch.set_num_threads(1)
    alone = torch.cat([product(row[None]) for row in x])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for num_rows in some_rows:
            first = num_rows * 7 % (600 - num_rows)
            some = product(x[first : first + num_rows])
            assert torch.equal(some, alone[first : first + num_rows]), (threads, num_rows)


@pytest.mark.usefixtures("isa")
@over(("k", "n", "bias"), SHAPES)
def test_an_embedding_shares_the_memory_of_the_head_tied_to_it(k: int, n: int, bias: bool) -> None:
    weight, _ = layer(k, n, bias)
    embedding = PackedEmbedding(weight)
    for tokens in (
        torch.arange(n).flip(0),
        torch.tensor([n - 1]),
        torch.empty(0, dtype=torch.int64),
    ):
        assert torch.equal(embedding.index_select(0, tokens), weight[tokens])
    head, x = embedding.tied_head(PRODUCT_ONLY), rows(33, k)
    assert isinstance(head, NativeLinear)
    assert head.packed.data_ptr() == embedding.packed.data_ptr()
    assert torch.equal(head(x), NativeLinear([weight])(x))


@pytest.mark.usefixtures("isa")
def test_more_rows_than_are_packed_at_a_time() -> None:
    weight, b = layer(96, 64, True)
    product, x = NativeLinear([weight], b), rows(2100, 96)
    assert torch.equal(product(x), torch.cat([product(part) for part in x.split(700)]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sizes", [[5, 11, 40], [64, 16, 16], [1, 1, 30, 33]])
def test_parts_are_one_weight(sizes: list[int]) -> None:
    weight, b = layer(70, sum(sizes), True)
    x = rows(20, 70)
    whole, parts = NativeLinear([weight], b)(x), NativeLinear(weight.split(sizes), b)(x)
    assert torch.equal(whole, parts)


@pytest.mark.usefixtures("isa")
def test_it_reads_slices_in_place() -> None:
    weight, _ = layer(80, 48, False)
    wide, x = rows(48, 200), rows(30, 80)
    wide[:, 60:140] = weight
    around = torch.full((30, 300), torch.nan, dtype=torch.bfloat16)
    around[:, 77:157] = x  # NaN follows each row directly
    expected = NativeLinear([weight], None)(x)
    assert torch.equal(NativeLinear([wide[:, 60:140]], None)(around[:, 77:157]), expected)
    turned = NativeLinear([weight.T.contiguous().T], None)
    assert torch.equal(turned(x.T.contiguous().T), expected)


@pytest.mark.usefixtures("isa")
def test_a_bad_row_harms_no_other() -> None:
    weight, b = layer(50, 40, True)
    product, x = NativeLinear([weight], b), rows(40, 50)
    expected = product(x)
    x[7], x[33] = torch.inf, torch.nan
    some = product(x)
    assert not some[[7, 33]].isfinite().any()
    good = [i for i in range(40) if i not in (7, 33)]
    assert torch.equal(some[good], expected[good])


needs_bfloat16 = pytest.mark.skipif(
    not onednn.onednn_has_bfloat16(), reason="oneDNN has no products in bfloat16 here"
)


@needs_bfloat16
@pytest.mark.usefixtures("isa")
def test_other_products_on_the_thread_go_on() -> None:
    """oneDNN uses the tile registers too, so a kernel must not change their configuration."""
    weight, _ = layer(256, 256, False)
    native_one, other, x = NativeLinear([weight], None), PackedLinear(weight, None), rows(40, 256)
    expected = other(x)
    for _ in range(3):
        native_one(x)
        assert torch.equal(other(x), expected)


@needs_bfloat16
@pytest.mark.usefixtures("isa")
def test_it_is_chosen_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, b = layer(64, 64, True)
    product = make_linear(weight, b)
    assert isinstance(product, NativeLinear)
    assert b is not None
    assert torch.equal(product(torch.zeros((2, 64)).bfloat16()), b.expand(2, -1))
    assert isinstance(make_linear(weight.float()), PackedLinear)
    monkeypatch.setenv(native.VARIABLE, "onednn")
    assert isinstance(make_linear(weight, b), PackedLinear)


MISSING = "there is no library"


@pytest.mark.parametrize("cause", ["library", "CPU"])
def test_without_it_torch_multiplies(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if cause == "library":
        monkeypatch.setattr(loader, "library", lambda: MISSING)
    else:
        none = {"infer_linear_runs_here": lambda _: 0, "infer_set_isa": lambda _: None}
        library = SimpleNamespace(**none)
        monkeypatch.setattr(loader, "library", lambda: library)
        monkeypatch.setattr(loader, "instruction_sets", lambda: ("portable",))
        monkeypatch.delenv(loader.ISA_VARIABLE, raising=False)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    weight, b = layer(48, 20, True)
    x = rows(3, 48)
    product = make_linear(weight.split([8, 12]), b)
    assert not isinstance(product, NativeLinear)
    torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, b))
    reason = MISSING if cause == "library" else "does not run here"
    with pytest.raises(RuntimeError, match=reason):
        NativeLinear([weight], b)
    monkeypatch.setenv(native.VARIABLE, "avx512")
    with pytest.raises(ValueError, match=f"avx512 is not possible: .*{reason}"):
        make_linear(weight, b)


def test_an_unknown_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "mkl")
    with pytest.raises(ValueError, match="use onednn or one of amx, avx512_bf16"):
        make_linear(torch.ones(2, 2).bfloat16())


@pytest.mark.parametrize("cause", ["the CPU's flags", "oneDNN"])
def test_bfloat16_is_not_packed_where_onednn_refuses_it(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such a CPU, for example with AVX2 only, torch computes and the default is float32."""

    def refuse(*_: object) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw")

    monkeypatch.setattr(loader, "library", lambda: MISSING)
    if cause == "oneDNN":
        monkeypatch.setattr(onednn, "cpu_has_bfloat16", lambda: True)
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    else:
        monkeypatch.setattr(onednn, "cpu_has_bfloat16", lambda: False)
    onednn.onednn_has_bfloat16.cache_clear()
    weight, b = layer(48, 20, True)
    product, x = make_linear(weight, b), rows(3, 48)
    assert isinstance(product, PlainLinear)
    torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, b))
    assert "no arithmetic for bfloat16" in str(native.bfloat16_obstacle())
    monkeypatch.undo()
    onednn.onednn_has_bfloat16.cache_clear()


class Breaking(PlainLinear):
    """A layer that changes one element of one middle row from a certain number of rows on."""

    def __init__(self, weight: Tensor, num_rows: int) -> None:
        super().__init__(weight, None)
        self.num_rows = num_rows
        self.in_float32 = PackedLinear(weight.float(), None)  # invariant on all machines

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.in_float32(x.float(), residual).to(x.dtype, copy=True)
        if len(x) >= self.num_rows:
            y[len(x) // 2, -1] += 1
        return y


@pytest.mark.parametrize("num_rows", [2, 17, 130])
def test_the_check_finds_a_row_that_depends_on_others(num_rows: int) -> None:
    weight = layer(40, 24, False)[0].float()
    assert batch_invariance_problem({}) is None
    assert batch_invariance_problem([PackedLinear(weight, None)]) is None
    problem = batch_invariance_problem(
        [PackedLinear(weight, None), Breaking(weight[:23], num_rows)]
    )
    assert problem is not None
    assert f"40 → 23 product in float32 is not the same alone and among {num_rows}:" in problem


@needs_bfloat16
def test_the_check_finds_what_onednn_does() -> None:
    """The check must find it where oneDNN's bfloat16 depends on the other rows (AMX)."""
    weight, _ = layer(2048, 8192, False)
    product = PackedLinear(weight, None)
    x = rows(64, 2048)
    alone = torch.cat([product(row[None]) for row in x])
    if torch.equal(product(x), alone):
        pytest.skip("oneDNN's product does not depend on the number of rows here")
    assert "2048 → 8192 product in bfloat16" in str(batch_invariance_problem([product]))


@pytest.mark.parametrize("k", [100, 2048, 8192])
def test_packed_float32_is_the_same_in_any_company(k: int) -> None:
    weight, b = layer(k, 600, True)
    assert b is not None
    product = PackedLinear(weight.float(), b.float())
    x = rows(130, k).float()
    whole = product(x)
    for num_rows in (1, 2, 7, 33, 64):
        for part, expected in zip(x.split(num_rows), whole.split(num_rows), strict=True):
            assert torch.equal(product(part), expected), num_rows


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_sees_the_layers_of_a_model(architecture: str, dtype: torch.dtype) -> None:
    raw = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "vocab_size": 90,
        "max_position_embeddings": 64,
    }
    if architecture.startswith("GPT2"):
        raw = {"architectures": [architecture], "model_type": "gpt2", "vocab_size": 90}
        raw |= {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
    source = dummy_source(dtype, torch.device("cpu"))
    model = build_model(parse_model_config(raw, "test"), source, 64)
    found = list(linears(model))
    assert len(found) == 4 * 3 + 1
    promised_here = dtype == torch.float32 or native.native_obstacle() is None
    if promised_here:
        assert batch_invariance_problem(model) is None
    model.lm_head = Breaking(layer(32, 90, False)[0].to(dtype), 40)
    assert "32 → 90" in str(batch_invariance_problem(model))


def test_the_engine_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        assemble, "batch_invariance_problem", lambda model: f"{type(model)} differs"
    )
    assemble.assemble(EngineConfig(device="cpu"))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if text.endswith("differs")]) == 1
