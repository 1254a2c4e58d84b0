"""Checking when a model is loaded that its `LayerStack` computes what its own loop computes.

A stack is a second implementation of a decoder's loop. A layer that does something which its parts
do not show (another rotation, a scale, a second residual) would be right in the loop and wrong in
the stack. So both compute a few tokens, with the same attention, and every query, key, value and
result must have the same bits. The check takes about as long as generating two tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.layer_stack import LayerStack
from infer.kernels.rotary import Angles, QKRotation
from infer.models.model_config import ModelConfig

log = logging.getLogger(__name__)


class _Recorder:
    """Causal attention among the tokens of one call, which keeps what it was given."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.seen: list[Tensor] = []

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None
    ) -> Tensor:
        if rotation is not None:
            q, k = rotation(q, k)
        self.seen += [part.clone() for part in (q, k, v)]
        scale = self._config.layer(layer).attention_scale
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1).contiguous()


class _StackRecorder(_Recorder):
    """The same attention for a stack, whose products are computed one by one."""

    def through(
        self,
        stack: LayerStack,
        x: Tensor,
        angles: Sequence[Angles | None],
        growth: Tensor | None = None,
    ) -> Tensor:
        return stack.one_by_one(self, x, angles, growth)


@torch.inference_mode()
def stack_agrees(model: Any, max_seq_len: int) -> bool:
    """Whether a decoder's forward pass has the same bits with its stack and without.

    `model`: a decoder that passes its `stack` to an attention backend which can take it.
    `max_seq_len`: number of positions for which it was made.
    """
    last = max_seq_len - 1
    positions = torch.tensor(sorted({0, min(1, last), last // 2, last}))
    tokens = torch.arange(len(positions)) % model.config.vocab_size
    ways = []
    for recorder in (_Recorder(model.config), _StackRecorder(model.config)):
        hidden = model.forward(tokens, positions, recorder)
        ways.append([*recorder.seen, hidden])
    ours, theirs = ways
    return len(ours) == len(theirs) and all(map(_have_same_bits, ours, theirs))


def _have_same_bits(first: Tensor, other: Tensor) -> bool:
    if (first.dtype, first.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (first, other)))


def check_stack(model: Any, max_seq_len: int) -> None:
    """Take away a decoder's stack, with a warning, if it does not agree with the decoder's loop."""
    if getattr(model, "stack", None) is None or stack_agrees(model, max_seq_len):
        return
    model.drop_stack()
    log.warning(
        "%s: the native stack of layers computes something else than the model's own layers, so"
        " the layers are computed one by one, which is slower",
        model.config.architecture,
    )
