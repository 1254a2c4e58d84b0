"""The decoder of Llama and its relatives: RMSNorm, rotary grouped-query attention, gated SiLU MLP.

A pure function of tokens, positions and `attend`. It knows no batch, no cache and no phase:
`attend` is the only door to paging, raggedness and device. Families whose equations agree (Llama,
Mistral, Qwen2, Qwen3) differ in flags of `ModelConfig` only. q/k/v and gate/up are one product
each. Built from a `WeightSource`, which accounts for every tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.linear import Linear, make_linear
from infer.models.config import ModelConfig
from infer.models.model import Attend
from infer.models.rope import RopeTable, rotate
from infer.models.weights import WeightSource


class Attention:
    """Projections, head norms and rotation around `attend`: [T, E] → [T, E].

    Gemma 3 shares it; its norms are `1 + w`, which the weights it hands over already are.
    """

    def __init__(self, index: int, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        self.index = index
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        self.q_size, kv_size = config.num_heads * size, config.num_kv_heads * size
        self.sizes = [self.q_size, kv_size, kv_size]
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        parts = dict(zip(names, self.sizes, strict=True))
        self.qkv = fused(source, hidden, parts, bias=config.qkv_bias)
        self.o = fused(source, self.q_size, {f"{prefix}o_proj": hidden}, bias=config.o_bias)
        self.head_norms: tuple[Tensor, Tensor] | None = None
        if config.qk_norm:
            q, k = (source.keep(f"{prefix}{name}_norm.weight", (size,)) for name in "qk")
            self.head_norms = (q, k)

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, E] → [T, E]."""
        config, size = self.config, self.config.head_dim
        q, k, v = torch.split(self.qkv(h), self.sizes, dim=-1)
        q = q.reshape(-1, config.num_heads, size)
        k = k.reshape(-1, config.num_kv_heads, size)
        if self.head_norms is not None:
            q = self.norm(q, self.head_norms[0])
            k = self.norm(k, self.head_norms[1])
        v = v.reshape(-1, config.num_kv_heads, size)
        out = attend(self.index, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o(out.reshape(-1, self.q_size))

    def norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of each head [T, heads, D]."""
        return F.rms_norm(heads, (self.config.head_dim,), weight, self.config.norm_eps)


class _Layer:
    """One decoder layer: [T, E] → [T, E]."""

    def __init__(self, index: int, config: ModelConfig, source: WeightSource) -> None:
        self.config = config
        prefix = f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = source.keep(f"{prefix}input_layernorm.weight", (hidden,))
        self.mlp_norm = source.keep(f"{prefix}post_attention_layernorm.weight", (hidden,))
        self.attention = Attention(index, config, source, f"{prefix}self_attn.")
        mlp, bias = f"{prefix}mlp.", config.mlp_bias
        gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        self.gate_up = fused(source, hidden, gate_up, bias=bias)
        self.down = fused(source, inner, {f"{mlp}down_proj": hidden}, bias=bias)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        shape, eps = (self.config.hidden_size,), self.config.norm_eps
        x = x + self.attention(F.rms_norm(x, shape, self.input_norm, eps), cos, sin, attend)
        gate, up = self.gate_up(F.rms_norm(x, shape, self.mlp_norm, eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder:
    """See the module's docstring."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_seq_len: int) -> None:
        """`max_seq_len`: positions that will be used; the RoPE table is that long."""
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = source.keep("model.embed_tokens.weight", (vocab, hidden))
        self.layers = [_Layer(i, config, source) for i in range(config.num_layers)]
        self.norm = source.keep("model.norm.weight", (hidden,))
        self.lm_head = output_head(config, source, self.embedding)
        self.rope = RopeTable(config.rope, config.head_dim, max_seq_len, source.device)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of T tokens of any number of sequences, in any mixture."""
        x = self.embedding.index_select(0, tokens)
        cos, sin = self.rope.at(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return F.rms_norm(x, (self.config.hidden_size,), self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] in float32 of the rows [R, E] that will be sampled."""
        return self.lm_head(hidden).float()


def output_head(
    config: ModelConfig, source: WeightSource, embedding: Tensor, name: str = "lm_head.weight"
) -> Linear:
    """The layer that makes logits: the embedding where they are tied, else its own tensor."""
    if config.tie_embeddings:
        source.drop(name)  # some writers store the tied copy too
        return make_linear(embedding)
    return make_linear(source.take(name, (config.vocab_size, config.hidden_size)))


def fused(source: WeightSource, width: int, parts: dict[str, int], *, bias: bool) -> Linear:
    """One product for several layers that read the same input: {name: rows of its output}."""
    weights = [source.take(f"{name}.weight", (rows, width)) for name, rows in parts.items()]
    biases = [source.take(f"{name}.bias", (rows,)) for name, rows in parts.items() if bias]
    return make_linear(weights, torch.cat(biases) if biases else None)


def build(config: ModelConfig, source: WeightSource, max_seq_len: int) -> Decoder:
    """What `models.model.build_model` calls."""
    return Decoder(config, source, max_seq_len)
