"""Gemma 3's text decoder: where its equations differ from the Llama family's.

Embeddings are scaled by √E; four norms a layer, each multiplied by 1 + w and computed in float32;
a tanh-GELU gate; sliding layers with a RoPE of their own between global ones; queries scaled by
their own constant (that scale is the attention backend's). Of a multimodal checkpoint only the
text part is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.kernels.linear import Norm
from infer.models.decoder import Attention, GatedMLP, output_head
from infer.models.model import Attend
from infer.models.model_config import ModelConfig
from infer.models.rope import RopeTable
from infer.models.weights import WeightSource

# Older and newer writers of multimodal checkpoints; text-only ones have no prefix.
_PREFIXES = ("language_model.", "model.language_model.")


def _norm(source: WeightSource, name: str, config: ModelConfig) -> Norm:
    return Norm(1.0 + source.take(name, (config.hidden_size,)).float(), config.norm_eps)


class _Layer:
    """One decoder layer: [T, E] → [T, E]."""

    def __init__(self, index: int, config: ModelConfig, source: WeightSource, root: str) -> None:
        prefix = f"{root}layers.{index}."
        before_attention, self.after_attention, before_mlp, self.after_mlp = (
            _norm(source, f"{prefix}{name}_layernorm.weight", config)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self.attention = Attention(
            index, config, source, f"{prefix}self_attn.", before_attention, offset=True
        )
        self.mlp = GatedMLP(config, source, f"{prefix}mlp.", before_mlp, "gelu_tanh")

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = self.after_attention(self.attention(x, cos, sin, attend), residual=x)
        return self.after_mlp(self.mlp(x), residual=x)


class Gemma3:
    """See the module's docstring."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_seq_len: int) -> None:
        self.config = config
        root = _root(source)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = source.keep(f"{root}embed_tokens.weight", (vocab, hidden))
        # The constant is rounded to the embedding's precision, as in training.
        self.scale = torch.tensor(hidden**0.5).to(self.embedding.dtype).item()
        self.layers = [_Layer(i, config, source, root) for i in range(config.num_layers)]
        norm = _norm(source, f"{root}norm.weight", config)
        head = root.removesuffix("model.") + "lm_head.weight"
        self.lm_head = output_head(config, source, self.embedding, norm, head)
        source.drop("lm_head.weight")
        local = config.local_rope or config.rope
        self.rope = RopeTable(config.rope, config.head_dim, max_seq_len, source.device)
        self.local_rope = RopeTable(local, config.head_dim, max_seq_len, source.device)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of T tokens of any number of sequences, in any mixture."""
        x = self.embedding.index_select(0, tokens) * self.scale
        wide, local = self.rope.at(positions), self.local_rope.at(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, *(wide if self.config.window(i) is None else local), attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] in float32 of the rows [R, E] that will be sampled."""
        logits = self.lm_head(hidden)
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _root(source: WeightSource) -> str:
    """What the names of the text model's tensors begin with."""
    for prefix in _PREFIXES:
        if source.has_prefix(prefix):
            source.drop_prefix("vision_tower.", "multi_modal_projector.")
            source.drop_prefix("model.vision_tower.", "model.multi_modal_projector.")
            return "model.language_model." if prefix.startswith("model.") else f"{prefix}model."
    return "model."
