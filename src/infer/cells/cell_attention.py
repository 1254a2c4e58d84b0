"""`CellAttention`: the engine's attention backends over cells, and rotation of stored keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.attention.layout import AttentionBackend
from infer.cells.visibility import PartLayout
from infer.errors import RequestError
from infer.kernels.rotary import QKRotation, rotate
from infer.models.model import Attend, Model
from infer.models.model_config import ModelConfig
from infer.models.rope import inverse_frequencies

MakeBackend = Callable[[Sequence[int | None]], AttentionBackend]
"""Makes a backend over the context's storage from the window of each layer."""
PROBES = 8
"""Number of tokens whose keys `rotation_problem` compares."""
FARTHEST = 1000
"""Maximum number of positions by which `rotation_problem` moves keys."""
ROTATION_ERROR = 0.05
"""Maximum difference of moved keys from computed ones, relative; bfloat16 rounds to 0.004."""


class CellAttention:
    """It chooses the backend for each part of a batch. Where attention's own windows are right, one
    backend computes all layers, so that a stack of layers is still one call. Otherwise the layers
    of each window have a backend of their own, without a window, whose tables hold exactly what is
    in it."""

    def __init__(self, config: ModelConfig, make: MakeBackend) -> None:
        """`make`: makes backends over one storage."""
        self._window_of = [layer.window for layer in config.layers()]
        self._has_slopes = config.alibi is not None
        self.windows = sorted({window for window in self._window_of if window is not None})
        """Distinct windows of the layers, in positions."""
        self.backend = make(self._window_of)
        """The backend of all layers."""
        self._exact = {window: make([None] * config.num_layers) for window in self.windows}

    def plan(self, part: PartLayout) -> Attend:
        """Prepare for a part of a batch; returns the callable that the model attends with.

        Raises `RequestError` for a gap among positions if scores depend on distances (ALiBi):
        attention counts distances in cells."""
        if self._has_slopes and not part.is_gapless:
            raise RequestError(
                "the positions of a sequence have a gap, or one is there twice, and the model's"
                " attention scores depend on distances (ALiBi): close the gap (seq_add), or decode"
                " the tokens again",
                param="pos",
            )
        self.backend.plan(part.layout)
        if not part.by_window:
            return self.backend
        for window, layout in part.by_window.items():
            self._exact[window].plan(layout)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
        ) -> Tensor:
            window = self._window_of[layer]
            backend = self.backend if window is None else self._exact[window]
            return backend(layer, q, k, v, rotation)

        return attend


class KeyRotation:
    """Rotates keys in a storage from their old positions to new ones, each layer's by its RoPE.

    Keys of layers that do not rotate stay as they are.
    """

    def __init__(self, config: ModelConfig, keys: Sequence[Tensor]) -> None:
        """`keys`: the cache of each layer, [pages, 1, G, D]."""
        self._rotated = [
            (cache, (layer.rope, layer.head_dim))
            for cache, layer in zip(keys, config.layers(), strict=True)
            if layer.rope is not None
        ]
        kinds = dict.fromkeys(kind for _, kind in self._rotated)
        self._frequencies = {kind: inverse_frequencies(*kind) for kind in kinds}

    def apply(self, pages: Tensor, shift: Tensor) -> list[Tensor]:
        """Rotate the keys of pages [n] by `shift` [n] positions each.

        Returns the keys as they were, one tensor [n, 1, G, D] for each layer that rotates. If it
        fails, the keys are as they were, too.
        """
        angles = {kind: shift[:, None] * freqs for kind, freqs in self._frequencies.items()}
        turns = {kind: (angle.cos(), angle.sin()) for kind, angle in angles.items()}
        before: list[Tensor] = []
        try:
            for keys, kind in self._rotated:
                old = keys.index_select(0, pages)
                cos, sin = turns[kind]
                new = rotate(old.squeeze(1), cos, sin).unsqueeze(1)
                before.append(old)
                keys.index_copy_(0, pages, new)
        except BaseException:
            self.take_back(pages, before)
            raise
        return before

    def take_back(self, pages: Tensor, before: Sequence[Tensor]) -> None:
        """Write back the keys that `apply` returned."""
        for (keys, _), old in zip(self._rotated, before, strict=False):
            keys.index_copy_(0, pages, old)


@torch.inference_mode()
def rotation_problem(model: Model, max_seq_len: int) -> str | None:
    """The reason why `KeyRotation` would be wrong for a model; None if it is right.

    A token that sees only itself has the same hidden states at every position, so its keys at two
    positions are rotations of each other. Some tokens' keys are computed at both, in every layer,
    and compared. `max_seq_len`: number of positions.
    """
    shift = min(FARTHEST, max_seq_len - 1)
    vocab = model.config.vocab_size  # one token does not suffice: some have zeros as embeddings
    tokens = torch.arange(PROBES) * (vocab - 1) // (PROBES - 1)
    first, second = (_keys_at(model, tokens, position) for position in (0, shift))
    KeyRotation(model.config, first).apply(torch.arange(PROBES), torch.full((PROBES,), shift))
    for layer, (moved, computed) in enumerate(zip(first, second, strict=True)):
        wanted = computed.float()
        if not (moved.float() - wanted).norm() <= ROTATION_ERROR * wanted.norm():
            return f"in layer {layer} the key of a position is not that of another one, rotated"
    return None


def _keys_at(model: Model, tokens: Tensor, position: int) -> list[Tensor]:
    """The keys that each layer stores of n tokens, each of which is alone at a position, as a cache
    [n, 1, G, D]."""
    keys: list[Tensor] = []

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        q, k = (q, k) if rotation is None else rotation(q, k)
        keys.append(k.clone().unsqueeze(1))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    model.forward(tokens, torch.full_like(tokens, position), attend)
    return keys


def stopping_at(attend: Attend, check: Callable[[], None]) -> Attend:
    """The same attention with a call of `check`, which may raise, before each layer's."""

    def checked(
        layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        check()
        return attend(layer, q, k, v, rotation)

    return checked
