"""Where the decoder's tensors are in a checkpoint: names, parts of packed tensors, order of rows.

The decoder asks for the same tensors in every family, such as `layers.3.q_proj.weight`, with the
rows of a head in the order in which it rotates them: row i with row i + D/2. `arrange` tells a
`WeightSource` which rows of which stored tensor that is, from the config's `TensorLayout`. Rows
move as a whole, so this holds for weights in blocks, too.

Attention is the same if the rows of queries and keys are reordered within each head. So rotation of
neighbouring rows, and of a part of a head, is an order of rows and needs no other kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from infer.models.layer_forms import IMAGE_PREFIXES, TensorLayout
from infer.models.model_config import LayerConfig, ModelConfig
from infer.models.weights import Rows, WeightSource

log = logging.getLogger(__name__)


def arrange(source: WeightSource, config: ModelConfig) -> None:
    """Let a source find the decoder's tensors by their names in the decoder."""
    layout = config.layout
    embedding = f"{layout.stored('embed_tokens')}.weight"
    roots = (root for root in layout.roots if source.has_prefix(f"{root}{embedding}"))
    root = next(roots, layout.roots[0])
    if layout.text_part:
        source.drop_prefix(*IMAGE_PREFIXES)
        if not source.rehearses:
            log.info("%s: its text part is loaded; images are not read", config.architecture)
    heads = [f"{root.removesuffix('model.')}{layout.head}", layout.head]
    head = next((name for name in heads if source.has_prefix(f"{name}.")), layout.head)
    # Some checkpoints store a tied head's weight a second time.
    source.drop(*(f"{name}.weight" for name in heads if config.tie_embeddings or name != head))
    for layer in config.layers():
        source.drop(*(f"{root}{layout.layers}{layer.index}.{name}" for name in layout.ignored))
    source.arrange(stored_rows(config, root, head))


def stored_rows(
    config: ModelConfig, root: str | None = None, head: str | None = None
) -> Callable[[str], Rows]:
    """A function that finds the stored rows of the decoder's tensors, by their names.

    `root`: what the names of the decoder's tensors begin with; `head`: the name of the output head.
    None: what is usual.
    """
    layout, layers = config.layout, config.layers()
    root = layout.roots[0] if root is None else root
    head = layout.head if head is None else head

    def rows(name: str) -> Rows:
        """The stored rows of the decoder's tensor `name`."""
        *place, part, kind = name.split(".")
        if part == "lm_head":
            return Rows(f"{head}.{kind}")
        if not place:
            return Rows(f"{root}{layout.stored(part)}.{kind}")
        prefix = f"{root}{layout.layers}{place[1]}."
        return _rows_of_layer(config, layers[int(place[1])], part, f"{prefix}{{}}.{kind}")

    return rows


def _rows_of_layer(config: ModelConfig, layer: LayerConfig, part: str, name: str) -> Rows:
    """Of a tensor of a layer; `name`: the stored name with a gap for the part's."""
    layout = config.layout
    stored = layout.stored(part)
    name = name.format(stored).removesuffix(".")  # of what has no suffix in files
    turned = layout.transposed and part.endswith("_proj")
    order, total = _packed(layout, layer, part)
    if part not in ("q_proj", "k_proj", "q_norm", "k_norm"):
        return Rows(name, order, total, turned)
    count = layer.num_heads if part[0] == "q" else layer.num_kv_heads
    is_norm = part.endswith("norm")
    within = head_order(layer.head_dim, _rotary_size(config, layer), pairs=layout.pairs)
    if within is not None:
        is_shared = is_norm and layer.form.qk_norm in ("head", "rotated")
        firsts = np.arange(1 if is_shared else count) * layer.head_dim
        moved = (firsts[:, None] + within).ravel()
        order = moved if order is None else np.arange(total or 0)[order][moved]
    each_head = is_norm and layer.form.qk_norm == "each head"
    return Rows(name, order, total, turned, count if each_head else None)


def _packed(
    layout: TensorLayout, layer: LayerConfig, part: str
) -> tuple[np.ndarray | slice | None, int | None]:
    """The rows of a part in a packed tensor, and their number there; None: it is not packed."""
    stored, size, groups = layout.stored(part), layer.head_dim, layer.num_kv_heads
    if sum(layout.stored(f"{letter}_proj") == stored for letter in "qkv") > 1:
        total = (layer.num_heads + 2 * groups) * size
        return _packed_heads(layer, part[0], grouped=layout.grouped), total
    if layout.stored("gate_proj") == layout.stored("up_proj") == stored and layer.form.gated:
        inner = layer.intermediate_size
        return slice(0, inner) if part[0] == "g" else slice(inner, 2 * inner), 2 * inner
    return None, None


def _rotary_size(config: ModelConfig, layer: LayerConfig) -> int:
    rope = layer.rope or config.rope
    return layer.head_dim if rope.rotary_size is None else rope.rotary_size


def _packed_heads(layer: LayerConfig, part: str, *, grouped: bool) -> np.ndarray | slice:
    """The rows of q, k or v in a tensor that has all of them."""
    size, heads, groups = layer.head_dim, layer.num_heads, layer.num_kv_heads
    if not grouped:
        start = {"q": 0, "k": heads, "v": heads + groups}[part]
        return slice(start * size, (start + (heads if part == "q" else groups)) * size)
    queries = heads // groups
    rows = np.arange(groups * (queries + 2) * size).reshape(groups, queries + 2, size)
    return rows[
        :, {"q": slice(queries), "k": slice(queries, queries + 1), "v": slice(-1, None)}[part]
    ].ravel()


def head_order(size: int, rotary: int, *, pairs: bool) -> np.ndarray | None:
    """The stored rows of a head of `size` rows in the decoder's order; None: as they are.

    The first `rotary` rows rotate, neighbours together if `pairs`, else rows of two halves. In the
    decoder's order, row i of the first half of the head rotates with row i of the second half.
    """
    if rotary == size and not pairs:
        return None
    turning, rest = np.arange(rotary), np.arange(rotary, size)
    first, second = (turning[::2], turning[1::2]) if pairs else np.split(turning, 2)
    half = len(rest) // 2
    return np.concatenate([first, rest[:half], second, rest[half:]])
