"""`ModelConfig`: the content of a checkpoint's `config.json`, in the same terms for all families.

A field that changes the mathematics is honoured or refused by name; none is ignored. The module
imports the standard library only, so that planning and the server can read a config without torch.
`models.registry` lists the architectures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from infer.errors import LoadError
from infer.files import MAX_CONFIG_BYTES, parse_json, read_text
from infer.models.layer_forms import LayerForm, TensorLayout
from infer.models.quantization import Quantization

MAX_SIZE = 2**31 - 1
"""Maximum of any size in a config; no model has a larger one."""
MAX_NUMBER = 1e30
"""Upper bound of any other number in a config; its powers and products stay finite."""
MAX_LAYERS = 1024
"""Maximum number of layers; the deepest published models have 126."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, and scaling to longer contexts.

    The fields have the meaning of `rope_scaling` in Hugging Face configs.
    """

    theta: float = 10000.0
    """Base of the frequencies, θ in θ^(-2i/D)."""
    kind: str = "default"
    """Kind of scaling: default, linear, llama3, yarn or longrope."""
    factor: float = 1.0
    """Ratio of the extended context length to the original one."""
    low_freq_factor: float = 1.0
    """Rotations within the original length below which a frequency is scaled in full (llama3)."""
    high_freq_factor: float = 4.0
    """Rotations within the original length above which a frequency is not scaled (llama3)."""
    original_max_position: int = 8192
    """Context length before scaling, in tokens (llama3, yarn)."""
    beta_fast: float = 32.0
    """Rotations within the original length above which a frequency is not scaled (yarn)."""
    beta_slow: float = 1.0
    """Rotations within the original length below which a frequency is scaled in full (yarn)."""
    attention_factor: float = 1.0
    """Factor of cosines and sines (yarn, longrope)."""
    truncate: bool = True
    """Whether the bounds of the blended dimensions are rounded to whole ones (yarn)."""
    frequency_divisors: tuple[float, ...] = ()
    """Divisor of each frequency, as GGUF files and longrope have them; (): no division."""
    long_divisors: tuple[float, ...] = ()
    """The divisors of a context longer than `original_max_position`; see `for_context`."""
    rotary_size: int | None = None
    """Number of a head's elements that rotate; None: all."""
    query_growth: float = 0.0
    """β of queries that grow: times 1 + β ln(1 + ⌊position / `original_max_position`⌋)."""

    def for_context(self, max_seq_len: int) -> RopeConfig:
        """What a model with a context of `max_seq_len` tokens uses, for all of its sequences.

        Sequences that changed their frequencies when they grow would have keys of two kinds.
        """
        if not self.long_divisors:
            return self
        is_long = max_seq_len > self.original_max_position
        divisors = self.long_divisors if is_long else self.frequency_divisors
        return dataclasses.replace(self, frequency_divisors=divisors, long_divisors=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Alibi:
    """Attention with linear biases (Press et al. 2021, arXiv:2108.12409) instead of a rotation."""

    slopes: tuple[float, ...]
    """What a query head's score with a key is lowered by for each position between them, [H]."""
    rounded: float | None = None
    """Not None: a key at position j has `rounded` · slope · j added to its score instead, with the
    slope, j and their product in bfloat16, as Falcon was trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """What one decoder layer is; `ModelConfig.layer` derives it.

    The decoder, the KV cache, attention, the native stack of layers and `infer.cells` read a
    layer's properties here, so a property that differs from layer to layer is written once. The
    layer's mixer is attention.
    """

    index: int
    """Index of the layer."""
    hidden_size: int
    """Size of the hidden states, E."""
    intermediate_size: int
    """Size of the MLP's inner layer."""
    num_heads: int
    """Number of query heads, H."""
    num_kv_heads: int
    """Number of key/value heads, G."""
    head_dim: int
    """Size of a head, D."""
    norm_eps: float
    """Epsilon of the layer's norms, those of its heads included."""
    attention_scale: float
    """Factor of attention scores."""
    score_softcap: float | None
    """Cap c of attention scores, which become c · tanh(score / c); None: no cap."""
    alibi: Alibi | None
    """What attention scores are lowered by; None: nothing."""
    window: int | None
    """Sliding window in positions, a query's own included; None: the layer sees all positions."""
    rope: RopeConfig | None
    """Rotation of queries and keys; None: they are not rotated."""
    qkv_bias: bool
    """Whether the q, k and v projections have biases."""
    o_bias: bool
    """Whether attention's output projection has a bias."""
    mlp_bias: bool
    """Whether the MLP's projections have biases."""
    qk_norm: bool
    """Whether queries and keys are normalised; `form` says how."""
    form: LayerForm
    """What the layer computes."""


class AttentionArguments(TypedDict):
    """What an attention backend is made from, beside the caches."""

    num_heads: int
    """Number of query heads, H."""
    scale: float
    """Factor of attention scores."""
    softcap: float | None
    """Cap c of attention scores, which become c · tanh(score / c); None: no cap."""
    slopes: tuple[float, ...]
    """Slopes of `Alibi`, [H]; (): none."""
    rounded: float | None
    """As in `Alibi`."""
    windows: list[int | None]
    """Sliding window of each layer; None: all positions."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and the options of a decoder-only transformer."""

    architecture: str
    """Name of the architecture in `config.json`, such as LlamaForCausalLM."""
    vocab_size: int
    """Number of token ids, V."""
    hidden_size: int
    """Size of the hidden states, E."""
    intermediate_size: int
    """Size of the MLP's inner layer."""
    num_layers: int
    """Number of decoder layers."""
    num_heads: int
    """Number of query heads, H."""
    num_kv_heads: int
    """Number of key/value heads, G; a divisor of H."""
    head_dim: int
    """Size of a head, D."""
    max_seq_len: int
    """Maximum number of positions, in tokens."""
    norm_eps: float
    """Epsilon of RMSNorm or LayerNorm."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding; of all layers unless `ropes` is set."""
    tie_embeddings: bool
    """Whether the output head uses the embedding's weight."""
    dtype: str
    """Dtype of the checkpoint: bfloat16, float16 or float32."""
    qkv_bias: bool = False
    """Whether the q, k and v projections have biases."""
    o_bias: bool = False
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = False
    """Whether the MLP's projections have biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised; `form` says how."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer: the number of positions that a query sees, its own included.

    None: the layer sees all positions. (): no layer has a window.
    """
    query_scale: float | None = None
    """Factor of attention scores; None: 1/√head_dim."""
    score_softcap: float | None = None
    """Cap c of attention scores, which become c · tanh(score / c); None: no cap."""
    alibi: Alibi | None = None
    """What attention scores are lowered by; None: nothing."""
    ropes: tuple[RopeConfig | None, ...] = ()
    """RoPE of each layer; None: the layer's queries and keys are not rotated. (): `rope`."""
    final_softcap: float | None = None
    """Cap c of the logits, which become c · tanh(logits / c); None: no cap."""
    form: LayerForm = field(default_factory=LayerForm)
    """What a layer computes, beside its sizes."""
    layout: TensorLayout = field(default_factory=TensorLayout)
    """How checkpoints name and arrange the tensors."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    rounds_embedding_scale: bool = False
    """Whether that factor is rounded to the embeddings' dtype."""
    logits_scale: float = 1.0
    """Factor of the logits."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    embedding_norm: bool = False
    """Whether embeddings are normalised."""
    positions_offset: int | None = None
    """Row of position 0 in a table of learned positions; None: there is no table."""
    quantization: Quantization | None = None
    """How the files store the weights of linear layers; None: in floating point."""
    num_parameters: int | None = None
    """Number of parameters of a model that transformers computes; None: our own decoder has those
    of `models.tensor_list`."""

    def for_context(self, max_seq_len: int) -> ModelConfig:
        """The config of a model with a context of `max_seq_len` tokens."""
        return dataclasses.replace(
            self,
            rope=self.rope.for_context(max_seq_len),
            ropes=tuple(rope and rope.for_context(max_seq_len) for rope in self.ropes),
        )

    def rope_choice(self, max_seq_len: int) -> str:
        """Which divisors a context of `max_seq_len` tokens has, for users; empty: no choice."""
        ropes = (self.rope, *self.ropes)
        rope = next(
            (
                rope_of_layer
                for rope_of_layer in ropes
                if rope_of_layer is not None and rope_of_layer.long_divisors
            ),
            None,
        )
        if rope is None:
            return ""
        is_long = max_seq_len > rope.original_max_position
        chosen = "long" if is_long else "short"
        more = "more than" if is_long else "at most"
        return (
            f"longrope, {chosen} factors for all sequences: a context of {max_seq_len:,} tokens,"
            f" {more} the original {rope.original_max_position:,}"
        )

    def layer(self, index: int) -> LayerConfig:
        """What the layer `index` is."""
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        return LayerConfig(
            index=index,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            attention_scale=scale,
            score_softcap=self.score_softcap,
            alibi=self.alibi,
            window=self.windows[index] if self.windows else None,
            rope=self.ropes[index] if self.ropes else self.rope,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            form=self.form,
        )

    def layers(self) -> list[LayerConfig]:
        """What each layer is."""
        return [self.layer(index) for index in range(self.num_layers)]

    def attention(self) -> AttentionArguments:
        """The arguments of an attention backend, which takes one shape of heads for all layers.

        Raises `LoadError` if layers differ in the shape of their heads or in the scale.
        """
        layers = self.layers()
        shared = (
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "attention_scale",
            "score_softcap",
            "alibi",
        )
        for name in shared:
            values = {getattr(layer, name) for layer in layers}
            if len(values) > 1:
                listed = ", ".join(sorted(map(str, values), key=lambda text: (len(text), text)))
                raise LoadError(
                    f"{self.architecture}: layers differ in {name} ({listed}); attention is"
                    " computed for layers that have the same"
                )
        return {
            "num_heads": layers[0].num_heads,
            "scale": layers[0].attention_scale,
            "softcap": layers[0].score_softcap,
            "slopes": () if layers[0].alibi is None else layers[0].alibi.slopes,
            "rounded": None if layers[0].alibi is None else layers[0].alibi.rounded,
            "windows": [layer.window for layer in layers],
        }


_SAME: Mapping[str, str] = MappingProxyType(
    {
        "swish": "silu",
        **dict.fromkeys(("torch.bfloat16", "bf16"), "bfloat16"),
        **dict.fromkeys(("torch.float16", "fp16", "f16", "half", "torch.half"), "float16"),
        **dict.fromkeys(("torch.float32", "fp32", "f32", "float", "torch.float"), "float32"),
    }
)
"""Other names of a value, each with the usual one."""


_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "residual_multiplier"), (1,)),
        **dict.fromkeys(("embedding_multiplier", "logits_scaling", "logit_scale"), (1,)),
        **dict.fromkeys(("scale_emb", "mup_base_width"), (1,)),
        **dict.fromkeys(("attention_multiplier", "clip_qkv", "scale_depth", "kv_lora_rank"), ()),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
        **dict.fromkeys(
            ("qk_layernorm", "use_qk_norm", "use_parallel_residual", "alibi"), (False,)
        ),
        **dict.fromkeys(("parallel_attn", "use_bidirectional_attention"), (False,)),
        **dict.fromkeys(("add_cross_attention", "is_encoder_decoder"), (False,)),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 1)),
        **dict.fromkeys(("query_pre_attn_scalar", "rotary_dim", "q_lora_rank"), ()),
        **dict.fromkeys(("attention_chunk_size", "layer_rope_theta", "no_rope_layers"), ()),
        **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "attn_output_gate"), (False,)),
        **dict.fromkeys(("new_decoder_architecture", "attn_temperature_tuning"), (False, 0)),
        "apply_residual_connection_post_layernorm": (False,),
        **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input"), (0,)),
        **dict.fromkeys(("position_embedding_type",), ("rope", "rotary", "absolute")),
    }
)
"""Fields that change the mathematics in some family, each with the values that change nothing.
`null` changes nothing either."""


_NULL_IS_NONE = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "num_key_value_heads",
)


class ConfigReader:
    """Reads the fields of one `config.json` and collects everything that is wrong with it.

    A field that is wrong is added to `problems` and gets a harmless value, so that reading goes on.
    A field that would change the mathematics, and that the family's reader did not ask for, is a
    problem too.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        """`raw`: the fields of the file; `where`: its name in error messages."""
        self.raw = raw
        self.where = where
        self.problems: list[str] = []
        self.asked: set[str] = set()
        """Names of the fields that were asked for."""
        self._names: dict[str, str] = {}
        """Names in the file of fields that are read by another one."""

    def use(self, raw: Mapping[str, Any]) -> None:
        """Read the following fields from `raw` instead of from the file's own fields."""
        self.raw = raw

    def renamed(self, others: Mapping[str, str]) -> dict[str, Any]:
        """The values of fields that the file may give under other names (field → name), by which
        problems call them from now on."""
        self._names.update(others)
        return {name: self.raw.get(old) or self.raw.get(name) for name, old in others.items()}

    def use_defaults(self, **values: Any) -> None:
        """Let fields that are absent, or null, have the values of the family's class.

        A window or cap that is null is none; as many heads of keys as of queries are null heads."""
        given = {
            name: value
            for name, value in self.raw.items()
            if value is not None or name in _NULL_IS_NONE
        }
        self.use({**values, **given})

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of a field of type `kind`. `null` counts as absent.

        A field without a default is required.
        """
        self.asked.add(name)
        value = self.raw.get(name)
        if value is None:
            if default is ...:
                self.problems.append(f"{self._called(name)} is missing")
                return 1
            return default
        wanted = kind if isinstance(kind, tuple) else (kind,)
        if float not in wanted and isinstance(value, float) and value.is_integer():
            value = int(value)  # JavaScript, R and Lua write 8.0 for 8
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(k.__name__ for k in wanted)
            self.problems.append(f"{self._called(name)} must be {names}, not {value!r:.80}")
            return 1 if default is ... else default
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(f"{self._called(name)} must be a finite number, not {value}")
            return 1 if default is ... else default
        return value

    def _called(self, name: str) -> str:
        return self._names.get(name, name)

    def positive(self, name: str, default: float | None) -> Any:
        """The value of a field that must be a number above 0; `default` where it is absent."""
        value = self.get(name, (int, float), default)
        if value is not None and not 0 < value < MAX_NUMBER:
            self.problems.append(
                f"{self._called(name)} must be a positive number, not {value!r:.80}"
            )
            return 1.0
        return value

    def size(self, name: str, default: Any = ..., *, most: int = MAX_SIZE) -> int:
        """The value of a field that must be an integer from 1 to `most`."""
        value = self.get(name, int, default)
        if isinstance(value, int) and not 1 <= value <= most:
            wanted = "positive" if value < 1 else f"at most {most}"
            self.problems.append(f"{self._called(name)} must be {wanted}, not {value!r:.80}")
            return 1
        return value  # type: ignore[no-any-return]

    def only(self, name: str, supported: tuple[Any, ...], default: Any) -> Any:
        """The value of a field that must be one of `supported`."""
        self.asked.add(name)
        value = self.raw.get(name, default)
        if value is None:
            value = default
        if isinstance(value, str):
            value = value.strip().lower()
            value = _SAME.get(value, value)
        if value not in supported:
            known = ", ".join(repr(v) for v in supported)
            self.problems.append(f"{name}={value!r:.80} is not supported (supported: {known})")
        return value

    def finish(self) -> None:
        """Raise `LoadError` with all problems, if there are any."""
        for name, neutral in _NEUTRAL.items():
            value = self.raw.get(name)
            is_list_of_ones = isinstance(value, list) and set(map(str, value)) <= {"1", "True"}
            changes = value is not None and value not in neutral and not is_list_of_ones
            if name not in self.asked and changes:
                self.problems.append(f"{name}={value!r:.80} has no meaning in this architecture")
        if self.problems:
            raise LoadError(f"{self.where}: " + "; ".join(self.problems))


def load_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    `LoadError` if the file is missing, longer than `max_bytes`, or not a JSON object.
    """
    try:
        value = parse_json(read_text(path, max_bytes))
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must hold a JSON object")
    return value
