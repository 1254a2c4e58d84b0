"""The decoder of GPT-2: LayerNorm, learned positions, tanh-GELU MLP.

Its linear weights are stored as [in, out] and transposed when they are taken. Tensor names may have
the prefix `transformer.`. Old checkpoints also store the causal mask, which is dropped.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from infer.kernels.linear import Linear, make_linear
from infer.models.decoder import output_head
from infer.models.model import Attend
from infer.models.model_config import LayerConfig, ModelConfig
from infer.models.weights import WeightSource


class _Norm:
    """LayerNorm: [T, E] → [T, E]."""

    def __init__(self, config: ModelConfig | LayerConfig, source: WeightSource, name: str) -> None:
        self.shape, self.eps = (config.hidden_size,), config.norm_eps
        self.weight = source.keep(f"{name}.weight", self.shape)
        self.bias = source.keep(f"{name}.bias", self.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class _Layer:
    """One decoder layer: [T, E] → [T, E]."""

    def __init__(self, layer: LayerConfig, source: WeightSource, root: str) -> None:
        self.layer = layer
        prefix = f"{root}h.{layer.index}."
        hidden, inner = layer.hidden_size, layer.intermediate_size
        self.norm_1 = _Norm(layer, source, f"{prefix}ln_1")
        self.norm_2 = _Norm(layer, source, f"{prefix}ln_2")
        self.qkv = _transposed(source, f"{prefix}attn.c_attn", hidden, 3 * hidden)
        self.o = _transposed(source, f"{prefix}attn.c_proj", hidden, hidden)
        self.up = _transposed(source, f"{prefix}mlp.c_fc", hidden, inner)
        self.down = _transposed(source, f"{prefix}mlp.c_proj", inner, hidden)
        source.drop(f"{prefix}attn.bias", f"{prefix}attn.masked_bias")

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        shape = (-1, self.layer.num_heads, self.layer.head_dim)
        q, k, v = (part.reshape(shape) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        x = x + self.o(attend(self.layer.index, q, k, v, None).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2:
    """The GPT-2 decoder. See the module's docstring."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_seq_len: int) -> None:
        """The checkpoint's whole position table is kept, so `max_seq_len` has no effect."""
        self.config = config
        root = "transformer." if source.has_prefix("transformer.") else ""
        hidden = config.hidden_size
        self.embedding = source.keep_embedding(f"{root}wte.weight", (config.vocab_size, hidden))
        self.positions = source.keep(f"{root}wpe.weight", (config.max_seq_len, hidden))
        self.layers = [_Layer(layer, source, root) for layer in config.layers()]
        self.norm = _Norm(config, source, f"{root}ln_f")
        self.lm_head = output_head(config, source, self.embedding, None)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of T tokens, which may belong to any number of sequences."""
        x = self.embedding.index_select(0, tokens) + self.positions.index_select(0, positions)
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V], float32, for the hidden states [R, E] of the rows to be sampled."""
        return self.lm_head(hidden)


def _transposed(source: WeightSource, name: str, width: int, rows: int) -> Linear:
    """A linear layer from `width` to `rows` outputs, whose weight is stored as [in, out]."""
    weights = source.take_linear({f"{name}.weight": (rows, width)}, transposed=True)
    bias = source.take(f"{name}.bias", (rows,))
    return make_linear(
        weights,
        bias,
        quantization=source.quantization,
        batch_invariant=source.batch_invariant,
    )
