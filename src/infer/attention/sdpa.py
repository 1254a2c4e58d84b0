"""`SDPABackend`: attention by torch's `scaled_dot_product_attention`, on any device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.attention.layout import BatchLayout, held_slopes
from infer.kernels.rotary import QKRotation

TILE = 128
"""Maximum number of query tokens of a tile."""


def padded_context(num_keys: int) -> int:
    """The padded context length of a tile of `num_keys` keys.

    It is 64 at least. Above that it is a multiple of 64, or of about an eighth of the length.
    """
    if num_keys <= 64:
        return 64
    step = max(64, 1 << max(0, num_keys.bit_length() - 4))
    return -(-num_keys // step) * step


@dataclass(slots=True, eq=False)
class _Tiles:
    """n tiles of the same shape: t query tokens and s keys each, padding included."""

    queries: Tensor
    """Rows of the tiles' tokens among the step's tokens; [n · t]."""
    cells: Tensor
    """Cache cells of the keys; padding has cell 0, which holds no data; [n · s]."""
    mask: Tensor
    """True where a query sees a key; [n, 1, t or t · (H/G), s]."""
    keys: Tensor
    """Positions of the keys; [n, s]."""
    positions: Tensor
    """Positions of the queries; [n, t]."""
    num_tiles: int
    """Number of tiles, n."""
    num_queries: int
    """Number of query tokens of a tile, t."""


class SDPABackend:
    """The reference attention backend.

    It is the reference for the other backends. The query heads of a key/value group become query
    rows of one head, so grouped-query attention repeats no key or value. Queries are divided into
    tiles of at most 128 tokens. Tiles with the same number of tokens and the same padded context
    are computed in one call. The padded context depends only on the sequence's own length, so other
    sequences of the batch do not change what is computed for it. Keys and values are gathered
    through the page tables; the native kernels avoid that copy.
    """

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
    ) -> None:
        """`keys`, `values`: the KV cache of each layer, [pages, page_size, G, D].

        The other arguments are those of `AttentionArguments`; `windows` may be (): none.
        """
        self._windows = list(windows) or [None] * len(keys)
        _, self.page_size, self.num_kv_heads, self.head_dim = keys[0].shape
        self._keys = [cache.view(-1, self.num_kv_heads, self.head_dim) for cache in keys]
        self._values = [cache.view(-1, self.num_kv_heads, self.head_dim) for cache in values]
        self.group_size = num_heads // self.num_kv_heads
        self.scale, self.softcap, self.rounded = scale, softcap, rounded
        shape = (self.num_kv_heads, 1, self.group_size, 1)
        self._slopes = (
            held_slopes(slopes, rounded).view(shape).to(keys[0].device) if slopes else None
        )
        self._device = keys[0].device
        self._slots: Tensor
        # One entry per window: layers with the same window share cells and masks.
        self._tiles: dict[int | None, list[_Tiles]] = {}

    def plan(self, layout: BatchLayout) -> None:
        """Divide the step into tiles and compute their cells and masks; all layers use them."""
        self._slots = layout.slot_mapping
        self._tiles = {w: self._divide(layout, w) for w in set(self._windows)}

    def _divide(self, layout: BatchLayout, window: int | None) -> list[_Tiles]:
        # (tokens, padded context) → [(sequence, query row, its position, first key's position)]
        shapes: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
        for i, seq_len in enumerate(layout.seq_lens):
            row, end = layout.query_start_loc[i], layout.query_start_loc[i + 1]
            position = seq_len - (end - row)
            while row < end:
                # Tiles end at multiples of TILE, so the chunks of a prompt do not change the tiles.
                num = min(TILE - position % TILE, end - row)
                first = 0 if window is None else max(0, position - window + 1) // 64 * 64
                context = padded_context(position + num - first)
                shapes[num, context].append((i, row, position, first))
                row += num
                position += num
        return [
            self._tiles_of_shape(layout.page_tables, num, context, members, window)
            for (num, context), members in shapes.items()
        ]

    def _tiles_of_shape(
        self,
        page_tables: Tensor,
        num: int,
        context: int,
        members: list[tuple[int, int, int, int]],
        window: int | None,
    ) -> _Tiles:
        device, size = self._device, self.page_size
        index = torch.tensor(members, dtype=torch.int64).to(device)  # [n, 4]
        sequences, rows, positions, firsts = index.unbind(1)
        steps = torch.arange(num, device=device)
        keys = firsts[:, None] + torch.arange(context, device=device)  # [n, s] positions
        # Cells after the end of a sequence may hold NaN, and 0 · NaN is NaN. Cell 0 is finite.
        inside = keys < (positions + num)[:, None]
        pages = page_tables[sequences].gather(1, (keys // size) * inside)
        cells = (pages * size + keys % size) * inside
        queries = positions[:, None] + steps  # [n, t] positions
        mask = keys[:, None, :] <= queries[:, :, None]  # [n, t, s]
        if window is not None:
            mask &= keys[:, None, :] > queries[:, :, None] - window
        if num > 1 and self.group_size > 1:
            mask = mask.repeat_interleave(self.group_size, dim=1)
        return _Tiles(
            queries=(rows[:, None] + steps).flatten(),
            cells=cells.flatten(),
            mask=mask[:, None],
            keys=keys,
            positions=queries,
            num_tiles=len(members),
            num_queries=num,
        )

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        """Rotate q and k, store k, v [T, G, D] in the cache, attend: q [T, H, D] → [T, H, D]."""
        if rotation is not None:
            q, k = rotation(q, k)
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self._slots, k)
        values.index_copy_(0, self._slots, v)
        out = torch.empty_like(q)
        sinks = None if rotation is None else rotation.sinks
        for tiles in self._tiles[self._windows[layer]]:
            out.index_copy_(0, tiles.queries, self._attend_tiles(tiles, q, keys, values, sinks))
        return out

    def _attend_tiles(
        self, tiles: _Tiles, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        n, t = tiles.num_tiles, tiles.num_queries
        heads, rep, size = self.num_kv_heads, self.group_size, self.head_dim
        queries = q.index_select(0, tiles.queries).view(n, t, heads, rep, size)
        queries = queries.transpose(1, 2).reshape(n, heads, t * rep, size)
        k = keys.index_select(0, tiles.cells).view(n, -1, heads, size).transpose(1, 2)
        v = values.index_select(0, tiles.cells).view(n, -1, heads, size).transpose(1, 2)
        if self.softcap is not None or self._slopes is not None or sinks is not None:
            out = self._attend_shaped(tiles, queries, k, v, sinks)
        else:
            out = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=tiles.mask, scale=self.scale
            )
        return out.view(n, heads, t, rep, size).transpose(1, 2).reshape(n * t, heads * rep, size)

    def _attend_shaped(
        self, tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attention with a cap of scores, with slopes or with sinks [H], in float32.

        q [n, G, t · H/G, D]; k, v [n, G, s, D] → [n, G, t · H/G, D]."""
        scores = q.float() @ k.float().transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self._slopes is not None:
            scores = scores + self._biases(tiles).flatten(2, 3)
        scores = scores.masked_fill(~tiles.mask, -torch.inf)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            of_rows = sinks.view(1, self.num_kv_heads, 1, self.group_size, 1)
            shape = (len(scores), -1, tiles.num_queries, -1, -1)
            column = of_rows.expand(shape).flatten(2, 3)
            weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        return (weights @ v.float()).to(v.dtype)

    def _biases(self, tiles: _Tiles) -> Tensor:
        """What is added to scores by slopes: [n, G, t, H/G, s]."""
        assert self._slopes is not None
        keys = tiles.keys[:, None, None, None, :]
        if self.rounded is None:
            return self._slopes * (keys - tiles.positions[:, None, :, None, None])
        products = (self._slopes * keys.bfloat16().float()).bfloat16().float()
        return (products * self.rounded).expand(-1, -1, tiles.num_queries, -1, -1)
