"""Tests of how linear layers are cut into parts for many threads: evenly, by node, for the same
bits."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from infer.kernels import loader
from infer.kernels.blocks import BlockWeight
from infer.kernels.linear.fusion import Fusion
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.team import pin_threads
from tests.support import isas
from tests.support.gguf_files import blocks

pytestmark = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))


@dataclass(frozen=True)
class Part:
    """A part of a layer's product: panels × a block of rows, over some steps."""

    node: int
    panel: int
    panel_end: int
    row_block: int
    begin: int
    end: int

    @property
    def work(self) -> int:
        return (self.panel_end - self.panel) * (self.end - self.begin)


@dataclass(frozen=True)
class Shape:
    """Of a layer: outputs, inputs, and whether pairs of outputs become one."""

    outputs: int
    inputs: int
    gate: bool = False


@pytest.fixture(autouse=True)
def free_threads() -> Iterator[None]:
    """As many as are asked for, anywhere."""
    loader.loaded().infer_govern_threads(0)
    yield
    loader.loaded().infer_govern_threads(1)
    pin_threads([], 0)


def parts_of(shape: Shape, threads: int, rows: int = 1, bits: int = 16) -> list[Part]:
    """The kernels' own, of a layer that has no memory."""
    library = loader.loaded()
    sizes = (shape.outputs, shape.inputs, bits, int(shape.gate))
    isa = loader.chosen_instruction_set().encode()
    handle = library.infer_linear_new(isa, None, *sizes, 0, 0, None, None, 0.0, None)
    assert handle, isa
    count = library.infer_linear_parts(handle, rows, threads, None, 0)
    numbers = array("q", bytes(8 * 6 * count))
    library.infer_linear_parts(handle, rows, threads, numbers.buffer_info()[0], count)
    library.infer_linear_free(handle)
    return [Part(*numbers[first : first + 6]) for first in range(0, 6 * count, 6)]


def duration(parts: Sequence[Part], threads: int, num_nodes: int = 1) -> int:
    """When the last of some equal threads ends, which take parts as the kernels do: of their own
    node first, and where no panel is split the next one before this one is computed."""
    waiting = [[each for each in parts if each.node == node] for node in range(num_nodes)]
    is_split = any(each.begin for each in parts)
    ended: dict[tuple[int, int], int] = {}

    def take(thread: int) -> Part | None:
        own = thread * num_nodes // threads
        for step in range(num_nodes):
            if left := waiting[(own + step) % num_nodes]:
                return left.pop(0)
        return None

    held = {} if is_split else {thread: take(thread) for thread in range(threads)}
    free = [(0, thread) for thread in range(threads)]
    last = 0
    while free:
        now, thread = heapq.heappop(free)
        part = held[thread] if held else take(thread)
        if part is None:
            continue
        if held:
            held[thread] = take(thread)
        if part.begin:
            now = max(now, ended[part.panel, part.row_block])
        last = max(last, now := now + part.work)
        ended[part.panel, part.row_block] = now
        heapq.heappush(free, (now, thread))
    return last


def layers(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> list[Shape]:
    """The linear layers of a decoder layer."""
    return [
        Shape((heads + 2 * kv_heads) * head_dim, hidden),
        Shape(hidden, heads * head_dim),
        Shape(2 * inner, hidden, gate=True),
        Shape(hidden, inner),
    ]


@dataclass(frozen=True)
class Step:
    """The linear layers of a step: of one decoder layer, how many there are, and the head."""

    layer: list[Shape]
    num_layers: int
    head: Shape

    def efficiency(self, threads: int, bits: int, rows: int = 1) -> float:
        """Share of some threads' time in which they have work, if all have the same speed."""
        work = span = 0
        for shape, count in [*((each, self.num_layers) for each in self.layer), (self.head, 1)]:
            parts = parts_of(shape, threads, rows, bits)
            work += count * sum(each.work for each in parts)
            span += count * duration(parts, threads)
        return work / (span * threads)


STEPS = {
    "Llama 3.2 1B": Step(layers(2048, 32, 8, 64, 8192), 16, Shape(128256, 2048)),
    "TinyLlama 1.1B": Step(layers(2048, 32, 4, 64, 5632), 22, Shape(32000, 2048)),
    "SmolLM2 1.7B": Step(layers(2048, 32, 32, 64, 8192), 24, Shape(49152, 2048)),
    "Llama 3.1 8B": Step(layers(4096, 32, 8, 128, 14336), 32, Shape(128256, 4096)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("bits", [16, 8])
def test_up_to_64_threads_have_work_from_1b_on(name: str, bits: int) -> None:
    found = {threads: STEPS[name].efficiency(threads, bits) for threads in range(1, 65)}
    worst = min(found, key=found.__getitem__)
    assert found[worst] >= 0.9, (worst, found[worst])


NARROW = {  # than 64 panels
    "Qwen2.5 1.5B": (Step(layers(1536, 12, 2, 128, 8960), 28, Shape(151936, 1536)), 48, 0.88),
    "Gemma 3 1B": (Step(layers(1152, 4, 1, 256, 6912), 26, Shape(262144, 1152)), 36, 0.82),
}


@pytest.mark.parametrize("name", NARROW)
def test_fewer_panels_than_threads_are_the_limit(name: str) -> None:
    """A sum has one thread at a time, so 36 panels keep 36 threads busy."""
    step, num_panels, at_64 = NARROW[name]
    assert all(step.efficiency(threads, 16) >= 0.9 for threads in range(1, num_panels + 1))
    assert step.efficiency(48, 16) >= 0.9
    assert at_64 <= step.efficiency(64, 16) <= 0.9


@pytest.mark.parametrize("rows", [1, 40, 300, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16, 48, 64, 100])
def test_parts_are_all_of_the_work_once_and_each_split_begins_before_it_goes_on(
    rows: int, threads: int
) -> None:
    for shape in (Shape(2048, 2048), Shape(2240, 500), Shape(11264, 2048, gate=True)):
        parts = parts_of(shape, threads, rows)
        blocks_of_rows = -(-rows // 256)
        panels, steps = -(-shape.outputs // 32), -(-shape.inputs // 32)
        assert sum(each.work for each in parts) == panels * steps * blocks_of_rows
        where = Counter(
            (panel, each.row_block, step)
            for each in parts
            for panel in range(each.panel, each.panel_end)
            for step in range(each.begin, each.end)
        )
        assert set(where.values()) == {1}
        begun = {(each.panel, each.row_block): each.end for each in parts if not each.begin}
        order = [(each.panel, each.row_block, each.begin) for each in parts]
        for panel, block, begin in order:
            if begin:
                assert begun[panel, block] == begin
                assert order.index((panel, block, 0)) < order.index((panel, block, begin))


def test_one_and_two_threads_have_whole_panels() -> None:
    """As before there were splits: what is multiplied of a model's layers is read in one sweep."""
    for step in STEPS.values():
        for shape, threads in [(shape, count) for shape in step.layer for count in (1, 2)]:
            assert not any(each.begin for each in parts_of(shape, threads))


def test_each_node_has_a_slice_and_its_threads_take_it_first() -> None:
    nodes = [3] * 20 + [4] * 20 + [5] * 20
    pin_threads([[0]] * 60, 60, nodes)
    for shape in (Shape(2048, 2048), Shape(16384, 2048, gate=True)):
        parts = parts_of(shape, 60)
        panels = shape.outputs // 32
        for node in range(3):
            own = {each.panel for each in parts if each.node == node}
            assert own == set(range(panels * node // 3, panels * (node + 1) // 3))
        assert sum(each.work for each in parts) / (60 * duration(parts, 60, 3)) > 0.9
    pin_threads([[0]] * 6, 4, [0, 0, 0, 1, 1, 1])  # the last two are on slower cores
    slices = Counter[int]()
    for each in parts_of(Shape(2048, 2048), 4):
        slices[each.node] += each.panel_end - each.panel
    assert slices == {0: 48, 1: 16}
    pin_threads([[0]] * 20, 20, list(range(20)))
    assert {each.node for each in parts_of(Shape(2048, 2048), 20)} == set(range(8)), "at most"
    pin_threads([[0]] * 4, 4, [7, 7, 7, 7])
    assert {each.node for each in parts_of(Shape(2048, 2048), 4)} == {0}


KINDS = ("bfloat16", "gate", "int8", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


def weights_of(kind: str, outputs: int, inputs: int) -> NativeLinear:
    """A layer whose weight is held in some format."""
    if kind in Q.__members__:
        rows = blocks((outputs, inputs), Q[kind])
        return NativeLinear([BlockWeight(kind, (outputs, inputs), rows)])
    made_by = torch.Generator().manual_seed(outputs)
    weight = torch.randn((outputs, inputs), generator=made_by).div_(20).bfloat16()
    fusion = Fusion(gate="silu") if kind == "gate" else Fusion()
    return NativeLinear([weight], fusion=fusion, bits=8 if kind == "int8" else 16)


@pytest.mark.parametrize(
    ("kind", "nodes", "isa"),
    isas.in_turns(((kind, n) for n in (1, 2, 3) for kind in KINDS), every=4),
    indirect=["isa"],
)
def test_the_same_bits_with_16_and_64_threads(isa: str, kind: str, nodes: int) -> None:
    """Panels are split where they do not divide by the threads, and sums go on in another one."""
    torch.set_num_threads(1)
    inputs = 768
    alone_of = weights_of(kind, 2240, inputs)  # 70 panels
    several = [1, 2, 5, 16, 33, 70]
    if isa != "portable":  # it is slow
        several += [300, *range(6, 33, 3)]
    x = torch.randn((300, inputs), generator=torch.Generator().manual_seed(1)).bfloat16()
    expected: dict[int, Tensor] = {rows: alone_of(x[:rows]) for rows in several}
    if nodes > 1:
        pin_threads([[]] * 64, 64, [thread * nodes // 64 for thread in range(64)])
    layer = weights_of(kind, 2240, inputs)
    found = array("q", bytes(8 * 6 * 200))
    for threads in (3, 16, 64):
        torch.set_num_threads(threads)
        for rows, alone in expected.items():
            assert torch.equal(layer(x[:rows]), alone), (threads, rows)
        count = loader.loaded().infer_linear_parts(
            layer.handle, 1, threads, found.buffer_info()[0], 200
        )
        assert threads == 3 or any(found[4 : 6 * count : 6]), "panels are split"
