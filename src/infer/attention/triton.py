"""`TritonBackend`: attention on CUDA devices by the kernels of `kernels.cuda`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.attention.layout import BatchLayout, Items, held_slopes
from infer.kernels.cuda import has_pdl, interpreting
from infer.kernels.cuda.attention import ITEM_FIELDS, attend, decode
from infer.kernels.cuda.launch import launch
from infer.kernels.cuda.rotary import turn_and_write
from infer.kernels.rotary import QKRotation

SHORT_ROWS = 16
"""Maximum number of rows (tokens · query heads per key head) of a short tile."""
ORDERED_SPLIT = 256
"""Number of keys of a split in the batch-invariant mode."""
LEAST_SPLIT = 64
"""Minimum number of keys of a split.

It is a multiple of every tile size except 128, so that a split consists of whole tiles.
"""
LONE_ROWS = 4
"""Maximum number of decoding sequences for which an item has the most threads."""
FEW_ROWS = 32
"""Maximum number of decoding sequences for which an item has more threads than usual."""
UNSPLIT = 1 << 30
"""A number of keys that no tile has."""
MAX_SHORT_TILES = 4096
"""Maximum number of short tiles that are split in a step; each has its counters."""
PARTIAL_BYTES = 128 << 20
"""Size of the memory for the partial results of splits, in bytes."""
ITEMS_PER_PROGRAM = 1
"""Number of items that each program should have; keys are split to reach it."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Launch parameters of the kernel for one kind of tile."""

    rows: int
    """Number of query rows."""
    tile: int
    """Number of keys that are computed at a time."""
    warps: int
    """Number of warps of a program."""
    stages: int
    """Number of stages of the software pipeline that loads keys and values."""


def _shapes_for(size: int) -> tuple[_Shape, _Shape, _Shape, _Shape, _Shape]:
    """The shapes of short and long tiles, and of decodes of one, few and many sequences.

    `size`: of a head. Measured on an H100, up to heads of 256. The tile sizes keep the number of
    bytes in flight about the same.
    """
    keys = 16 if size > 256 else 32 if size > 128 else 64
    short = _Shape(SHORT_ROWS, keys, 4, 2 if size > 128 else 3)
    long = _Shape(64, 32, 4, 2) if size > 128 else _Shape(128, 64, 8, 3)
    long = _Shape(32, 16, 4, 1) if size > 256 else long
    lone = _Shape(SHORT_ROWS, keys, 8, 2)
    few = _Shape(SHORT_ROWS, 128 if size <= 64 else keys, 4, 2)
    return short, long, lone, few, _Shape(SHORT_ROWS, keys, 4 if size <= 64 else 2, 3)


class TritonBackend:
    """The attention backend for CUDA devices.

    The shapes of a step are data: `items` lists tiles of queries and ranges of keys as numbers, and
    a fixed number of kernel programs takes items from the list. A kernel with 16-row products
    computes tiles of at most 16 rows (decode, short chunks). Longer chunks are divided into tiles
    of 64 or 128 rows. The keys of a tile are split where there would otherwise be too few items for
    the device. The split of keys is that of Flash-Decoding.

    With `ordered`, the bits of a row's result depend only on its own tokens: every tile has 16
    rows, and splits begin at multiples of `ORDERED_SPLIT` keys.
    """

    num_fields = ITEM_FIELDS

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        num_heads: int,
        scale: float,
        softcap: float | None = None,
        slopes: Sequence[float] = (),
        rounded: float | None = None,
        windows: Sequence[int | None] = (),
        ordered: bool = False,
    ) -> None:
        """`keys`, `values`: the KV cache of each layer, [pages, page_size, G, D].

        `ordered`: the batch-invariant mode. The other arguments are those of
        `AttentionArguments`; `windows` may be (): none. `ValueError` if more than 16 query heads
        share a key head.
        """
        self._caches = list(zip(keys, values, strict=True))
        per_layer = [window or 0 for window in windows] or [0] * len(keys)
        self.windows: Sequence[int] = sorted(set(per_layer))
        self._window_of = [self.windows.index(window) for window in per_layer]
        _, self.page_size, self.num_kv_heads, self.head_dim = keys[0].shape
        self.num_heads, self.scale, self.softcap = num_heads, scale, softcap
        self.ordered = ordered
        self._rep = num_heads // self.num_kv_heads
        if self._rep > SHORT_ROWS:
            raise ValueError(f"{self._rep} query heads share a key head; the kernel takes 16")
        device = keys[0].device
        self._device = device
        self._slopes = held_slopes(slopes or [0.0], rounded).to(device)
        self._rounded = rounded or 0.0
        self._kind_of_slopes = 0 if not slopes else 1 if rounded is None else 2
        on_device = device.type == "cuda"
        count = torch.cuda.get_device_properties(device).multi_processor_count if on_device else 2
        self.num_programs = 4 * count
        shapes = _shapes_for(self.head_dim)
        self._short, self._long, self._lone, self._few, self._crowd = shapes
        row_bytes = 4 * num_heads * (self.head_dim + 2)
        rows = PARTIAL_BYTES // row_bytes if on_device else 4096
        self.max_partial_rows = rows
        self._partial = torch.empty(
            (rows, num_heads, self.head_dim), dtype=torch.float32, device=device
        )
        self._stats = torch.empty((rows, num_heads, 2), dtype=torch.float32, device=device)
        counters = MAX_SHORT_TILES * self.num_kv_heads
        self._arrived = torch.zeros(counters, dtype=torch.int32, device=device)
        self._none = torch.zeros(1, dtype=torch.int32, device=device)
        self._product = tl.float32 if keys[0].dtype == torch.float32 else None
        if self._product is None:
            kinds = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
            self._product = tl.float32 if interpreting() else kinds[keys[0].dtype]
        self._pdl = on_device and has_pdl(device)
        self._decodes = False
        self._slots: Tensor
        self._tables: Tensor
        self._lists: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @property
    def decodes(self) -> bool:
        """See `DeviceBackend`."""
        return not self.ordered

    def capacity(self, num_tokens: int, num_sequences: int) -> tuple[int, int]:
        """See `DeviceBackend`."""
        if self.ordered:
            tiles = -(-num_tokens * self._rep // SHORT_ROWS) + num_sequences
            return tiles + self.max_partial_rows, 0
        programs = self.num_programs * ITEMS_PER_PROGRAM // self.num_kv_heads
        tokens = self._long.rows // self._rep
        return 2 * num_sequences + programs + 8, -(-num_tokens // tokens) + num_sequences

    def plan(self, layout: BatchLayout) -> None:
        """Make the items of a step and copy them to the device."""
        tables = layout.page_tables.to(torch.int32)
        lists = []
        rows = np.arange(len(layout.seq_lens), dtype=np.int32)
        for items in self.items(layout.query_start_loc, layout.seq_lens, rows):
            sent = []
            for array in (items.short, items.long):
                sent.append(torch.from_numpy(array).to(self._device))
                count = torch.tensor([len(array)], dtype=torch.int32)
                sent.append(count.to(self._device))
            lists.append((sent[0], sent[1], sent[2], sent[3]))
        num_tokens, num_sequences = layout.query_start_loc[-1], len(layout.seq_lens)
        self.use(layout.slot_mapping, tables, lists, decode=num_tokens == num_sequences)

    def use(
        self,
        slots: Tensor,
        tables: Tensor,
        lists: list[tuple[Tensor, Tensor, Tensor, Tensor]],
        *,
        decode: bool,
    ) -> None:
        """See `DeviceBackend`."""
        self._slots, self._tables, self._lists = slots, tables, lists
        self._decodes = decode and self.decodes

    def items(
        self,
        query_start_loc: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        table_rows: np.ndarray,
    ) -> list[Items]:
        """See `DeviceBackend`."""
        starts = np.asarray(query_start_loc, np.int32)
        lengths = np.asarray(seq_lens, np.int32)
        counts = starts[1:] - starts[:-1]
        is_short = counts * self._rep <= SHORT_ROWS
        if self.ordered:
            is_short[:] = True
        members = (np.flatnonzero(is_short), np.flatnonzero(~is_short))
        made = []
        for window in self.windows:
            parts = []
            for chosen, shape in zip(members, (self._short, self._long), strict=True):
                tiles = self._tiles(
                    starts[chosen], counts[chosen], lengths[chosen], table_rows[chosen],
                    shape.rows // self._rep, window, shape.tile,
                )  # fmt: skip
                parts.append(self._split(tiles, shape is self._short))
            made.append(Items(*parts))
        return made

    def _tiles(
        self,
        starts: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
        rows: np.ndarray,
        tokens: int,
        window: int,
        step: int,
    ) -> np.ndarray:
        """The tiles of some sequences, of at most `tokens` tokens each; [N, 6] int32.

        Fields: first row, tokens, first position, row of the page table, first key, end of the
        keys. `step`: the first key is a multiple of it.
        """
        tiles = np.empty((0, 6), np.int32)
        if not len(counts):
            return tiles
        per = -(-counts // tokens)
        if per.max() == 1:
            first = np.zeros_like(counts)
            which = np.arange(len(counts))
        else:
            which = np.repeat(np.arange(len(counts)), per)
            ends = np.cumsum(per)
            first = (np.arange(ends[-1]) - np.repeat(ends - per, per)).astype(np.int32) * tokens
        tiles = np.empty((len(which), 6), np.int32)
        tiles[:, 0] = starts[which] + first
        tiles[:, 1] = np.minimum(counts[which] - first, tokens)
        tiles[:, 2] = lengths[which] - counts[which] + first
        tiles[:, 3] = rows[which]
        tiles[:, 4] = 0
        if window:
            tiles[:, 4] = np.maximum(tiles[:, 2] - window + 1, 0) // step * step
        tiles[:, 5] = tiles[:, 2] + tiles[:, 1]
        return tiles

    def _split(self, tiles: np.ndarray, is_short: bool) -> np.ndarray:
        """The items of tiles [N, 6]: [M, ITEM_FIELDS] int32, those with most keys first."""
        num_tiles = len(tiles)
        made = np.zeros((num_tiles, ITEM_FIELDS), np.int32)
        if not num_tiles:
            return made
        keys = tiles[:, 5] - tiles[:, 4]
        size, splits = self._splits(tiles, keys) if is_short else (UNSPLIT, np.ones_like(keys))
        begins = tiles[:, 4] // size
        total = int(splits.sum())
        if total == num_tiles:
            made[:, :6] = tiles
            made[:, 7] = 1
            return made[np.argsort(-keys, kind="stable")] if num_tiles > 1 else made
        which = np.repeat(np.arange(num_tiles), splits)
        ends = np.cumsum(splits)
        split = (np.arange(total) - np.repeat(ends - splits, splits)).astype(np.int32)
        rows = np.where(splits > 1, tiles[:, 1] * splits, 0)
        base = np.cumsum(rows) - rows
        made = np.empty((total, ITEM_FIELDS), np.int32)
        made[:, :6] = tiles[which]
        is_unsplit = splits[which] == 1
        from_key = (begins[which] + split) * size
        made[:, 4] = np.where(is_unsplit, made[:, 4], np.maximum(made[:, 4], from_key))
        made[:, 5] = np.where(is_unsplit, made[:, 5], np.minimum(made[:, 5], from_key + size))
        made[:, 6] = split
        made[:, 7] = splits[which]
        made[:, 8] = base[which]
        made[:, 9] = which
        return made[np.argsort(made[:, 4] - made[:, 5], kind="stable")]

    def _splits(self, tiles: np.ndarray, keys: np.ndarray) -> tuple[int, np.ndarray]:
        """(number of keys of a split, a power of two; number of splits of each tile [N])

        Splits are small enough that the programs have enough items, and large enough that the
        memory for partial results suffices. In the batch-invariant mode their size is fixed, and
        one program computes all splits of a tile of several tokens, of which there are many, or
        of all tiles if the memory does not suffice; that changes no bit.
        """
        num_tiles = len(tiles)
        if num_tiles > MAX_SHORT_TILES:
            return UNSPLIT, np.ones_like(keys)
        if self.ordered:
            splits = _num_splits(tiles, ORDERED_SPLIT)
            splits[tiles[:, 1] > 1] = 1
            if self._fits(tiles, splits):
                return ORDERED_SPLIT, splits
            return ORDERED_SPLIT, np.ones_like(keys)
        wanted = self._programs(num_tiles) * ITEMS_PER_PROGRAM // self.num_kv_heads
        ideal = max(1, int(keys.sum()) // max(1, wanted))
        size = max(LEAST_SPLIT, 1 << (ideal - 1).bit_length())
        while not self._fits(tiles, splits := _num_splits(tiles, size)):
            size *= 2
        return size, splits

    def _fits(self, tiles: np.ndarray, splits: np.ndarray) -> bool:
        """Whether the memory for partial results suffices for so many splits of each tile."""
        return int((tiles[:, 1] * splits)[splits > 1].sum()) <= self.max_partial_rows

    def _programs(self, num_tiles: int) -> int:
        """The number of programs for so many short tiles.

        Few tiles take fewer programs, which have more threads and registers each.
        """
        return self.num_programs // 2 if num_tiles <= FEW_ROWS else self.num_programs

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        """Rotate q (in place) and k, store k, v [T, G, D] in the cache, attend.

        q [T, H, D] → [T, H, D].
        """
        keys, values = self._caches[layer]
        if rotation is not None and rotation.scales_queries:
            (q, k), rotation = rotation(q, k), None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decodes and rotation is not None and rotation.cos is not None:
            self._decode(layer, q, k, v, rotation, out)
            return out
        self._write(q, k, v, rotation, keys, values)
        window = self._window_of[layer]
        short, num_short, long, num_long = self._lists[window]
        if len(short):
            self._launch(self._short, short, num_short, q, out, keys, values, self.windows[window])
        if len(long):
            self._launch(self._long, long, num_long, q, out, keys, values, self.windows[window])
        return out

    def _write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: QKRotation | None,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        half = self.head_dim // 2
        heads = 8 if half >= 32 else 16
        cos = sin = q_norm = k_norm = q
        eps = 0.0
        rotates = rotation is not None and rotation.cos is not None
        has_norms = rotation is not None and rotation.norms is not None
        if rotation is not None and rotation.cos is not None and rotation.sin is not None:
            cos, sin = rotation.cos, rotation.sin
        if rotation is not None and rotation.norms is not None:
            (q_norm, k_norm), eps = rotation.norms.weights, rotation.norms.q.eps
        blocks = triton.cdiv(self.num_heads + 2 * self.num_kv_heads, heads)
        launch(turn_and_write, (q.shape[0], blocks))(
            q, k, v, keys, values, self._slots, cos, sin, q_norm, k_norm,
            q.stride(0), k.stride(0), v.stride(0), cos.stride(0), eps,
            H=self.num_heads, G=self.num_kv_heads, D=self.head_dim,
            HALF=triton.next_power_of_2(half), HEADS=heads, TURN=rotates,
            NORMS=has_norms, PDL=self._pdl, num_warps=2, launch_pdl=self._pdl,
        )  # fmt: skip

    def _decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation, out: Tensor
    ) -> None:
        assert rotation.cos is not None
        keys, values = self._caches[layer]
        window = self.windows[self._window_of[layer]]
        items, num_items, _, _ = self._lists[self._window_of[layer]]
        norms = rotation.norms
        q_norm, k_norm = (q, k) if norms is None else norms.weights
        num_rows = q.shape[0]
        is_few = num_rows <= FEW_ROWS
        shape = self._crowd if not is_few else self._few if num_rows > LONE_ROWS else self._lone
        launch(decode, (self._programs(num_rows),))(
            q, k, v, keys, values, self._tables, items, num_items,
            self._partial, self._stats, self._arrived, out,
            rotation.cos, rotation.sin, q_norm, k_norm,
            self._slopes, self.scale, self.softcap or 0.0, self._rounded, window,
            0.0 if norms is None else norms.q.eps,
            q.stride(0), k.stride(0), v.stride(0), out.stride(0), self._tables.stride(0),
            rotation.cos.stride(0),
            H=self.num_heads, G=self.num_kv_heads, D=self.head_dim,
            BLOCK_D=triton.next_power_of_2(self.head_dim), PAGE=self.page_size,
            ROWS=shape.rows, TILE=shape.tile,
            WINDOW=window > 0, CAP=self.softcap is not None, SLOPES=self._kind_of_slopes,
            NORMS=norms is not None,
            AHEAD=is_few, PRODUCT=self._product, PRECISION="ieee", PDL=self._pdl,
            num_warps=shape.warps, num_stages=shape.stages, launch_pdl=self._pdl,
        )  # fmt: skip

    def _launch(
        self,
        shape: _Shape,
        items: Tensor,
        num_items: Tensor,
        q: Tensor,
        out: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int,
    ) -> None:
        is_short = shape is self._short
        launch(attend, (self.num_programs if is_short else self.num_programs // 2,))(
            q, keys, values, self._tables, items, num_items,
            self._partial, self._stats, self._arrived, out,
            self._slopes, self.scale, self.softcap or 0.0, self._rounded, window,
            q.stride(0), out.stride(0), self._tables.stride(0),
            H=self.num_heads, G=self.num_kv_heads, D=self.head_dim,
            BLOCK_D=triton.next_power_of_2(self.head_dim), PAGE=self.page_size,
            ROWS=shape.rows, TILE=shape.tile, SPLIT=ORDERED_SPLIT,
            WINDOW=window > 0, CAP=self.softcap is not None, SLOPES=self._kind_of_slopes,
            PARTS=is_short, ORDERED=self.ordered,
            PRODUCT=self._product, PRECISION="ieee", PDL=self._pdl,
            num_warps=shape.warps, num_stages=shape.stages, launch_pdl=self._pdl,
        )  # fmt: skip


def _num_splits(tiles: np.ndarray, size: int) -> np.ndarray:
    """The number of splits of each tile [N, 6] whose splits begin at multiples of `size` keys."""
    splits: np.ndarray = -(-tiles[:, 5] // size) - tiles[:, 4] // size
    return splits
