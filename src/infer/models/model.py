"""`Model`: the protocol of all architectures; `build_model` makes a model from a config.

A model is a pure function of tokens, positions and a callable that computes attention; see
`models.decoder` for an example. `build_model` imports the decoder that the registry names and
checks that every tensor of the checkpoint was used, and that its native stack is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol

from torch import Tensor

from infer.kernels.layer_stack import CallsThrough
from infer.kernels.linear.fusion import Linear
from infer.kernels.rotary import QKRotation
from infer.models.model_config import ModelConfig
from infer.models.registry import find_architecture
from infer.models.stack_check import check_stack
from infer.models.weights import WeightSource

log = logging.getLogger(__name__)

Attend = Callable[[int, Tensor, Tensor, Tensor, QKRotation | None], Tensor]
"""(layer, q [T, H, D], k [T, G, D], v [T, G, D], head norms and rotation of q and k) → [T, H, D].

The callable applies the rotation, stores k and v in the KV cache, and attends.
"""


class Model(Protocol):
    """A decoder-only transformer."""

    config: ModelConfig
    """Config from which the model was made."""
    lm_head: Linear
    """The linear layer that `logits` uses, E → V."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of the tokens [T] at the positions [T], of any sequences.

        `attend` is called once per layer. `logits` takes rows of the result.
        """

    def logits(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        """Logits [R, V], float32, for the hidden states [R, E] of the rows to be sampled.

        `memory` [≥ R, V], float32: where the result may be written, which is then valid until the
        memory is used again.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LogitsCalls:
    """The calls that compute the logits of a step, for a caller who has time before it. They read
    the tokens when they are made."""

    before: Seq[Callable[[], object]]
    """Look the tokens up. What is no `NativeCall` is torch's, which is to have one thread."""
    behind: Seq[Callable[[], object]]
    """Compute the layers and the output head."""
    logits: Tensor
    """Where they are written, [R, V] float32."""


class CalledModel(Model, Protocol):
    """A model whose decoding the kernels may compute alone."""

    def calls(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: CallsThrough,
        memory: Tensor | None,
    ) -> LogitsCalls | None:
        """The calls in place of `forward` and `logits`, with the same bits, for steps in which each
        token's row is sampled; None where more than kernels is needed. `memory`: see `logits`."""


def build_model(config: ModelConfig, source: WeightSource, max_seq_len: int) -> Model:
    """A model of the config's shape with the source's weights.

    `LoadError` if a tensor is missing, unexpected or of the wrong shape. That is found on the meta
    device first where the source can announce shapes, before any memory is allocated.
    """
    decoder = resolve_name(find_architecture(config.architecture).decoder)
    if config.rope.long_divisors and not source.rehearses:
        longer = max_seq_len > config.rope.original_max_position
        log.info(
            "%s: RoPE has its factors for contexts %s %s tokens, in all sequences",
            *(config.architecture, "beyond" if longer else "of up to"),
            config.rope.original_max_position,
        )
    config = config.for_context(max_seq_len)
    if rehearsal := source.rehearsal():
        decoder(config, rehearsal, 1)
        rehearsal.finish()
    model: Model = decoder(config, source, max_seq_len)
    source.finish()
    check_stack(model, max_seq_len)
    return model
