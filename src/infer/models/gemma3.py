"""The text decoder of Gemma 3.

It differs from the Llama decoder as follows. Embeddings are scaled by √E. Each layer has four
norms, which multiply by 1 + w and are computed in float32. The MLP's activation is tanh-GELU.
Layers with a sliding window, which have a RoPE of their own, alternate with global layers. Queries
are scaled by a constant from the config, in the attention backend. Of a multimodal checkpoint only
the text part is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.linear import Norm, one_more
from infer.kernels.rotary import Angles
from infer.models.decoder import Attention, GatedMLP, output_head
from infer.models.model import Attend
from infer.models.model_config import LayerConfig, ModelConfig
from infer.models.rope import RopeTables
from infer.models.weights import WeightSource

# The prefixes in older and newer multimodal checkpoints; text-only checkpoints have none.
_PREFIXES = ("language_model.", "model.language_model.")


def _norm(source: WeightSource, name: str, config: ModelConfig | LayerConfig) -> Norm:
    return Norm(one_more(source.take(name, (config.hidden_size,))), config.norm_eps)


class _Layer:
    """One decoder layer: [T, E] → [T, E]."""

    def __init__(self, layer: LayerConfig, source: WeightSource, root: str) -> None:
        prefix = f"{root}layers.{layer.index}."
        before_attention, self.after_attention, before_mlp, self.after_mlp = (
            _norm(source, f"{prefix}{name}_layernorm.weight", layer)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self.attention = Attention(
            layer, source, f"{prefix}self_attn.", before_attention, offset=True
        )
        self.mlp = GatedMLP(layer, source, f"{prefix}mlp.", before_mlp, "gelu_tanh")

    def __call__(self, x: Tensor, angles: Sequence[Angles | None], attend: Attend) -> Tensor:
        x = self.after_attention(self.attention(x, angles, attend), residual=x)
        return self.after_mlp(self.mlp(x), residual=x)


class Gemma3:
    """The Gemma 3 decoder. See the module's docstring."""

    def __init__(self, config: ModelConfig, source: WeightSource, max_seq_len: int) -> None:
        """`max_seq_len`: the number of positions, which is the length of the RoPE tables."""
        self.config = config
        root = _root(source)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = source.keep_embedding(f"{root}embed_tokens.weight", (vocab, hidden))
        # Training rounded the constant to the embedding's dtype, so it is rounded here too.
        self.scale = torch.tensor(hidden**0.5).to(self.embedding.dtype).item()
        self.layers = [_Layer(layer, source, root) for layer in config.layers()]
        norm = _norm(source, f"{root}norm.weight", config)
        head = root.removesuffix("model.") + "lm_head.weight"
        self.lm_head = output_head(config, source, self.embedding, norm, head)
        source.drop("lm_head.weight")
        self.rope = RopeTables(config, max_seq_len, source.device)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of T tokens, which may belong to any number of sequences."""
        x = self.embedding.index_select(0, tokens) * self.scale
        angles = self.rope.at(positions)
        for layer in self.layers:
            x = layer(x, angles, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V], float32, for the hidden states [R, E] of the rows to be sampled."""
        logits = self.lm_head(hidden)
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _root(source: WeightSource) -> str:
    """The prefix of the text model's tensor names; the tensors of the image part are dropped."""
    for prefix in _PREFIXES:
        if source.has_prefix(prefix):
            source.drop_prefix("vision_tower.", "multi_modal_projector.")
            source.drop_prefix("model.vision_tower.", "model.multi_modal_projector.")
            return "model.language_model." if prefix.startswith("model.") else f"{prefix}model."
    return "model."
