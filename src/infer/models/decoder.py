"""The decoder of all families whose layers are what `LayerForm` can say: Llama and its relatives.

The decoder is a pure function of tokens, positions and `attend`. It knows nothing of batches, the
KV cache, or prefill and decode: `attend` hides pages, sequence lengths and the device. The families
differ in the data of `ModelConfig`: where norms are and which, what is multiplied, what the MLP
computes, and where tensors are in a checkpoint (`models.arrangement`). The q, k and v projections
are one matrix product, and so are gate and up. A `WeightSource` supplies the weights and accounts
for every tensor. `LayerStack` computes the layers of Llama's form in one call.

Shapes: T tokens of a step, E hidden size, H query heads, G key/value heads, D head size, V
vocabulary size, R rows that are sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.layer_stack import Parts, attends_through, stack_layers
from infer.kernels.linear import (
    PRODUCT_ONLY,
    BlockEmbedding,
    Fusion,
    LayerNorm,
    Linear,
    Norm,
    joined,
    make_linear,
    of_head,
    one_more,
)
from infer.kernels.rotary import Angles, HeadNorms, QKRotation
from infer.models.arrangement import arrange
from infer.models.layer_forms import LayerForm, NormForm
from infer.models.model import Attend
from infer.models.model_config import LayerConfig, ModelConfig
from infer.models.rope import RopeTables
from infer.models.weights import HeldWeights, WeightSource

AnyNorm = Norm | LayerNorm
"""A norm of either form."""
GATES = ("silu", "gelu_tanh")
"""Activations of a gate that linear layers compute together with their product."""


def make_norm(form: NormForm, source: WeightSource, name: str, size: int, eps: float) -> AnyNorm:
    """The norm with the tensors `name`.weight and `name`.bias, over the last `size` numbers."""
    weight = None
    if form.one_more:
        weight = one_more(source.take(f"{name}.weight", (size,)))
    elif form.weight:
        weight = source.keep(f"{name}.weight", (size,))
    bias = source.keep(f"{name}.bias", (size,)) if form.bias else None
    if form.centred:
        return LayerNorm(size, eps, weight, bias)
    assert weight is not None
    return Norm(weight, eps)


class _Normed:
    """A norm before a linear layer: part of the layer where that can compute it."""

    def __init__(self, norm: AnyNorm | None) -> None:
        self.fused = norm if isinstance(norm, Norm) else None
        self._apart = norm if isinstance(norm, LayerNorm) else None

    def __call__(self, x: Tensor) -> Tensor:
        """What the linear layer is given for x [T, E]."""
        return x if self._apart is None else self._apart(x)


class Attention:
    """Attention block: norm, q/k/v projections, `attend`, output projection; [T, E] → [T, E].

    The norms of query and key heads and the layer's rotation are passed to `attend`, which applies
    them, as far as it can; the others are applied here.
    """

    def __init__(
        self, layer: LayerConfig, source: WeightSource, prefix: str, norm: AnyNorm | None
    ) -> None:
        """`prefix`: of the layer's tensors' names; `norm`: of the input."""
        self.layer = layer
        self.norm = _Normed(norm)
        hidden, size = layer.hidden_size, layer.head_dim
        self.q_size, kv_size = layer.num_heads * size, layer.num_kv_heads * size
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        parts = dict(zip(names, [self.q_size, kv_size, kv_size], strict=True))
        fusion = Fusion(norm=self.norm.fused)
        self.qkv = fused(source, hidden, parts, bias=layer.qkv_bias, fusion=fusion)
        self.o = fused(source, self.q_size, {f"{prefix}o_proj": hidden}, bias=layer.o_bias)
        self.norms: HeadNorms | None = None
        """Norms that `attend` applies."""
        self.factor: Tensor | None = None
        """Factor of rotated queries, [D]."""
        self.own_norms: tuple[AnyNorm, ...] = ()
        """Norms of queries and of keys that are applied here."""
        if layer.qk_norm:
            self._add_norms(source, prefix)

    def _add_norms(self, source: WeightSource, prefix: str) -> None:
        layer, eps = self.layer, self.layer.norm_eps
        size, form = layer.head_dim, layer.form
        q_name, k_name = (f"{prefix}{name}_norm.weight" for name in "qk")
        if form.qk_norm in ("width", "each head"):
            self.own_norms = tuple(
                Norm(source.keep(name, (n * size,)), eps)
                if form.qk_norm == "width"
                else LayerNorm(size, eps, source.keep(name, (n * size,)).view(n, size))
                for name, n in ((q_name, layer.num_heads), (k_name, layer.num_kv_heads))
            )
        else:
            q, k = (source.keep(name, (size,)) for name in (q_name, k_name))
            if form.norm.one_more:
                q, k = one_more(q), one_more(k)
            if form.qk_norm == "rotated":
                # Rotation keeps the mean of squares, so the norms' weights alone come after it.
                # Both are the query's here, so that stored keys are only rotated.
                self.factor = q.to(torch.float32, copy=True).mul_(k)  # in place: see `one_more`
                q = k = torch.ones(size, dtype=q.dtype, device=q.device)
            self.norms = HeadNorms(Norm(q, eps), Norm(k, eps))

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
        heads = self.qkv(self.norm(x)).view(-1, num_heads + 2 * num_kv_heads, layer.head_dim)
        if (clip := layer.form.qkv_clip) is not None:
            heads = heads.clamp(-clip, clip)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
        if self.own_norms:
            q, k = map(self._normed, self.own_norms, (q, k))
        turn = QKRotation.of(angles[layer.index], self.norms, self.factor)
        out = attend(layer.index, q, k, v, turn)
        return self.o(out.reshape(-1, self.q_size), residual)

    @staticmethod
    def _normed(norm: AnyNorm, heads: Tensor) -> Tensor:
        """Heads [T, n, D], each normalised, or all together if the norm is that wide."""
        return norm(heads.flatten(1)).view(heads.shape) if isinstance(norm, Norm) else norm(heads)


class MLP:
    """The MLP with its norm: down(act(gate(x)) · up(x)), or down(act(up(x))); [T, E] → [T, E]."""

    def __init__(
        self, layer: LayerConfig, source: WeightSource, prefix: str, norm: AnyNorm | None
    ) -> None:
        """`prefix`: of the tensors' names; `norm`: the norm of the input."""
        form, hidden, inner = layer.form, layer.hidden_size, layer.intermediate_size
        self.norm = _Normed(norm)
        parts = dict.fromkeys(
            [f"{prefix}{name}_proj" for name in (("gate", "up") if form.gated else ("up",))], inner
        )
        gate = form.activation if form.gated and form.activation in GATES else None
        fusion = Fusion(norm=self.norm.fused, gate=gate)
        self.inner = fused(source, hidden, parts, bias=layer.mlp_bias, fusion=fusion)
        self.down = fused(source, inner, {f"{prefix}down_proj": hidden}, bias=layer.mlp_bias)
        self._act = None if gate else _activation(form.activation, source, prefix)
        self._gated = form.gated

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.inner(self.norm(x))
        if self._act is not None and self._gated:
            gate, up = y.chunk(2, dim=-1)
            y = self._act(gate) * up
        elif self._act is not None:
            y = self._act(y)
        return self.down(y, residual)


def _activation(name: str, source: WeightSource, prefix: str) -> Callable[[Tensor], Tensor]:
    if name == "xielu":
        return _XIELU(*(source.keep(f"{prefix}{each}.", (1,)) for each in ("alpha_p", "alpha_n")))
    return {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu": F.gelu,
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
    }[name]


class _XIELU:
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010), with β of 0.5."""

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor) -> None:
        """The learned numbers, [1] each."""
        self._positive, self._negative = alpha_p, alpha_n

    def __call__(self, x: Tensor) -> Tensor:
        positive, negative = F.softplus(self._positive), 0.5 + F.softplus(self._negative)
        below = (torch.expm1(x.clamp_max(-1e-6)) - x) * negative + 0.5 * x
        return torch.where(x > 0, positive * x * x + 0.5 * x, below)


class DecoderLayer:
    """One decoder layer: [T, E] → [T, E]."""

    def __init__(self, layer: LayerConfig, source: WeightSource) -> None:
        self.layer, form = layer, layer.form
        prefix = f"layers.{layer.index}."

        def norm(name: str, *, there: bool) -> AnyNorm | None:
            if not there:
                return None
            size, eps = layer.hidden_size, layer.norm_eps
            return make_norm(form.norm, source, f"{prefix}{name}_norm", size, eps)

        before_attention = norm("attention_in", there=form.pre_norms)
        before_mlp = norm("mlp_in", there=form.pre_norms and not form.one_norm)
        self.after_attention = norm("attention_out", there=form.post_norms)
        self.after_mlp = norm("mlp_out", there=form.post_norms)
        self.attention = Attention(layer, source, prefix, before_attention)
        self.mlp = MLP(layer, source, prefix, before_attention if form.one_norm else before_mlp)

    def __call__(self, x: Tensor, angles: Sequence[Angles | None], attend: Attend) -> Tensor:
        def attention(x: Tensor, residual: Tensor | None = None) -> Tensor:
            return self.attention(x, angles, attend, residual)

        between = self._added(x, x, attention, self.after_attention)
        into_mlp = x if self.layer.form.parallel else between
        return self._added(between, into_mlp, self.mlp, self.after_mlp)

    def _added(
        self, x: Tensor, into: Tensor, block: Callable[..., Tensor], norm: AnyNorm | None
    ) -> Tensor:
        """x and what the block makes of `into`."""
        form = self.layer.form
        if norm is not None and form.residual_scale == 1.0:
            return norm(block(into), residual=x)
        if norm is None and form.residual_scale == 1.0 and not form.norm.centred:
            return block(into, residual=x)
        y = block(into)
        y = y if norm is None else norm(y)
        return x + (y if form.residual_scale == 1.0 else form.residual_scale * y)

    def parts(self) -> Parts | None:
        """The linear layers and head norms from which `stack_layers` makes a `LayerStack`.

        None: the layer computes something beside them. Such a form must be named here."""
        form = self.layer.form
        usual = dataclasses.replace(form, norm=NormForm(), activation="silu") == LayerForm()
        if not usual or form.norm.centred or form.activation not in GATES:
            return None
        attention, mlp = self.attention, self.mlp
        return attention.qkv, attention.o, mlp.inner, mlp.down, attention.norms


class Decoder:
    """The decoder. See the module's docstring."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_seq_len: int) -> None:
        """`max_seq_len`: the number of positions, which is the length of the RoPE tables."""
        self.config = config
        arrange(source, config)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = source.keep_embedding("embed_tokens.weight", (vocab, hidden))
        scale = config.embedding_scale
        if config.rounds_embedding_scale:
            scale = torch.tensor(scale).to(self.embedding.dtype).item()
        self.scale = scale
        self.positions: Tensor | None = None
        if (offset := config.positions_offset) is not None:
            shape = (config.max_seq_len + offset, hidden)
            self.positions = source.keep("embed_positions.weight", shape)[offset:]
        self.layers = [DecoderLayer(layer, source) for layer in config.layers()]
        self.norm = _Normed(make_norm(config.form.norm, source, "norm", hidden, config.norm_eps))
        self.lm_head = output_head(config, source, self.embedding, self.norm.fused)
        self.rope = RopeTables(config, max_seq_len, source.device)
        parts = [layer.parts() for layer in self.layers]
        self.stack = None if self.rope.queries_grow else stack_layers(config, parts)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of T tokens, which may belong to any number of sequences."""
        x = self.embedding.index_select(0, tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.positions is not None:
            x = x + self.positions.index_select(0, positions)
        angles = self.rope.at(positions)
        if self.stack is not None and attends_through(attend):
            return attend.through(self.stack, x, angles)
        if (factors := self.rope.query_factors(positions)) is not None:
            attend = _growing(attend, factors)
        for layer in self.layers:
            x = layer(x, angles, attend)
        return self.norm(x)

    def drop_stack(self) -> None:
        """Compute the layers one by one from now on, with every attention backend."""
        self.stack = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V], float32, for the hidden states [R, E] of the rows to be sampled."""
        logits = self.lm_head(hidden)
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _growing(attend: Attend, factors: Tensor) -> Attend:
    """The same attention of queries that are multiplied by `factors` [T, 1, 1]."""

    def attend_growing(
        layer: int, q: Tensor, k: Tensor, v: Tensor, turn: QKRotation | None
    ) -> Tensor:
        return attend(layer, (q * factors).to(q.dtype), k, v, turn)

    return attend_growing


def output_head(
    config: ModelConfig,
    source: WeightSource,
    embedding: Tensor | BlockEmbedding,
    norm: Norm | None,
) -> Linear:
    """The linear layer that computes logits, with the final norm in front where one is given.

    With tied embeddings its weight is `embedding` [V, E].
    """
    fusion = Fusion(norm=norm, float_out=True)
    bias = source.take("lm_head.bias", (config.vocab_size,)) if config.head_bias else None
    if config.tie_embeddings:
        if isinstance(embedding, BlockEmbedding) and bias is None:
            return embedding.tied_head(fusion)
        assert isinstance(embedding, Tensor), "no family has a tied head with a bias"
        weights: Sequence[Tensor] | HeldWeights = [embedding]
    else:
        weights = source.take_linear({"lm_head.weight": (config.vocab_size, config.hidden_size)})
    return make_linear(
        weights,
        bias,
        fusion,
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
