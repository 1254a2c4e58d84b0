"""`CellAttention`: the engine's attention backends over cells, and rotation of stored keys.

It chooses the backend for each part of a batch. Where attention's own windows are right, one
backend computes all layers, so that a stack of layers is still one call. Otherwise the layers of
each window have a backend of their own, without a window, whose tables hold exactly what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from infer.attention.layout import AttentionBackend
from infer.cells.visibility import PartLayout
from infer.kernels.rotary import QKRotation, rotate
from infer.models.model import Attend
from infer.models.model_config import ModelConfig
from infer.models.rope import inverse_frequencies

MakeBackend = Callable[[Sequence[int | None]], AttentionBackend]
"""Makes a backend over the context's storage from the window of each layer."""


class CellAttention:
    """See the module's docstring."""

    def __init__(self, config: ModelConfig, make: MakeBackend) -> None:
        """`make`: makes backends over one storage."""
        layers = range(config.num_layers)
        self._window_of = [config.window(layer) for layer in layers]
        self.windows = sorted({window for window in self._window_of if window is not None})
        """Distinct windows of the layers, in positions."""
        self._backend = make(self._window_of)
        self._exact = {window: make([None] * len(layers)) for window in self.windows}

    def plan(self, part: PartLayout) -> Attend:
        """Prepare for a part of a batch; returns the callable that the model attends with."""
        self._backend.plan(part.layout)
        if not part.by_window:
            return self._backend
        for window, layout in part.by_window.items():
            self._exact[window].plan(layout)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, turn: QKRotation | None = None
        ) -> Tensor:
            window = self._window_of[layer]
            backend = self._backend if window is None else self._exact[window]
            return backend(layer, q, k, v, turn)

        return attend


class KeyRotation:
    """Rotates keys in a storage from their old positions to new ones."""

    def __init__(self, config: ModelConfig, keys: Sequence[Tensor]) -> None:
        """`keys`: the cache of each layer, [pages, 1, G, D]."""
        self._keys = keys
        rope, size = config.rope, config.head_dim
        self._frequencies = inverse_frequencies(rope, size)
        self._local = inverse_frequencies(config.local_rope or rope, size)
        self._is_local = [config.window(layer) is not None for layer in range(len(keys))]

    def apply(self, pages: Tensor, shift: Tensor) -> list[Tensor]:
        """Rotate the keys of pages [n] by `shift` [n] positions each.

        Returns the keys as they were, one tensor [n, 1, G, D] for each layer. If it fails, the keys
        are as they were, too.
        """
        angles = [shift[:, None] * freqs for freqs in (self._frequencies, self._local)]
        turns = [(angle.cos(), angle.sin()) for angle in angles]
        before: list[Tensor] = []
        try:
            for keys, is_local in zip(self._keys, self._is_local, strict=True):
                old = keys.index_select(0, pages)
                cos, sin = turns[is_local]
                new = rotate(old.squeeze(1), cos, sin).unsqueeze(1)
                before.append(old)
                keys.index_copy_(0, pages, new)
        except BaseException:
            self.take_back(pages, before)
            raise
        return before

    def take_back(self, pages: Tensor, before: Sequence[Tensor]) -> None:
        """Write back the keys that `apply` returned."""
        for keys, old in zip(self._keys, before, strict=False):
            keys.index_copy_(0, pages, old)


def stopping_at(attend: Attend, check: Callable[[], None]) -> Attend:
    """The same attention with a call of `check`, which may raise, before each layer's."""

    def checked(
        layer: int, q: Tensor, k: Tensor, v: Tensor, turn: QKRotation | None = None
    ) -> Tensor:
        check()
        return attend(layer, q, k, v, turn)

    return checked
