"""Sequences' queries, keys and values, fed to an attention backend in any steps, and compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from infer.attention.cpu import NativeBackend
from infer.attention.layout import AttentionBackend, BatchLayout
from infer.kernels import loader
from infer.kernels.rotary import QKRotation

Steps = list[list[tuple[int, int]]]


BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Scores:
    """What happens to scores beside their factor: arguments of backends, and the heads' sinks."""

    softcap: float | None = None
    slopes: tuple[float, ...] = ()
    rounded: float | None = None
    sinks: tuple[float, ...] = ()


PLAIN = Scores()


@dataclass
class World:
    """Inputs of attention: q [n, H, D] and k, v [n, G, D] of each sequence."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    window: int | None = None
    scores: Scores = PLAIN

    @property
    def lengths(self) -> list[int]:
        return [len(q) for q in self.q]

    @property
    def scale(self) -> float:
        return self.q[0].shape[-1] ** -0.5

    def only(self, i: int) -> World:
        return World([self.q[i]], [self.k[i]], [self.v[i]], self.window, self.scores)


def make_world(
    lengths: list[int], heads: int, groups: int, size: int, dtype: torch.dtype, seed: int = 0,
    window: int | None = None, scores: Scores = PLAIN,
) -> World:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int, h: int) -> Tensor:
        return (torch.randn(n, h, size, generator=generator) * 1.5).to(dtype)

    q, k, v = zip(
        *((draw(n, heads), draw(n, groups), draw(n, groups)) for n in lengths), strict=True
    )
    return World(list(q), list(k), list(v), window, scores)


def whole(world: World) -> Steps:
    """All tokens in one step."""
    return [list(enumerate(world.lengths))]


def one_by_one(world: World) -> Steps:
    """One token of each sequence in each step."""
    return [
        [(i, 1) for i, n in enumerate(world.lengths) if step < n]
        for step in range(max(world.lengths))
    ]


def one_by_one_near_edges(world: World) -> Steps:
    """Single tokens near block boundaries, at the start and at the end; the others in chunks.

    These are a tenth of the steps of `one_by_one` for 530 tokens.
    """

    def chunks(n: int) -> list[int]:
        edges = {i for i in range(n) if i < 3 or 15 <= i < 18 or min(i % 64, -i % 64) <= 1}
        alone = edges | {n - 2, n - 1} & {*range(n)}
        ends = sorted({end for i in alone for end in (i, i + 1)} - {0})
        return [end - begin for begin, end in pairwise((0, *ends))]

    each = [chunks(n) for n in world.lengths]
    return [
        [(i, sizes[step]) for i, sizes in enumerate(each) if step < len(sizes)]
        for step in range(max(map(len, each)))
    ]


def ragged(world: World, seed: int) -> Steps:
    """Random chunks in random batches."""
    rng, left, steps = random.Random(seed), dict(enumerate(world.lengths)), []
    while left:
        step = []
        for i in rng.sample(sorted(left), rng.randint(1, len(left))):
            num = min(left[i], rng.choice([1, 1, 2, 7, 64, 65, 300]))
            step.append((i, num))
            left[i] -= num
            if not left[i]:
                del left[i]
        steps.append(step)
    return steps


def run(
    world: World,
    steps: Steps,
    make: Callable[..., AttentionBackend] = NativeBackend,
    *,
    page_size: int = 16,
    threads: int = 1,
    seed: int = 0,
    fused: bool = False,
    caches: list[Tensor] | None = None,
    held: torch.dtype | None = None,
) -> list[Tensor]:
    """The rows of all tokens of each sequence, [n, H, D] each; `held`: dtype of the caches."""
    groups, size = world.k[0].shape[1:]
    dtype, heads = world.q[0].dtype, world.q[0].shape[1]
    needed = [-(-n // page_size) for n in world.lengths]
    pages = list(range(1, sum(needed) + 2))  # one page stays free
    random.Random(seed).shuffle(pages)
    tables = [[pages.pop() for _ in range(n)] for n in needed]
    shape = (sum(needed) + 2, page_size, groups, size)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    if held == torch.int8:  # scales of these bytes are NaN
        keys, values = (torch.full((*shape[:3], size + 4), -1, dtype=held) for _ in range(2))
    keys[0] = values[0] = 0
    if caches is not None:
        caches += [keys, values]
    own = {} if world.scores == PLAIN else dict(vars(world.scores))
    sinks = own.pop("sinks", ())
    rotation = QKRotation.of(None, None, sinks=torch.tensor(sinks)) if sinks else None
    backend = make(
        [keys], [values], num_heads=heads, scale=world.scale, windows=[world.window], **own
    )
    done = [0] * len(needed)
    rows: list[list[Tensor]] = [[] for _ in needed]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in steps:
            starts, lengths, slots, parts = [0], [], [], []
            for i, num in step:
                span = slice(done[i], done[i] + num)
                slots += [tables[i][p // page_size] * page_size + p % page_size
                          for p in range(span.start, span.stop)]  # fmt: skip
                parts.append((world.q[i][span], world.k[i][span], world.v[i][span]))
                done[i] += num
                starts.append(starts[-1] + num)
                lengths.append(done[i])
            width = -(-max(lengths) // page_size)
            table = torch.tensor([(tables[i] + [0] * width)[:width] for i, _ in step])
            backend.plan(BatchLayout(starts, lengths, torch.tensor(slots), table))
            q, k, v = (torch.cat(part) for part in zip(*parts, strict=True))
            if fused:  # slices of one projection, as the decoder passes them
                q, k, v = torch.cat([q, k, v], dim=1).split([heads, groups, groups], dim=1)
            out = backend(0, q, k, v, rotation)
            if threads > 1:  # a plan serves all layers
                assert torch.equal(out, backend(0, q, k, v, rotation))
            for (i, _), first, last in zip(step, starts, starts[1:], strict=False):
                rows[i].append(out[first:last])
    finally:
        torch.set_num_threads(before)
    return [torch.cat(parts) for parts in rows]


def in_order(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Caches as [pages, page_size, G, D], from the layout of the chosen instruction set."""
    pages, page_size, groups, size = keys.shape
    strips = keys.dtype == BF16 and page_size % 16 == 0 and size % 16 == 0
    if not strips or loader.chosen_instruction_set() != "avx512_bf16":
        return keys, values
    # In a head of a strip, a line holds 2 dims of 16 keys, or 16 dims of 2 values.
    keys = keys.view(pages, page_size // 16, groups, size // 2, 16, 2).permute(0, 1, 4, 2, 3, 5)
    values = values.view(pages, page_size // 16, groups, 8, size, 2).permute(0, 1, 3, 5, 2, 4)
    shape = (pages, page_size, groups, size)
    return keys.reshape(shape), values.reshape(shape)


def exact(world: World) -> list[Tensor]:
    """The result of dense attention in float64."""
    out = []
    for q, k, v in zip(world.q, world.k, world.v, strict=True):
        rep = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(rep, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * world.scale
        position = torch.arange(len(q))
        distance = position[:, None] - position
        if (cap := world.scores.softcap) is not None:
            scores = cap * (scores / cap).tanh()
        if world.scores.slopes:
            slopes = torch.tensor(world.scores.slopes)[:, None, None]
            if world.scores.rounded is None:
                scores = scores - slopes * distance
            else:
                products = slopes.bfloat16() * position.bfloat16()
                scores = scores + products.double() * world.scores.rounded
        hidden = distance < 0
        if world.window is not None:
            hidden |= distance >= world.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if world.scores.sinks:
            sinks = torch.tensor(world.scores.sinks).double()[:, None, None]
            scores = torch.cat([scores, sinks.expand(-1, len(q), 1)], dim=-1)
        probs = scores.softmax(dim=-1)[..., : len(q)]
        out.append(torch.einsum("hqk,khd->qhd", probs, v))
    return out


def error(ours: list[Tensor], wanted: list[Tensor]) -> tuple[float, float]:
    """(largest difference, root mean square of the differences); NaN counts as infinite."""
    difference = torch.cat([(a.double() - b).flatten() for a, b in zip(ours, wanted, strict=True)])
    difference = difference.nan_to_num(torch.inf)
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


# (query heads, groups, head size, window)
Shape = tuple[int, int, int, int | None]
"""Heads, groups, size of a head, window."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; unlike `torch.equal` it distinguishes 0 and -0."""
    kind = torch.int16 if a.dtype == BF16 else torch.int32
    return torch.equal(a.view(kind), b.view(kind))


def assert_invariant(
    world: World,
    make: Callable[..., AttentionBackend] = NativeBackend,
    *,
    page_sizes: tuple[int, int, int] | None = None,
    held: torch.dtype | None = None,
    thorough: bool = False,
) -> None:
    """Assert that each row has the same bits for all steps, page sizes and numbers of threads."""
    few, one, all_of_them = page_sizes or (3, 1, max(world.lengths))
    wanted = run(world, whole(world), make, held=held)
    decoding = one_by_one(world) if thorough else one_by_one_near_edges(world)
    ways: list[tuple[str, Steps, dict[str, object]]] = [
        ("decode", decoding, {}),
        ("decode, 2 threads", decoding, {"threads": 2, "page_size": few}),
        ("2 threads", whole(world), {"threads": 2, "seed": 1}),
        ("5 threads", whole(world), {"threads": 5}),
        ("small pages", whole(world), {"page_size": one}),
        ("one page each", whole(world), {"page_size": all_of_them}),
        ("fused", whole(world), {"fused": True}),
    ]
    ways += [(f"ragged {s}", ragged(world, s), {"threads": 1 + s % 3}) for s in range(3)]
    for name, steps, options in ways:
        got = run(world, steps, make, held=held, **options)  # type: ignore[arg-type]
        for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
            assert same_bits(a, b), f"{name}: sequence {i} differs"
    for i, rows in enumerate(wanted):
        alone = world.only(i)
        assert same_bits(rows, run(alone, whole(alone), make, held=held)[0]), f"{i} alone differs"
