"""Which tensors a decoder has, from its config alone: for plans of memory, which build no model

The names are those by which `models.decoder` asks for them. What is added there is added here; a
test compares both for every family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infer.models.layer_forms import GATES
from infer.models.model_config import LayerConfig, ModelConfig

Shape = tuple[int, ...]
"""Sizes of a tensor."""


@dataclass(frozen=True, slots=True)
class Product:
    """The weights of a linear layer, whose outputs are concatenated."""

    weights: Mapping[str, tuple[int, int]]
    """Shape [out, in] of each weight, by its name."""
    gated: bool = False
    """Whether the layer computes a gate with its product."""
    is_head: bool = False
    """Whether it makes the logits."""

    @property
    def num_weights(self) -> int:
        """Number of elements."""
        return sum(map(math.prod, self.weights.values()))


@dataclass(frozen=True, slots=True)
class TensorList:
    """All tensors of a decoder."""

    embedding: tuple[str, tuple[int, int]]
    """Name and shape [V, E]."""
    products: tuple[Product, ...]
    """The linear layers; not a head with the embedding's weight."""
    others: Mapping[str, Shape]
    """Norms, biases and the like, by name."""


def tensors_of(config: ModelConfig) -> TensorList:
    """The tensors of a decoder of this shape."""
    vocab, hidden = config.vocab_size, config.hidden_size
    others: dict[str, Shape] = {}
    if (offset := config.positions_offset) is not None:
        others["embed_positions.weight"] = (config.max_seq_len + offset, hidden)
    if config.embedding_norm:
        others |= _norm(config.layer(0), "embed_norm")
    products: list[Product] = []
    for layer in config.layers():
        products += _products(layer)
        others |= _others(layer)
    others |= _norm(config.layer(0), "norm")
    if config.head_bias:
        others["lm_head.bias"] = (vocab,)
    if not config.tie_embeddings:
        products.append(Product({"lm_head.weight": (vocab, hidden)}, is_head=True))
    return TensorList(("embed_tokens.weight", (vocab, hidden)), tuple(products), others)


def _products(layer: LayerConfig) -> Iterator[Product]:
    hidden, inner, form = layer.hidden_size, layer.intermediate_size, layer.form
    attention = _attention(layer)
    gates = ("gate", "up") if form.gated else ("up",)
    gated = form.gated and form.activation in GATES
    yield _product(layer, {f"{part}_proj": attention[part] for part in "qkv"}, hidden)
    yield _product(layer, {"o_proj": hidden}, attention["q"])
    yield _product(layer, dict.fromkeys((f"{gate}_proj" for gate in gates), inner), hidden, gated)
    yield _product(layer, {"down_proj": hidden}, inner)


def _product(
    layer: LayerConfig, sizes: Mapping[str, int], width: int, gated: bool = False
) -> Product:
    prefix = f"layers.{layer.index}."
    return Product({f"{prefix}{name}.weight": (n, width) for name, n in sizes.items()}, gated)


def _attention(layer: LayerConfig) -> dict[str, int]:
    """Number of outputs of each projection of attention."""
    size = layer.head_dim
    kv_size = layer.num_kv_heads * size
    return {"q": layer.num_heads * size, "k": kv_size, "v": kv_size, "o": layer.hidden_size}


def _others(layer: LayerConfig) -> dict[str, Shape]:
    """The tensors of a layer beside the weights of its linear layers."""
    form, hidden, inner = layer.form, layer.hidden_size, layer.intermediate_size
    shapes: dict[str, Shape] = {}
    sizes = _attention(layer)
    biases = [part for part in "qkvo" if (layer.o_bias if part == "o" else layer.qkv_bias)]
    shapes |= {f"{part}_proj.bias": (sizes[part],) for part in biases}
    mlp = (
        {"gate": inner, "up": inner, "down": hidden}
        if form.gated
        else {"up": inner, "down": hidden}
    )
    shapes |= {f"{part}_proj.bias": (n,) for part, n in mlp.items() if layer.mlp_bias}
    if layer.qk_norm:
        is_whole = form.qk_norm in ("width", "each head")
        for part in "qk":
            shapes[f"{part}_norm.weight"] = (sizes[part] if is_whole else layer.head_dim,)
    if form.sinks:
        shapes["sinks."] = (layer.num_heads,)
    if form.activation == "xielu":
        shapes |= {"alpha_p.": (1,), "alpha_n.": (1,)}
    norms = {
        "attention_in": form.pre_norms,
        "mlp_in": form.pre_norms and not form.one_norm,
        "attention_out": form.post_norms,
        "mlp_out": form.post_norms,
    }
    for name, there in norms.items():
        shapes |= _norm(layer, f"{name}_norm") if there else {}
    return {f"layers.{layer.index}.{name}": shape for name, shape in shapes.items()}


def _norm(layer: LayerConfig, name: str) -> dict[str, Shape]:
    """The tensors of a norm over the hidden states."""
    form = layer.form.norm
    shape: Shape = (layer.hidden_size,)
    weight = {f"{name}.weight": shape} if form.weight or form.add_one else {}
    return weight | ({f"{name}.bias": shape} if form.bias else {})
