"""The decoder of all families whose layers are what `LayerForm` can say: Llama and others"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.layer_stack import CallsThrough, LayerParts, attends_through, stack_layers
from infer.kernels.linear.choose import add_one, joined, make_linear
from infer.kernels.linear.fusion import PRODUCT_ONLY, Fusion, LayerNorm, Linear, Norm
from infer.kernels.linear.native_linear import NativeLinear, PackedEmbedding
from infer.kernels.native import lm_head_quantization
from infer.kernels.rotary import Angles, HeadNorms, QKRotation
from infer.kernels.rows import BETA, Activation, RowNorm
from infer.models.arrangement import arrange
from infer.models.layer_forms import GATES, NormForm
from infer.models.model import Attend, LogitsCalls
from infer.models.model_config import LayerConfig, ModelConfig
from infer.models.rope import RopeTables
from infer.models.weights import HeldWeights, WeightSource

AnyNorm = Norm | LayerNorm
"""A norm of either form."""


def make_norm(form: NormForm, source: WeightSource, name: str, size: int, eps: float) -> AnyNorm:
    """The norm with the tensors `name`.weight and `name`.bias, over the last `size` numbers."""
    weight = None
    if form.add_one:
        weight = add_one(source.take(f"{name}.weight", (size,)))
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
        self.apart = RowNorm(norm if isinstance(norm, LayerNorm) else None)
        """The norm if it is not part of the linear layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """What the linear layer is given for x [T, E]."""
        return x if self.apart.norm is None else self.apart(x)


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
        self.sinks: Tensor | None = None
        """Attention sinks, [H]."""
        if layer.form.sinks:
            sinks = source.keep(f"{prefix}sinks.", (layer.num_heads,))
            self.sinks = sinks.to(torch.float32, copy=True)  # as in `add_one`, in C++
        self.own_norms: tuple[RowNorm | LayerNorm, ...] = ()
        """Norms of queries and of keys that are applied here."""
        if layer.qk_norm:
            self._add_norms(source, prefix)

    def _add_norms(self, source: WeightSource, prefix: str) -> None:
        layer, eps = self.layer, self.layer.norm_eps
        size, form = layer.head_dim, layer.form
        q_name, k_name = (f"{prefix}{name}_norm.weight" for name in "qk")
        if form.qk_norm in ("width", "each head"):
            self.own_norms = tuple(
                RowNorm(Norm(source.keep(name, (n * size,)), eps))
                if form.qk_norm == "width"
                else LayerNorm(size, eps, source.keep(name, (n * size,)).view(n, size))
                for name, n in ((q_name, layer.num_heads), (k_name, layer.num_kv_heads))
            )
        else:
            q, k = (source.keep(name, (size,)) for name in (q_name, k_name))
            if form.norm.add_one:
                q, k = add_one(q), add_one(k)
            if form.qk_norm == "rotated":
                # Rotation keeps the mean of squares, so the norms' weights alone come after it.
                # Both are the query's here, so that stored keys are only rotated.
                self.factor = q.to(torch.float32, copy=True).mul_(k)  # in place: see `add_one`
                q = k = torch.ones(size, dtype=q.dtype, device=q.device)
            self.norms = HeadNorms(Norm(q, eps), Norm(k, eps))

    def __call__(
        self,
        x: Tensor,
        angles: Sequence[Angles | None],
        attend: Attend,
        residual: Tensor | None = None,
        growth: Tensor | None = None,
    ) -> Tensor:
        """[T, E] → [T, E]. `angles`: of each layer, as `RopeTables` has them; this layer takes its
        own. `residual` [T, E] is added to the result. `growth`: factors of rotated queries, [T]."""
        layer = self.layer
        num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
        heads = self.qkv(self.norm(x)).view(-1, num_heads + 2 * num_kv_heads, layer.head_dim)
        if (clip := layer.form.qkv_clip) is not None:
            heads = heads.clamp(-clip, clip)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
        if self.own_norms:
            q, k = map(self._normed, self.own_norms, (q, k))
        tables = angles[layer.index]
        rotation = QKRotation.of(tables, self.norms, self.factor, growth, self.sinks)
        out = attend(layer.index, q, k, v, rotation)
        return self.o(out.reshape(-1, self.q_size), residual)

    @staticmethod
    def _normed(norm: RowNorm | LayerNorm, heads: Tensor) -> Tensor:
        """Heads [T, n, D], each normalised, or all together if the norm is that wide."""
        if isinstance(norm, LayerNorm):
            return norm(heads)
        return norm(heads.flatten(1)).view(heads.shape)


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
        self.act = None if gate else _activation(form.activation, source, prefix)
        """The activation if it is not part of the first product."""
        self.gated = form.gated
        """Whether there is a gate."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.inner(self.norm(x))
        if self.act is not None and self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = self.act(gate) * up
        elif self.act is not None:
            y = self.act(y)
        return self.down(y, residual)


def _activation(name: str, source: WeightSource, prefix: str) -> Activation:
    if name != "xielu":
        return Activation(name)
    positive, negative = (
        source.keep(f"{prefix}{parameter}.", (1,)) for parameter in ("alpha_p", "alpha_n")
    )
    if positive.is_meta:
        return Activation(name)
    return Activation(
        name, F.softplus(positive.float()).item(), BETA + F.softplus(negative.float()).item()
    )


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
        self.after_attention = RowNorm(norm("attention_out", there=form.post_norms))
        self.after_mlp = RowNorm(norm("mlp_out", there=form.post_norms))
        self.attention = Attention(layer, source, prefix, before_attention)
        self.mlp = MLP(layer, source, prefix, before_attention if form.one_norm else before_mlp)

    def __call__(
        self,
        x: Tensor,
        angles: Sequence[Angles | None],
        attend: Attend,
        growth: Tensor | None = None,
    ) -> Tensor:
        def attention(x: Tensor, residual: Tensor | None = None) -> Tensor:
            return self.attention(x, angles, attend, residual, growth)

        between = self._added(x, x, attention, self.after_attention)
        into_mlp = x if self.layer.form.parallel else between
        return self._added(between, into_mlp, self.mlp, self.after_mlp)

    def _added(
        self, x: Tensor, into: Tensor, block: Callable[..., Tensor], norm: RowNorm
    ) -> Tensor:
        """x and what the block makes of `into`."""
        scale = self.layer.form.residual_scale
        if norm.norm is None and scale == 1.0:
            return block(into, residual=x)
        return norm(block(into), x, scale)

    def parts(self) -> LayerParts | None:
        """What `stack_layers` makes a `LayerStack` of.

        None: the layer computes something that parts do not say. Such a form must be named here."""
        form, attention, mlp = self.layer.form, self.attention, self.mlp
        if form.sinks or (form.qk_norm == "each head" and attention.own_norms):
            return None
        if mlp.act is not None and mlp.gated:
            return None
        no_norm = RowNorm(None)
        queries, keys = attention.own_norms or (no_norm, no_norm)
        assert isinstance(queries, RowNorm)
        assert isinstance(keys, RowNorm)
        return LayerParts(
            qkv=attention.qkv,
            o=attention.o,
            inner=mlp.inner,
            down=mlp.down,
            norms=attention.norms,
            factor=attention.factor,
            before_attention=attention.norm.apart,
            before_mlp=no_norm if form.one_norm else mlp.norm.apart,
            after_attention=self.after_attention,
            after_mlp=self.after_mlp,
            all_heads=(queries, keys),
            is_parallel=form.parallel,
            activation=mlp.act,
            residual_scale=form.residual_scale,
            clip=form.qkv_clip,
        )


class Decoder:
    """The decoder.

    The decoder is a pure function of tokens, positions and `attend`. It knows nothing of batches,
    the KV cache, or prefill and decode: `attend` hides pages, sequence lengths and the device. The
    families differ in the data of `ModelConfig`: where norms are and which, what is multiplied,
    what the MLP computes, and where tensors are in a checkpoint (`models.arrangement`). The q, k
    and v projections are one matrix product, and so are gate and up. A `WeightSource` supplies the
    weights and accounts for every tensor. `LayerStack` computes the layers of Llama's form in one
    call.

    Shapes: T tokens of a step, E hidden size, H query heads, G key/value heads, D head size, V
    vocabulary size, R rows that are sampled.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, max_seq_len: int) -> None:
        """`max_seq_len`: the number of positions, which is the length of the RoPE tables."""
        self.config = config
        arrange(source, config)
        vocab, hidden = config.vocab_size, config.hidden_size
        is_head = config.tie_embeddings and not config.head_bias
        self.embedding = source.keep_embedding(
            "embed_tokens.weight", (vocab, hidden), is_head=is_head
        )
        scale = config.embedding_scale
        if config.rounds_embedding_scale:
            scale = torch.tensor(scale).to(self.embedding.dtype).item()
        self.scale = scale
        self.positions: Tensor | None = None
        if (offset := config.positions_offset) is not None:
            shape = (config.max_seq_len + offset, hidden)
            self.positions = source.keep("embed_positions.weight", shape)[offset:]
        self.embedding_norm: RowNorm | None = None
        if config.embedding_norm:
            norm = make_norm(config.form.norm, source, "embed_norm", hidden, config.norm_eps)
            self.embedding_norm = RowNorm(norm)
        self.layers = [DecoderLayer(layer, source) for layer in config.layers()]
        self.norm = _Normed(make_norm(config.form.norm, source, "norm", hidden, config.norm_eps))
        self.lm_head = output_head(config, source, self.embedding, self.norm.fused)
        self.rope = RopeTables(config, max_seq_len, source.device)
        parts = [layer.parts() for layer in self.layers]
        self.stack = stack_layers(config, parts)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of T tokens, which may belong to any number of sequences."""
        x = self.embedding.index_select(0, tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.positions is not None:
            x = x + self.positions.index_select(0, positions)
        angles, growth = self.rope.at(positions), self.rope.query_factors(positions)
        if self.stack is not None and attends_through(attend):
            return self.norm(attend.through(self.stack, x, angles, growth))
        for layer in self.layers:
            x = layer(x, angles, attend, growth)
        return self.norm(x)

    def calls(
        self, tokens: Tensor, positions: Tensor, attend: CallsThrough, memory: Tensor | None
    ) -> LogitsCalls | None:
        """See `CalledModel`."""
        head, embedding, stack = self.lm_head, self.embedding, self.stack
        if stack is None or not isinstance(head, NativeLinear) or self._needs_torch():
            return None
        x = torch.empty((len(tokens), self.config.hidden_size), dtype=embedding.dtype)
        before: list[Callable[[], object]] = []
        if isinstance(embedding, PackedEmbedding):
            before.append(embedding.call(x, tokens))
        else:
            before.append(partial(torch.index_select, embedding, 0, tokens, out=x))
        if self.scale != 1.0:
            before.append(partial(x.mul_, self.scale))
        y = torch.empty_like(x)
        angles, growth = self.rope.at(positions), self.rope.query_factors(positions)
        layers = attend.through_call(y, stack, x, angles, growth)
        if memory is None:
            memory = torch.empty((len(tokens), head.out_features))
        logits = memory[: len(tokens)]
        return LogitsCalls(before, (layers, head.call(logits, y)), logits)

    def _needs_torch(self) -> bool:
        """Whether torch computes more than small products with the embeddings. A subclass may
        compute anything."""
        is_own = type(self).forward is Decoder.forward and type(self).logits is Decoder.logits
        config = self.config
        return (
            not is_own
            or (config.logits_scale, config.final_softcap) != (1.0, None)
            or (self.embedding_norm, self.positions, self.norm.apart.norm) != (None, None, None)
        )

    def drop_stack(self) -> None:
        """Compute the layers one by one from now on, with every attention backend."""
        self.stack = None

    def logits(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        """See `Model`."""
        head = self.lm_head
        if memory is not None and isinstance(head, NativeLinear):
            logits = head.into(memory[: len(hidden)], hidden)
        else:
            logits = head(hidden)
        if self.config.logits_scale != 1.0:
            logits *= self.config.logits_scale
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def output_head(
    config: ModelConfig,
    source: WeightSource,
    embedding: Tensor | PackedEmbedding,
    norm: Norm | None,
) -> Linear:
    """The linear layer that computes logits, with the final norm in front where one is given.

    With tied embeddings its weight is `embedding` [V, E].
    """
    fusion = Fusion(norm=norm, float_out=True)
    bias = source.take("lm_head.bias", (config.vocab_size,)) if config.head_bias else None
    if config.tie_embeddings:
        if isinstance(embedding, PackedEmbedding) and bias is None:
            return embedding.tied_head(fusion)
        assert isinstance(embedding, Tensor), "no family has a tied head with a bias"
        weights: Sequence[Tensor] | HeldWeights = [embedding]
    else:
        weights = source.take_linear({"lm_head.weight": (config.vocab_size, config.hidden_size)})
    return make_linear(
        weights,
        bias,
        fusion,
        quantization=lm_head_quantization(source.quantization),
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
