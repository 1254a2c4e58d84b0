"""Every family and shape through what serves: the native stack and attention, in each format.

The reference attention and the decoders' own loops are compared with transformers, as by
`test_parity`, which has weights that are no numbers of bfloat16 and with `-m slow` every way. Then
the same checkpoints are computed as the engine computes them, in float32, bfloat16, int8, int4 and
the blocks of a GGUF file, and the loop with SDPA beside them. The truth is float32 with the same
weights: all of them are numbers of bfloat16, and the quantized ones are those of a float32 model
with the same quantization. What serves may be a little farther from it than the loop is, because
both round to bfloat16 at other places. The cases are made from the registry and `model_shapes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch

from infer.errors import LoadError
from infer.kernels.layer_stack import LayerStack
from infer.kernels.native import native_obstacle, quantization_obstacle
from infer.models.gguf_families import ARCHITECTURES as ROWS
from infer.models.gguf_families import VARIANTS
from infer.models.registry import ARCHITECTURES
from tests.support.cases import slow_but
from tests.support.checkpoints import FAMILIES, architecture_of, make_model, write_checkpoint
from tests.support.gguf_files import write, write_gpt2
from tests.support.model_shapes import FIRST, SHAPES, crossed, has_matrices_of_plain, is_stacked
from tests.support.parity import WAYS, Bench

TOLERANCE = 2e-4
"""Maximum difference of logits in float32, relative to their scale."""
LARGEST = 0.25
"""Maximum difference in any format; a tolerance that is derived must not grow beyond it."""
PAGE = 16
SERVING = crossed(WAYS, usual=("mixed batch", "decode"), least="mixed batch")
FEW = crossed(WAYS, usual=("mixed batch",), least="mixed batch")
OF_MATRICES = [
    pytest.param(*case.values, marks=pytest.mark.slow, id=case.id)
    if case.values[0][0] in FIRST and has_matrices_of_plain(*case.values[0])
    else case
    for case in FEW
]
"""Rotations and windows are those of any weight: the first families' are tried in bfloat16."""
REFERENCE = [case for case in crossed(WAYS, usual=WAYS, least="mixed batch") if not case.marks]


class Pair(NamedTuple):
    """A checkpoint and transformers' model of the same weights."""

    family: str
    shape: str
    path: Path
    theirs: Any
    bench: Callable[[torch.dtype], Bench]
    """Of the checkpoint in a dtype, read once; its `emptied` is to be used."""

    @classmethod
    def of(cls, family: str, shape: str, path: Path, theirs: Any) -> Pair:
        bench = functools.cache(lambda dtype: Bench(path, PAGE, dtype))
        return cls(family, shape, path, theirs, bench)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    """(family, shape) → its pair, which is made once."""

    @functools.cache
    def pair(family: str, name: str) -> Pair:
        folder = tmp_path_factory.mktemp("model")
        theirs = write_checkpoint(folder, family, rounded=True, **SHAPES[family][name])
        return Pair.of(family, name, folder, theirs)

    return pair


@pytest.fixture
def pair(request: pytest.FixtureRequest, pairs: Callable[[str, str], Pair]) -> Pair:
    return pairs(*request.param)


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call of a native stack."""
    calls: list[int] = []
    made = LayerStack.call

    def counted(self: LayerStack, y: Any, *others: Any) -> Any:
        calls.append(len(y))
        return made(self, y, *others)

    monkeypatch.setattr(LayerStack, "call", counted)
    return calls


def compare(way: str, truth: Any, bench: Bench, stacked: list[int]) -> None:
    """What serves is about as near to the truth as the loop with SDPA is, of the same weights."""
    ours = WAYS[way](bench.emptied("auto"), truth)
    num_calls = len(stacked)
    loop = WAYS[way](bench.emptied("sdpa"), truth)
    assert len(stacked) == num_calls, "SDPA was given a stack"
    assert loop <= LARGEST
    assert ours <= 2 * loop + TOLERANCE, (ours, loop)


def test_every_row_of_the_registry_has_a_shape() -> None:
    rows = {id(ARCHITECTURES[architecture_of(family)]) for family in FAMILIES}
    for name, row in ARCHITECTURES.items():
        assert id(row) in rows, f"{name} ({row.family}) has no row in tests/support/checkpoints.py"
    assert SHAPES.keys() == FAMILIES.keys()
    assert all(SHAPES.values())


@pytest.mark.parametrize(("pair", "way"), REFERENCE, indirect=["pair"])
def test_reference(pair: Pair, way: str) -> None:
    """In pages of 4, as some windows have that size."""
    bench = pair.bench(torch.float32).emptied("sdpa", page_size=4)
    assert WAYS[way](bench, pair.theirs) <= TOLERANCE


@pytest.mark.parametrize(("pair", "way"), FEW, indirect=["pair"])
def test_float32(pair: Pair, way: str) -> None:
    bench = pair.bench(torch.float32).emptied("auto")
    assert WAYS[way](bench, pair.theirs) <= TOLERANCE


@pytest.mark.parametrize(("pair", "way"), SERVING, indirect=["pair"])
def test_bfloat16(pair: Pair, way: str, stacked: list[int]) -> None:
    compare(way, pair.theirs, pair.bench(torch.bfloat16), stacked)
    is_native = native_obstacle() is None
    assert bool(stacked) == (is_native and is_stacked(pair.family, pair.shape))


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("pair", "way"), OF_MATRICES, indirect=["pair"])
def test_quantized(pair: Pair, quantization: str, way: str, stacked: list[int]) -> None:
    if reason := quantization_obstacle(quantization):
        pytest.skip(reason)

    bench = Bench(pair.path, PAGE, torch.bfloat16, quantization=quantization)
    compare(way, Bench(pair.path, PAGE, quantization=quantization), bench, stacked)
    is_native = native_obstacle() is None
    assert bool(stacked) == (is_native and is_stacked(pair.family, pair.shape))


IN_GGUF_FILES = {arch: name for arch, name in ROWS.items() if not arch.endswith("vl")}
IN_GGUF_FILES |= {f"{arch}+": name for arch, (_, name) in VARIANTS.items()}
"""Name of an architecture in GGUF files → its name in the registry; + where a key means another."""
IN_GGUF = {name: {"query_pre_attn_scalar": 24} for name in ("gemma2", "gemma3")}
"""What a family's files cannot say otherwise: Gemma's divisor is the size of a head."""
INNER = {"intermediate_size": 128}
INNERS = {
    "granite_hybrid": {"shared_intermediate_size": 128},
    **{name: {"vocab_size": 262} for name in ("gpt_bigcode", "bloom", "mpt", "falcon")},
}
"""Inner sizes that are whole blocks; those of some families follow from others."""


def written(folder: Path, family: str, name: str) -> Pair | None:
    """A GGUF file of a family's shape; None if such a file cannot say it."""
    shape = SHAPES[family][name]
    arch = {name: arch for arch, name in IN_GGUF_FILES.items()}[architecture_of(family)]
    arch = arch.removesuffix("+")
    shape = {key: value for key, value in shape.items() if key != "shard_bytes"}
    if family == "gpt2":
        theirs = make_model(family, **shape)
        theirs = write_gpt2(folder, theirs, gguf.GGMLQuantizationType.Q8_0)
        return Pair.of(family, name, folder, theirs)
    theirs = make_model(family, **{**INNERS.get(family, INNER), **shape, **IN_GGUF.get(family, {})})
    try:
        write(folder, arch, theirs, gguf.GGMLQuantizationType.Q8_0)
        as_read = Bench(folder, PAGE)
    except (LoadError, AssertionError, KeyError):
        return None
    says_it = WAYS["prefill"](as_read, theirs) <= TOLERANCE
    return Pair.of(family, name, folder, theirs) if says_it else None


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
@pytest.mark.parametrize(
    "family",
    slow_but(
        (*FIRST, "phi3", "granite_hybrid", "olmo3"),
        [name for name in FAMILIES if architecture_of(name) in IN_GGUF_FILES.values()],
    ),
)
def test_blocks_of_a_file(family: str, tmp_path: Path, stacked: list[int]) -> None:
    num_files = 0
    for index, name in enumerate(SHAPES[family]):
        found = written(tmp_path / f"{index}.gguf", family, name)
        if found is None:
            continue
        num_files += 1
        stacked.clear()
        for way in ("mixed batch", "decode") if num_files == 1 else ("mixed batch",):
            compare(way, found.theirs, found.bench(torch.bfloat16), stacked)
        assert bool(stacked) == is_stacked(family, name)
    assert num_files >= math.ceil(len(SHAPES[family]) / 3)
