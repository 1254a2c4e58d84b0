"""A plain reference of `infer.cells`: lists of sets, and dense attention in float32.

`SetCells` is what each `seq_*` function means, one cell at a time. `DenseCells` adds the forward
pass: every cell keeps its keys without rotation, each decode rotates all of them to their positions
of now, as the model itself rotates tokens of these positions, and attention is a softmax under a
mask of T × cells. Nothing of the engine's storage, tables, groups or kernels is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from infer.kernels.rotary import QKRotation, rotate
from infer.models.model import Model


@dataclass(eq=False)
class SetCell:
    """One token that some sequence holds."""

    pos: int
    seqs: set[int]
    token: int
    keys: list[Tensor] = field(default_factory=list)
    """Of each layer, [G, D], not rotated."""
    values: list[Tensor] = field(default_factory=list)


class SetCells:
    """The meaning of the functions on sequences."""

    def __init__(self) -> None:
        self.cells: list[SetCell] = []

    def of(self, seq: int, p0: int, p1: int) -> list[SetCell]:
        end = p1 if p1 >= 0 else 1 << 60
        return [c for c in self.cells if (seq < 0 or seq in c.seqs) and p0 <= c.pos < end]

    def drop_unheld(self) -> None:
        self.cells = [c for c in self.cells if c.seqs]

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        for cell in self.of(src, p0, p1):
            cell.seqs.add(dst)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        for cell in self.of(seq, p0, p1):
            cell.seqs = set() if seq < 0 else cell.seqs - {seq}
        self.drop_unheld()

    def seq_keep(self, seq: int) -> None:
        for cell in self.cells:
            cell.seqs &= {seq}
        self.drop_unheld()

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        for cell in self.of(seq, p0, p1):
            cell.pos += delta
            if cell.pos < 0:
                cell.seqs = set()
        self.drop_unheld()

    def next_pos(self, seq: int) -> int:
        return max((c.pos + 1 for c in self.of(seq, -1, -1)), default=0)

    def rows(self) -> list[tuple[int, tuple[int, ...], int]]:
        return sorted((c.pos, tuple(sorted(c.seqs)), c.token) for c in self.cells)


class DenseCells(SetCells):
    """The same with a model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self._rotations: list[QKRotation | None] = []
        self._num_positions = 0

    @torch.inference_mode()
    def decode(self, tokens: list[int], pos: list[int], seqs: list[set[int]]) -> Tensor:
        """Logits [T, V] of all tokens, computed in one pass over all cells."""
        new = [SetCell(*each) for each in zip(pos, map(set, seqs), tokens, strict=True)]
        self.cells += new
        at = torch.tensor([c.pos for c in self.cells])
        shared = [[bool(q.seqs & c.seqs) for c in self.cells] for q in new]
        config = self.model.config
        rotations = self.rotations(int(at.max()) + 1)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
        ) -> Tensor:
            if rotation is not None and rotation.norms is not None:
                q, k = rotation.norms.q(q), rotation.norms.k(k)
            for cell, key, value in zip(new, k, v, strict=True):
                cell.keys.append(key.clone())
                cell.values.append(value.clone())
            keys = torch.stack([c.keys[layer] for c in self.cells])
            values = torch.stack([c.values[layer] for c in self.cells])
            window = config.layer(layer).window
            tables = rotations[layer]
            if tables is not None and tables.cos is not None and tables.sin is not None:
                cos, sin = tables.cos[at], tables.sin[at]
                q = rotate(q, cos[-len(new) :], sin[-len(new) :])
                keys = rotate(keys, cos, sin)
            if rotation is not None and rotation.factor is not None:
                q = q * rotation.factor
            if rotation is not None and rotation.growth is not None:
                q = q * rotation.growth[:, None, None]
            distance = at[-len(new) :, None] - at[None, :]
            mask = torch.tensor(shared) & (distance >= 0)
            if window is not None:
                mask &= distance < window
            rep = q.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(rep, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, keys) * config.layer(layer).attention_scale
            if (cap := config.score_softcap) is not None:
                scores = cap * torch.tanh(scores / cap)
            if config.alibi is not None:
                slopes = torch.tensor(config.alibi.slopes)[:, None, None]
                if config.alibi.rounded is None:
                    scores = scores - slopes * distance
                else:  # of the place among the cells that are seen
                    place = (mask.int().cumsum(1) - 1).float()
                    products = (slopes.bfloat16() * place.bfloat16()).float()
                    scores = scores + products * config.alibi.rounded
            scores = scores.masked_fill(~mask, -torch.inf)
            if rotation is not None and rotation.sinks is not None:
                column = rotation.sinks[:, None, None].expand(-1, len(q), 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = scores.softmax(dim=-1)[..., : len(keys)]
            return torch.einsum("hqk,khd->qhd", weights, values)

        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(pos), attend)
        return self.model.logits(hidden)

    def rotations(self, num_positions: int) -> list[QKRotation | None]:
        """What each layer passes to attention for tokens at positions from 0 on, at least so many.
        To learn that takes a pass through the model."""
        if num_positions <= self._num_positions:
            return self._rotations
        self._num_positions = max(64, 1 << (num_positions - 1).bit_length())
        positions = torch.arange(self._num_positions)
        found = self._rotations = []

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
        ) -> Tensor:
            assert layer == len(found)
            found.append(rotation)
            return torch.zeros_like(q)

        self.model.forward(torch.zeros_like(positions), positions, attend)
        return found
