"""The decoder of Llama and its relatives: RMSNorm, rotary grouped-query attention, gated SiLU MLP.

The decoder is a pure function of tokens, positions and `attend`. It knows nothing of batches, the
KV cache, or prefill and decode: `attend` hides pages, sequence lengths and the device. The families
whose equations agree (Llama, Mistral, Qwen2, Qwen3) differ only in flags of `ModelConfig`. The q, k
and v projections are one matrix product, and so are gate and up. A `WeightSource` supplies the
weights and accounts for every tensor.

Shapes: T tokens of a step, E hidden size, H query heads, G key/value heads, D head size, V
vocabulary size, R rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.kernels.blocks import BlockWeight
from infer.kernels.layer_stack import Parts, attends_through, stack_layers
from infer.kernels.linear import (
    PRODUCT_ONLY,
    BlockEmbedding,
    Fusion,
    Linear,
    Norm,
    joined,
    make_linear,
    of_head,
    one_more,
)
from infer.kernels.rotary import Angles, HeadNorms, QKRotation
from infer.models.model import Attend
from infer.models.model_config import LayerConfig, ModelConfig
from infer.models.rope import RopeTables
from infer.models.weights import WeightSource


class Attention:
    """Attention block: norm, q/k/v projections, `attend`, output projection; [T, E] → [T, E].

    The norms of query and key heads and the layer's rotation are passed to `attend`, which applies
    them. `offset`: the head norms multiply by `1 + w`, in float32, as Gemma 3's do.
    """

    def __init__(
        self,
        layer: LayerConfig,
        source: WeightSource,
        prefix: str,
        norm: Norm,
        *,
        offset: bool = False,
    ) -> None:
        """`prefix`: of the layer's tensors' names; `norm`: of the input."""
        self.layer = layer
        hidden, size = layer.hidden_size, layer.head_dim
        self.q_size, kv_size = layer.num_heads * size, layer.num_kv_heads * size
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        parts = dict(zip(names, [self.q_size, kv_size, kv_size], strict=True))
        self.qkv = fused(source, hidden, parts, bias=layer.qkv_bias, fusion=Fusion(norm=norm))
        self.o = fused(source, self.q_size, {f"{prefix}o_proj": hidden}, bias=layer.o_bias)
        self.norms: HeadNorms | None = None
        if layer.qk_norm:
            q, k = (source.keep(f"{prefix}{name}_norm.weight", (size,)) for name in "qk")
            if offset:
                q, k = one_more(q), one_more(k)
            self.norms = HeadNorms(Norm(q, layer.norm_eps), Norm(k, layer.norm_eps))

    def __call__(
        self,
        x: Tensor,
        angles: Sequence[Angles | None],
        attend: Attend,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[T, E] → [T, E]. `angles`: of each layer, as `RopeTables` has them; this layer takes its
        own. `residual` [T, E] is added to the result."""
        layer = self.layer
        num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
        heads = self.qkv(x).view(-1, num_heads + 2 * num_kv_heads, layer.head_dim)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
        out = attend(layer.index, q, k, v, QKRotation.of(angles[layer.index], self.norms))
        return self.o(out.reshape(-1, self.q_size), residual)


class GatedMLP:
    """The gated MLP with its norm: down(act(gate(norm(x))) · up(norm(x))); [T, E] → [T, E].

    `gate` names the activation: "silu" or "gelu_tanh".
    """

    def __init__(
        self, layer: LayerConfig, source: WeightSource, prefix: str, norm: Norm, gate: str
    ) -> None:
        """`prefix`: of the tensors' names; `norm`: the norm of the input."""
        hidden, inner, bias = layer.hidden_size, layer.intermediate_size, layer.mlp_bias
        parts = {f"{prefix}gate_proj": inner, f"{prefix}up_proj": inner}
        fusion = Fusion(norm=norm, gate=gate)
        self.gate_up = fused(source, hidden, parts, bias=bias, fusion=fusion)
        self.down = fused(source, inner, {f"{prefix}down_proj": hidden}, bias=bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(self.gate_up(x), residual)


class DecoderLayer:
    """One decoder layer: [T, E] → [T, E]."""

    def __init__(self, layer: LayerConfig, source: WeightSource) -> None:
        prefix = f"model.layers.{layer.index}."
        shape = (layer.hidden_size,)
        before_attention, before_mlp = (
            Norm(source.keep(f"{prefix}{name}_layernorm.weight", shape), layer.norm_eps)
            for name in ("input", "post_attention")
        )
        self.attention = Attention(layer, source, f"{prefix}self_attn.", before_attention)
        self.mlp = GatedMLP(layer, source, f"{prefix}mlp.", before_mlp, "silu")

    def __call__(self, x: Tensor, angles: Sequence[Angles | None], attend: Attend) -> Tensor:
        x = self.attention(x, angles, attend, residual=x)
        return self.mlp(x, residual=x)

    def parts(self) -> Parts:
        """The linear layers and head norms from which `stack_layers` makes a `LayerStack`."""
        attention, mlp = self.attention, self.mlp
        return attention.qkv, attention.o, mlp.gate_up, mlp.down, attention.norms


class Decoder:
    """The Llama decoder. See the module's docstring."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_seq_len: int) -> None:
        """`max_seq_len`: the number of positions, which is the length of the RoPE tables."""
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = source.keep_embedding("model.embed_tokens.weight", (vocab, hidden))
        self.layers = [DecoderLayer(layer, source) for layer in config.layers()]
        self.stack = stack_layers(config, [layer.parts() for layer in self.layers])
        norm = Norm(source.keep("model.norm.weight", (hidden,)), config.norm_eps)
        self.lm_head = output_head(config, source, self.embedding, norm)
        self.rope = RopeTables(config, max_seq_len, source.device)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of T tokens, which may belong to any number of sequences."""
        x = self.embedding.index_select(0, tokens)
        angles = self.rope.at(positions)
        if self.stack is not None and attends_through(attend):
            return attend.through(self.stack, x, angles)
        for layer in self.layers:
            x = layer(x, angles, attend)
        return x

    def drop_stack(self) -> None:
        """Compute the layers one by one from now on, with every attention backend."""
        self.stack = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V], float32, for the hidden states [R, E] of the rows to be sampled."""
        return self.lm_head(hidden)


def output_head(
    config: ModelConfig,
    source: WeightSource,
    embedding: Tensor | BlockEmbedding,
    norm: Norm | None,
    name: str = "lm_head.weight",
) -> Linear:
    """The linear layer that computes logits, with the final norm in front where one is given.

    With tied embeddings its weight is `embedding` [V, E]; otherwise it is the tensor `name`.
    """
    fusion = Fusion(norm=norm, float_out=True)
    if config.tie_embeddings:
        source.drop(name)  # some checkpoints store the tied weight a second time
        if isinstance(embedding, BlockEmbedding):
            return embedding.tied_head(fusion)
        weights: Sequence[Tensor] | Sequence[BlockWeight] = [embedding]
    else:
        weights = source.take_linear({name: (config.vocab_size, config.hidden_size)})
    return make_linear(
        weights,
        fusion=fusion,
        quantization=of_head(source.quantization),
        batch_invariant=source.batch_invariant,
    )


def fused(
    source: WeightSource,
    width: int,
    parts: dict[str, int],
    *,
    bias: bool,
    fusion: Fusion = PRODUCT_ONLY,
) -> Linear:
    """One linear layer in place of several that read the same input of size `width`.

    `parts` maps each layer's name to its output size; the outputs are concatenated in that order.
    """
    shapes = {f"{name}.weight": (rows, width) for name, rows in parts.items()}
    weights = source.take_linear(shapes, gated=fusion.gate is not None)
    biases = [source.take(f"{name}.bias", (rows,)) for name, rows in parts.items() if bias]
    return make_linear(
        weights,
        joined(biases) if biases else None,
        fusion,
        quantization=source.quantization,
        batch_invariant=source.batch_invariant,
    )
