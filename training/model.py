"""The network that is trained: a small Llama.

Owns the shape of the demo model and a compact PyTorch module whose parameter names are
those of Hugging Face checkpoints. Called by train.py. It only trains: generation goes
through a checkpoint and the libraries that load it (see evaluate.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The hyper-parameters of the model."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def config(self, begin: int, end: int) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": begin,
            "eos_token_id": end,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab,
        }


class Norm(nn.Module):
    """Root-mean-square normalisation with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, in single precision."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions and shared key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each row of the batch."""
        rows, length, _ = x.shape
        size = (rows, length, -1, self.shape.head_dim)
        query = _rotate(self.q_proj(x).view(size).transpose(1, 2), cos, sin)
        key = _rotate(self.k_proj(x).view(size).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(size).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class FeedForward(nn.Module):
    """The gated two-layer network after each attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The whole model; its loss is the only output that training needs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Residual outputs start smaller, so that depth does not inflate the stream.
                depth = (
                    (2 * self.shape.layers) ** 0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(weight, std=0.02 / depth)
        # Embeddings start large, so that later layers can still read which name a token is:
        # from the usual 0.02 the model learns fluent sentences but not to copy names. The
        # final norm starts small, as the same embeddings give the output.
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        nn.init.constant_(self.norm.weight, 0.1)

    def rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary positions."""
        half = torch.arange(0, self.shape.head_dim, 2) / self.shape.head_dim
        angles = torch.outer(torch.arange(length), self.shape.rope_theta**-half)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def forward(self, tokens: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the mean loss in nats per token; targets of -100 do not count."""
        stream = self.embed_tokens(tokens).to(torch.bfloat16)
        for layer in self.layers:
            stream = layer(stream, cos, sin)
        logits = F.linear(self.norm(stream), self.embed_tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16, under the names of Hugging Face checkpoints."""
        return {f"model.{name}": weight.detach().to(torch.bfloat16).contiguous()
                for name, weight in self.named_parameters()}  # fmt: skip
