"""Gemma 3's text decoder: where its equations differ from the Llama family's.

Embeddings are scaled by √E; four norms a layer, each multiplied by 1 + w and computed in float32;
a tanh-GELU gate; sliding layers with a RoPE of their own between global ones; queries scaled by
their own constant (that scale is the attention backend's). Of a multimodal checkpoint only the
text part is read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.models.config import ModelConfig
from infer.models.decoder import Attention, fused, output_head
from infer.models.model import Attend
from infer.models.rope import RopeTable
from infer.models.weights import WeightSource

# Older and newer writers of multimodal checkpoints; text-only ones have no prefix.
_PREFIXES = ("language_model.", "model.language_model.")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension with a weight in float32 that is already 1 + w."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


class _Attention(Attention):
    """The family's head norms: 1 + w, in float32."""

    def __init__(self, index: int, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        super().__init__(index, config, source, prefix)
        assert self.head_norms is not None
        q, k = self.head_norms
        self.head_norms = (1.0 + q.float(), 1.0 + k.float())

    def norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of each head [T, heads, D]."""
        return _norm(heads, weight, self.config.norm_eps)


class _Layer:
    """One decoder layer: [T, E] → [T, E]."""

    def __init__(self, index: int, config: ModelConfig, source: WeightSource, root: str) -> None:
        self.eps = config.norm_eps
        prefix = f"{root}layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            1.0 + source.take(f"{prefix}{name}_layernorm.weight", (hidden,)).float()
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self.attention = _Attention(index, config, source, f"{prefix}self_attn.")
        mlp = f"{prefix}mlp."
        gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        self.gate_up = fused(source, hidden, gate_up, bias=False)
        self.down = fused(source, inner, {f"{mlp}down_proj": hidden}, bias=False)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        eps = self.eps
        h = self.attention(_norm(x, self.before_attention, eps), cos, sin, attend)
        x = x + _norm(h, self.after_attention, eps)
        gate, up = self.gate_up(_norm(x, self.before_mlp, eps)).chunk(2, dim=-1)
        h = self.down(F.gelu(gate, approximate="tanh") * up)
        return x + _norm(h, self.after_mlp, eps)


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
        self.norm = 1.0 + source.take(f"{root}norm.weight", (hidden,)).float()
        head = root.removesuffix("model.") + "lm_head.weight"
        self.lm_head = output_head(config, source, self.embedding, head)
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
        return _norm(x, self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] in float32 of the rows [R, E] that will be sampled."""
        logits = self.lm_head(hidden).float()
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


def build(config: ModelConfig, source: WeightSource, max_seq_len: int) -> Gemma3:
    """What `models.model.build_model` calls."""
    return Gemma3(config, source, max_seq_len)
