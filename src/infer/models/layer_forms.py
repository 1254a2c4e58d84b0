"""What differs between families beside sizes, as data: the form of a layer, and names of tensors.

`LayerForm` says where a layer has norms, which ones, what its MLP computes, and what is multiplied.
`TensorLayout` says under which names a checkpoint of the family stores its tensors, which of them
are packed into one, and in which order the rows of queries and keys are. One decoder computes all
forms (`models.decoder`), so most families are one row of the registry and one reader of a config.
The module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GATES = ("silu", "gelu_tanh")
"""Activations of a gate that linear layers compute together with their product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormForm:
    """A norm. The default is RMSNorm with a weight."""

    centred: bool = False
    """Whether the mean is removed: LayerNorm instead of RMSNorm."""
    weight: bool = True
    """Whether the result is multiplied by a weight."""
    bias: bool = False
    """Whether a bias is added."""
    add_one: bool = False
    """Whether the factor is 1 + weight, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerForm:
    """What a layer computes, beside its sizes. The default is Llama's layer."""

    norm: NormForm = NormForm()
    """Form of the layer's norms and of the last one."""
    pre_norms: bool = True
    """Whether the inputs of attention and of the MLP are normalised."""
    post_norms: bool = False
    """Whether their outputs are normalised before they are added."""
    parallel: bool = False
    """Whether attention and the MLP read the same input: x + attention(x) + MLP(x)."""
    one_norm: bool = False
    """Whether both have the same norm before them; of parallel blocks."""
    gated: bool = True
    """Whether the MLP has a gate: down(act(gate) · up) instead of down(act(up))."""
    activation: str = "silu"
    """Activation of the MLP: silu, gelu_tanh, gelu, relu, relu2 or xielu."""
    residual_scale: float = 1.0
    """Factor of what attention and the MLP add."""
    qk_norm: str = "head"
    """Which norms queries and keys have, if they have any: "head": one weight for all heads, before
    the rotation; "rotated": the same after the rotation; "width": RMSNorm over all heads together;
    "each head": LayerNorm of a head, with a weight for each."""
    sinks: bool = False
    """Whether each query head has a sink: a learned score that takes a share of its weights."""
    qkv_clip: float | None = None
    """Largest magnitude of the outputs of the q, k and v projections; None: any."""


_LLAMA_NAMES: Mapping[str, str] = {
    **{f"{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attention_in_norm": "input_layernorm",
    "mlp_in_norm": "post_attention_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "sinks": "self_attn.sinks",
    "alpha_p": "mlp.act_fn.alpha_p",
    "alpha_n": "mlp.act_fn.alpha_n",
    "embed_tokens": "embed_tokens",
    "embed_positions": "embed_positions",
    "embed_norm": "embed_norm",
    "norm": "norm",
}


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """How a family's checkpoints name and arrange their tensors. The default is Llama's.

    `models.arrangement` finds the decoder's tensors by it.
    """

    roots: tuple[str, ...] = ("model.",)
    """Prefixes of the decoder's tensors, of which a checkpoint has one."""
    layers: str = "layers."
    """Prefix of the layers' tensors behind the root; the layer's index follows."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the decoder's tensors, where they are not Llama's: the decoder's name → the one in
    files. Several with one name are packed into one tensor, in the order q, k, v or gate, up."""
    head: str = "lm_head"
    """Name of the output head, which has no root."""
    grouped: bool = False
    """Whether a packed tensor has the q, k and v rows of a key/value head together."""
    pairs: bool = False
    """Whether neighbouring rows of a head rotate together, instead of rows of its two halves."""
    transposed: bool = False
    """Whether the layers' matrices are stored as [in, out]."""
    ignored: tuple[str, ...] = ()
    """Names of tensors of a layer that follow from the config."""
    text_part: bool = False
    """Whether the checkpoint is multimodal, so that tensors for images and sounds are left out."""

    def stored(self, name: str) -> str:
        """The name in files of the decoder's tensor `name`, without root, layer and suffix."""
        return self.names.get(name) or _LLAMA_NAMES[name]


IMAGE_PREFIXES = (
    *("vision_tower.", "multi_modal_projector.", "visual.", "vision_model."),
    *("model.vision_tower.", "model.multi_modal_projector.", "model.visual."),
    *("model.audio_tower.", "audio_tower.", "model.embed_vision.", "model.embed_audio."),
)
"""Prefixes of the tensors for images and sounds in multimodal checkpoints."""
