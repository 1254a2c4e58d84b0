"""`Model`: what the runner needs of any architecture; `build_model` makes one from a config.

A model is a pure function of tokens, positions and a callable that attends; see the Llama decoder
for the manner. `build_model` imports the decoder that the registry names and checks that every
tensor of the checkpoint was used.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Protocol

from torch import Tensor

from infer.kernels.linear import Linear
from infer.kernels.rotary import QKRotation
from infer.models.model_config import ModelConfig
from infer.models.registry import find_architecture
from infer.models.weights import WeightSource

Attend = Callable[[int, Tensor, Tensor, Tensor, QKRotation | None], Tensor]
"""(layer, q [T, H, D], k [T, G, D], v [T, G, D], what q and k still need) → [T, H, D]"""


class Model(Protocol):
    """A decoder-only transformer."""

    config: ModelConfig
    lm_head: Linear
    """in `logits`"""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """T tokens [T] at positions [T] of any sequences → [T, E], from which `logits` goes on."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V], float32, for the rows [R, E] that will be sampled."""


def build_model(config: ModelConfig, source: WeightSource, max_seq_len: int) -> Model:
    """A model of that shape with the source's weights; `LoadError` if the two do not fit."""
    decoder = resolve_name(find_architecture(config.architecture).decoder)
    if rehearsal := source.rehearsal():
        decoder(config, rehearsal, 1)
        rehearsal.finish()
    model: Model = decoder(config, source, max_seq_len)
    source.finish()
    return model
