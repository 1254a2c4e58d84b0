"""`LayerStack`: all layers of a decoder in one call of the native library (layers.cpp).

The library makes the same calls in the same order as the decoder's own loop, so the results have
the same bits. It avoids the interpreter's cost of 65 µs per layer, which is a tenth of a small
model's step. The cost is that high because each layer's weights displace the interpreter's data
from the CPU's caches.

The stack is a second implementation of the loop, so it takes no layer on trust. `stack_layers`
refuses a model that declares a property which is not listed here (`MODEL_PROPERTIES`,
`LAYER_PROPERTIES`), and layers whose sizes the library cannot take. `models.stack_check` then
compares the stack with the loop on a few tokens. Whatever is refused is computed by the loop.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from infer.kernels import loader
from infer.kernels.linear.fusion import Linear
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.loader import NativeCall
from infer.kernels.rotary import Angles, HeadNorms, QKRotation
from infer.kernels.rows import Activation, RowNorm, packed_doubles
from infer.kernels.team import num_threads

_NO_NORM = RowNorm(None)
"""Nothing but a sum."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerParts:
    """What one layer computes, in its order."""

    qkv: Linear
    """Projection to queries, keys and values, with the norm before it if that can be part of it."""
    o: Linear
    """Attention's output projection."""
    inner: Linear
    """The MLP's first product, with norm and gate as far as they can be part of it."""
    down: Linear
    """The MLP's second product."""
    norms: HeadNorms | None = None
    """Norms of heads before the rotation."""
    factor: Tensor | None = None
    """Factor of rotated queries, [D] float32."""
    before_attention: RowNorm = _NO_NORM
    """Norm that is not part of `qkv`."""
    before_mlp: RowNorm = _NO_NORM
    """Norm that is not part of `inner`."""
    after_attention: RowNorm = _NO_NORM
    """Norm of what attention adds."""
    after_mlp: RowNorm = _NO_NORM
    """Norm of what the MLP adds."""
    all_heads: tuple[RowNorm, RowNorm] = (_NO_NORM, _NO_NORM)
    """Norms over all query heads together and over all key heads."""
    is_parallel: bool = False
    """Whether the MLP reads what attention reads."""
    activation: Activation | None = None
    """The MLP's activation, if it is not part of `inner`."""
    residual_scale: float = 1.0
    """Factor of what attention and the MLP add."""
    clip: float | None = None
    """Largest magnitude of q, k and v; None: any."""

    @property
    def products(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The linear layers."""
        return self.qkv, self.o, self.inner, self.down

    def record(self) -> list[int]:
        """The library's `DecoderLayer` in words of 64 bits; without the linear layers in front."""
        norms = (None, None) if self.norms is None else self.norms.weights
        numbers = [0 if part is None else part.data_ptr() for part in (*norms, self.factor)]
        rows = (self.before_attention, self.before_mlp, self.after_attention, self.after_mlp)
        act = self.activation
        return [
            *numbers,
            *(part.address for part in (*rows, *self.all_heads)),
            *packed_doubles(self.residual_scale, self.clip or 0.0),
            *(int(self.is_parallel), -1 if act is None else act.number),
            *(
                packed_doubles(0.0, 0.0)
                if act is None
                else packed_doubles(act.positive, act.negative)
            ),
        ]


MODEL_PROPERTIES = (
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_dim", "max_seq_len", "norm_eps", "rope", "ropes", "tie_embeddings"),
    *("dtype", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "windows", "query_scale"),
    *("final_softcap", "form", "layout", "embedding_scale", "rounds_embedding_scale"),
    *("logits_scale", "head_bias", "positions_offset", "score_softcap", "alibi", "embedding_norm"),
    "quantization",
)
"""Fields of a model's config that a stack computes, or that do not concern its layers.

Another field must have its default. Add one here only if the stack gives its loop's bits with it.
Of forms that the stack does not compute, the decoder's layers give no parts.
"""
LAYER_PROPERTIES = (
    *("index", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    *("norm_eps", "attention_scale", "window", "rope", "qkv_bias", "o_bias", "mlp_bias"),
    *("qk_norm", "form", "score_softcap", "alibi"),
)
"""The same for the fields of a layer's config."""


FORM_PROPERTIES = (
    *("norm", "pre_norms", "post_norms", "parallel", "one_norm", "gated", "activation"),
    *("residual_scale", "qk_norm", "qkv_clip"),
)
"""The same for the fields of a layer's form."""


class LayeredConfig(Protocol):
    """A model's config: a dataclass that declares the layers, each of which is one, too."""

    def layers(self) -> Sequence[Any]:
        """What each layer is."""


class AttendsThrough(Protocol):
    """An attention backend that can compute all layers of a `LayerStack` in one call."""

    def through(
        self,
        stack: LayerStack,
        x: Tensor,
        angles: Sequence[Angles | None],
        growth: Tensor | None = None,
    ) -> Tensor:
        """Apply all layers: x [T, E] → [T, E]. `angles`: of each layer; None: no rotation.
        `growth`: factors of the tokens' rotated queries, [T] float32."""


class CallsThrough(AttendsThrough, Protocol):
    """One that makes the call before it is due."""

    def through_call(
        self,
        y: Tensor,
        stack: LayerStack,
        x: Tensor,
        angles: Sequence[Angles | None],
        growth: Tensor | None = None,
    ) -> NativeCall:
        """The call of `through` that writes to y, for the step that is planned by then."""


def attends_through(attend: object) -> TypeGuard[AttendsThrough]:
    """Whether an attention backend can compute a `LayerStack`. In Python 3.11 `isinstance` with a
    protocol takes 10 µs, which would be added to every step."""
    return hasattr(attend, "through")


class LayerStack:
    """All layers of a decoder. `stack_layers` makes it."""

    def __init__(self, layers: Sequence[LayerParts], head_dim: int) -> None:
        """`layers`: of equal sizes, as `stack_layers` has checked."""
        self._layers, self._head_dim = layers, head_dim
        words = []
        for parts in layers:
            words += [layer.handle for layer in parts.products if isinstance(layer, NativeLinear)]
            words += parts.record()
        self._table = array("q", words)
        self._sizes = _sizes(layers[0])
        self._eps = next((part.norms.q.eps for part in layers if part.norms is not None), 0.0)
        self._apply = loader.loaded().infer_layers

    def call(
        self,
        y: Tensor,
        attention: int,
        caches: array[int],
        x: Tensor,
        angles: Sequence[Angles | None],
        growth: Tensor | None = None,
    ) -> NativeCall:
        """The call that applies all layers to x [T, E] and writes y [T, E], bfloat16.

        `attention`: handle of an attention kernel that has planned the step. `caches`: for each
        layer the index of its window and the addresses of its keys and values. `angles`: of each
        layer; None: it does not rotate. `growth`: factors of rotated queries, [T] float32.
        """
        assert (x.dtype, x.stride()) == (torch.bfloat16, (self._sizes[0], 1))
        # Most layers share their angles, and asking a tensor for its address takes a while.
        addresses = {id(None): (0, 0)}
        for tables in angles:
            if tables is not None and id(tables) not in addresses:
                addresses[id(tables)] = tables[0].data_ptr(), tables[1].data_ptr()
        grown = 0 if growth is None else growth.data_ptr()
        table = array(
            "q", [number for tables in angles for number in (*addresses[id(tables)], grown)]
        )
        return NativeCall(
            self._apply,
            *(attention, self._table.buffer_info()[0], caches.buffer_info()[0]),
            *(table.buffer_info()[0], len(self._layers), self._eps, x.data_ptr(), y.data_ptr()),
            *(x.shape[0], *self._sizes, num_threads()),
            kept=(self, caches, table, x, y, angles, growth),
        )

    def one_by_one(
        self,
        attend: Callable[[int, Tensor, Tensor, Tensor, QKRotation | None], Tensor],
        x: Tensor,
        angles: Sequence[Angles | None],
        growth: Tensor | None = None,
    ) -> Tensor:
        """What layers.cpp computes, product by product, with another attention: [T, E] → [T, E]."""
        _, q_size, kv_size, _ = self._sizes
        for index, parts in enumerate(self._layers):
            into = _normed(parts.before_attention, x)
            heads = parts.qkv(into)
            if parts.clip is not None:
                heads = heads.clamp(-parts.clip, parts.clip)
            split = heads.split_with_sizes((q_size, kv_size, kv_size), 1)
            for norm, some in zip(parts.all_heads, split, strict=False):
                some.copy_(_normed(norm, some))
            q, k, v = (part.view(len(x), -1, self._head_dim) for part in split)
            rotation = QKRotation.of(angles[index], parts.norms, parts.factor, growth)
            attended = attend(index, q, k, v, rotation).reshape(-1, q_size)
            scale = parts.residual_scale
            between = _added(parts.o, parts.after_attention, scale, attended, x)
            if parts.before_mlp.norm is not None or not parts.is_parallel:
                into = _normed(parts.before_mlp, x if parts.is_parallel else between)
            inner = parts.inner(into)
            inner = inner if parts.activation is None else parts.activation(inner)
            x = _added(parts.down, parts.after_mlp, scale, inner, between)
        return x


def _normed(norm: RowNorm, x: Tensor) -> Tensor:
    return x if norm.norm is None else norm(x)


def _added(linear: Linear, norm: RowNorm, scale: float, x: Tensor, residual: Tensor) -> Tensor:
    """residual + what a linear layer makes of x, behind a norm and times a factor."""
    if norm.norm is None and scale == 1.0:
        return linear(x, residual)
    return norm(linear(x), residual, scale)


def stack_layers(config: LayeredConfig, layers: Sequence[LayerParts | None]) -> LayerStack | None:
    """A stack of the layers that `config` declares; None if `obstacle` has a reason."""
    known = [parts for parts in layers if parts is not None]
    if obstacle(config, layers) is not None:
        return None
    return LayerStack(known, config.layers()[0].head_dim)


def obstacle(config: LayeredConfig, layers: Sequence[LayerParts | None]) -> str | None:
    """The reason why the native library cannot compute these layers in one call; None if it can.

    `layers`: None is a layer that computes something beside what parts say."""
    declared = config.layers()
    records = [
        (MODEL_PROPERTIES, config),
        *((LAYER_PROPERTIES, layer) for layer in declared),
        *((FORM_PROPERTIES, layer.form) for layer in declared),
    ]
    for known, record in records:
        if reason := _unknown_property(record, known):
            return reason
    if len(declared) != len(layers):
        return f"{len(declared)} layers are declared, and {len(layers)} are there"
    eps, first = set(), None
    for parts, layer in zip(layers, declared, strict=True):
        if parts is None:
            return "a layer computes something beside its linear layers, head norms and attention"
        norms = parts.norms
        for product in parts.products:
            if not isinstance(product, NativeLinear):
                return f"a linear layer is a {type(product).__name__}"
            if product.out_dtype != torch.bfloat16:
                return f"a linear layer gives {product.out_dtype}"
        sizes = _sizes(parts)
        hidden, q_size, _, inner = sizes
        inputs = [product.in_features for product in parts.products]
        heads = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        if inputs != [hidden, q_size, hidden, inner] or sizes[1:3] != heads:
            return f"the sizes of a layer's parts do not fit each other: {inputs}, {sizes}"
        first = first or sizes
        if parts.down.out_features != hidden or sizes != first:
            return "layers differ in size"
        if layer.head_dim != declared[0].head_dim:
            return "layers differ in the size of a head"
        if norms is not None:
            eps |= {norms.q.eps, norms.k.eps}
            if any(weight.shape != (layer.head_dim,) for weight in norms.weights):
                return "a norm is not over one head"
    return "norms of heads differ in eps" if len(eps) > 1 else None


def _sizes(parts: LayerParts) -> tuple[int, int, int, int]:
    """(columns of x, of q, of k or v, of the gate's result) of a layer."""
    qkv, o, inner, _ = parts.products
    kv_size = (qkv.out_features - o.in_features) // 2
    return o.out_features, o.in_features, kv_size, inner.out_features


def _unknown_property(record: Any, known: Sequence[str]) -> str | None:
    """A message if a dataclass has a field outside `known` with another value than its default."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name not in known and value != default:
            return f"{type(record).__name__}.{field.name} = {value!r:.80} is not known to the stack"
    return None
