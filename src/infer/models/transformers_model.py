"""`TransformersModel`: any causal model of transformers on our KV cache, the slow way."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.errors import ConfigError, LoadError
from infer.extras import to_install
from infer.kernels.invariance import batch_invariance_problem
from infer.kernels.linear.fusion import Linear
from infer.kernels.linear.plain_linear import PlainLinear
from infer.models.model import Attend
from infer.models.model_config import MAX_LAYERS, ModelConfig, load_json
from infer.models.registry import ARCHITECTURES

log = logging.getLogger(__name__)

NAME = "infer"
"""Name of our attention in the interface of transformers."""
_ALLOWED = frozenset(
    ("dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "layer_idx")
)
"""Arguments of an attention function that are obeyed, or that change nothing here."""
_VARYING_ROPES = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the longest sequence of a step."""
_ATTENTION_LAYERS = frozenset(
    ("attention", "full_attention", "sliding_attention", "chunked_attention")
)
"""Kinds of layers in configs that keep keys and values only."""
_REHEARSED_TOKENS = 8
_TRIAL_TOKENS, _TRIAL_CUTS = 24, (5, 9, 14, 19)
"""Length of a trial's sequence, and of its first chunk each time."""
_TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-3}
_TOLERANCE = 0.1
"""Largest difference in a trial, relative to what is compared, with 16 bits; `_TOLERANCES` has it
for others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Mask:
    """What layers get in place of a mask: the function from which one would be made."""

    sees: Callable[..., Tensor]
    """(batch, head, positions of queries, positions of keys) → whether they see them."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None


class _Passage:
    """What leads from the layers of one model to the attention of the step."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.take: Callable[..., Tensor]
        """(layer, q, k, v, mask, other arguments) → [1, T, H, D]."""

    def through(self, body: Any, take: Callable[..., Tensor], **inputs: Any) -> Any:
        """What `body` makes of `inputs`, with attention by `take`."""
        self.num_calls, self.take = 0, take
        return body(**inputs, use_cache=False)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: Mapping[str, Any]
    ) -> Tensor:
        """What `take` makes of the next layer's queries, keys and values."""
        self.num_calls += 1
        return self.take(self.num_calls - 1, q, k, v, mask, arguments)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """The attention function of the interface: q [1, H, T, D], k and v [1, G, T, D]."""
    return module.infer_passage.attention(q, k, v, mask, arguments), None


def _mask(mask_function: Callable[..., Tensor], **arguments: Any) -> _Mask:
    """The mask function of the interface."""
    return _Mask(mask_function)


def _library() -> Any:
    """transformers, with our attention; `ConfigError` if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "model_impl",
            f"'transformers' needs an optional part of infer: {to_install('transformers')}",
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    return transformers


def read_transformers_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint as cache, plan and attention need it; loads no weights.

    `LoadError` for a model that is not causal, has another state than keys and values, or asks
    for attention that is not computed here; `ConfigError` without transformers.
    """
    library, where = _library(), str(folder / "config.json")
    raw = load_json(folder / "config.json")
    try:
        config = library.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        _check_config(library, config, raw, where)
        with torch.device("meta"):
            causal = library.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=NAME, trust_remote_code=False
            ).eval()
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{where}: transformers makes no model of it ({error!s:.300})") from error
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise LoadError(f"{where}: max_position_embeddings is missing, the longest sequence")
    calls = _rehearsed(causal, text, longest, where)
    first = _shared(calls, where)
    head = causal.get_output_embeddings()
    hidden = text.hidden_size
    return ModelConfig(
        architecture=type(causal).__name__,
        vocab_size=head.weight.shape[0],
        hidden_size=hidden,
        # Layers of unknown kinds keep more between operations than the native ones.
        intermediate_size=2 * max(4 * hidden, getattr(text, "intermediate_size", 0) or 0),
        num_layers=len(calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_seq_len=longest,
        norm_eps=1e-6,
        tie_embeddings=head.weight is causal.get_input_embeddings().weight,
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        windows=tuple(call.window for call in calls),
        query_scale=first.scale,
        score_softcap=first.softcap,
        num_parameters=sum(parameter.numel() for parameter in causal.parameters()),
    )


def _check_config(library: Any, config: Any, raw: Mapping[str, Any], where: str) -> None:
    """Refuse what is no causal model, or none whose numbers are what they were trained as."""
    if config.is_encoder_decoder:
        raise LoadError(f"{where}: {config.model_type!r} has an encoder; only decoders are served")
    if getattr(config, "quantization_config", None) is not None:
        raise LoadError(
            f"{where}: quantised weights are not read with --model-impl transformers; take the"
            " checkpoint in floating point"
        )
    kind = library.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise LoadError(f"{where}: transformers has no causal model of {config.model_type!r}")
    names = raw.get("architectures") or [kind.__name__]
    if kind.__name__ not in names:
        raise LoadError(
            f"{where}: architectures names {names!s:.80}; the causal model of this type is"
            f" {kind.__name__}"
        )
    others = _other_layers(config.get_text_config())
    if getattr(kind, "_is_stateful", False) or others:
        kinds = f" (layers of the kind {', '.join(others)})" if others else ""
        raise LoadError(
            f"{where}: {kind.__name__} has a recurrent state{kinds}, which the cache does not hold;"
            " only models whose layers are all attention are served"
        )
    if rope := _varying_rope(config.to_dict()):
        raise LoadError(
            f"{where}: RoPE of the kind {rope!r} depends on the longest sequence of a step, so an"
            " answer would depend on the requests beside it; it is not served by --model-impl"
            " transformers"
        )


def _other_layers(text: Any) -> list[str]:
    """The kinds of layers of a config that keep more than keys and values."""
    kinds: set[str] = set()
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds.update(map(str, getattr(text, name, None) or ()))
    return sorted(kinds - _ATTENTION_LAYERS)


def _varying_rope(value: Any) -> str | None:
    """The kind of RoPE among the fields of a config that depends on a step; None: there is none."""
    if not isinstance(value, Mapping):
        return None
    kind = value.get("rope_type", value.get("type"))
    if kind in _VARYING_ROPES:
        return str(kind)
    return next((varying for inner in value.values() if (varying := _varying_rope(inner))), None)


def _body(causal: Any, where: str) -> Any:
    """The part of a causal model before its head."""
    body = getattr(causal, causal.base_model_prefix or "-", None)
    if body is None or body is causal or causal.get_output_embeddings() is None:
        raise LoadError(f"{where}: {type(causal).__name__} has no body and head of its own")
    return body


def _passage(body: Any) -> _Passage:
    """A passage from all modules of a body."""
    passage = _Passage()
    for module in body.modules():
        module.infer_passage = passage
    return passage


def _rehearsed(causal: Any, text: Any, longest: int, where: str) -> list[_Call]:
    """What each layer of a model on the meta device asks of attention, in order."""
    calls: list[_Call] = []
    name = type(causal).__name__
    window = functools.cache(lambda mask: _window(mask, longest, f"{where}: {name}"))

    def take(
        layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: Mapping[str, Any]
    ) -> Tensor:
        calls.append(_call(layer, q, k, v, mask, arguments, window, f"{where}: {name}"))
        return q.new_empty((1, q.shape[2], q.shape[1], v.shape[3]))

    body = _body(causal, where)
    shape, meta = (1, _REHEARSED_TOKENS), torch.device("meta")
    tokens = torch.zeros(shape, dtype=torch.int64, device=meta)
    try:
        with torch.inference_mode():
            _passage(body).through(
                *(body, take),
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                position_ids=torch.arange(shape[1], device=meta)[None],
            )
    except LoadError:
        raise
    except Exception as error:
        why = f"they cannot be rehearsed ({error!s:.300})"
        if not calls and not getattr(causal, "_supports_attention_backend", False):
            why = "it does not call the attention interface of transformers"
        raise LoadError(
            f"{where}: it is not known what the layers of {name} compute: {why}"
        ) from error
    if len(calls) != text.num_hidden_layers or len(calls) > MAX_LAYERS:
        raise LoadError(
            f"{where}: {name} has {text.num_hidden_layers} layers and calls the attention interface"
            f" {len(calls)} times, should be once for each of at most {MAX_LAYERS}"
        )
    return calls


def _call(
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    arguments: Mapping[str, Any],
    window_of: Callable[[_Mask], int | None],
    where: str,
) -> _Call:
    """What a layer asks of attention; `LoadError` if it is not computed here."""
    where = f"{where}, layer {layer}"
    for name, value in arguments.items():
        if name not in _ALLOWED and value is not None and value is not False:
            raise LoadError(f"{where}: attention gets {name}, which is not computed here")
    if not isinstance(mask, _Mask):
        raise LoadError(f"{where}: attention gets a mask that the model makes itself")
    if arguments.get("is_causal") is False:
        raise LoadError(f"{where}: attention is not causal")
    if k.shape[2] != q.shape[2] or v.shape[3] > k.shape[3] or q.shape[3] != k.shape[3]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise LoadError(f"{where}: attention gets {shapes}, which is not computed here")
    window, passed = window_of(mask), arguments.get("sliding_window")
    if passed is not None and window is not None and passed != window:
        raise LoadError(f"{where}: a window of {passed}, but a mask with a window of {window}")
    scale, softcap = arguments.get("scaling"), arguments.get("softcap")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise LoadError(f"{where}: scaling is {type(scale).__name__}, should be a number")
    return _Call(q.shape[1], k.shape[1], q.shape[3], v.shape[3], float(scale), softcap, window)


def _window(mask: _Mask, longest: int, where: str) -> int | None:
    """The window of a causal mask, in positions, a query's own included; None: it has none.

    `LoadError` for a mask that is neither causal nor a sliding window."""
    keys = torch.arange(longest + 1)

    def row(position: int) -> Tensor:
        seen = mask.sees(0, 0, torch.tensor(position), keys)
        if not isinstance(seen, Tensor) or seen.device.type != "cpu":
            raise LoadError(f"{where}: its mask depends on more than positions")
        return seen.expand(keys.shape)

    last = longest - 1
    count = int(row(last).sum())
    window = None if count == longest else count
    reach = longest if window is None else window
    for position in {0, min(1, last), last // 2, last, *(min(last, reach + i) for i in (-1, 0, 1))}:
        wanted = (keys <= position) & (keys > position - reach)
        if not torch.equal(row(position), wanted):
            raise LoadError(f"{where}: its mask is neither causal nor a sliding window")
    return window


def _shared(calls: Sequence[_Call], where: str) -> _Call:
    """A call that stands for all; `LoadError` if layers differ in more than the window."""
    if not calls:
        raise LoadError(f"{where}: the model has no layers")
    for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "scale", "softcap"):
        values = sorted({getattr(call, name) for call in calls}, key=str)
        if len(values) > 1:
            listed = ", ".join(map(str, values))
            raise LoadError(
                f"{where}: layers differ in {name} ({listed}); attention is computed for layers"
                " that have the same"
            )
    return calls[0]


class _Given(torch.nn.Module):
    """What stands for the body while the head computes logits."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        """The output that was given."""
        return self.output


class TransformersModel:
    """A causal model of transformers.

    It is what `--model-impl transformers` chooses, and the only module that imports transformers.
    The library's own layers compute everything but attention: an attention function that is
    registered with its interface hands queries, keys and values of all sequences to `Attend`. Which
    windows, scales and caps the layers have is not read from the config, whose fields differ
    between families: the model is built on the meta device, and a rehearsal sees what its layers
    ask for. What `Attend` cannot compute is refused by name. When the weights are loaded, a trial
    compares logits with those of the library's own attention, and chunks with whole sequences, so
    that a model which keeps another state than keys and values is refused, too. See `Model`.
    """

    def __init__(self, causal: Any, config: ModelConfig) -> None:
        """`causal`: the library's model, with its weights, for which `config` was read."""
        self.config = config
        self._body = _body(causal, config.architecture)
        self._passage = _passage(self._body)
        self._causal, self._given = causal, _Given()
        head = causal.get_output_embeddings()
        setattr(causal, causal.base_model_prefix, self._given)
        self.lm_head: Linear = PlainLinear(head.weight, getattr(head, "bias", None))
        shapes = {
            tuple(module.weight.shape): module
            for module in self._body.modules()
            if isinstance(module, torch.nn.Linear)
        }
        self.products: list[Linear] = [
            PlainLinear(module.weight, module.bias) for module in shapes.values()
        ]
        """One linear layer of each shape, for `batch_invariance_problem`."""
        self._kind: Any = None

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Model`."""

        def take(
            layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: Mapping[str, Any]
        ) -> Tensor:
            narrower = q.shape[3] - v.shape[3]  # a cell of the cache has one size
            values = F.pad(v, (0, narrower)) if narrower else v
            q, k, values = (heads[0].transpose(0, 1).to(v.dtype) for heads in (q, k, values))
            out = attend(layer, q, k, values, None)[None]
            return out[..., : v.shape[3]] if narrower else out

        outputs = self._passage.through(
            *(self._body, take), input_ids=tokens[None], position_ids=positions[None].long()
        )
        if self._passage.num_calls != self.config.num_layers:
            raise RuntimeError(
                f"{self.config.architecture}: attention was called {self._passage.num_calls} times,"
                f" not once for each of {self.config.num_layers} layers"
            )
        self._kind = type(outputs)
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        """See `Model`; computed by the library's own head, with its scales and caps."""
        self._given.output = self._kind(last_hidden_state=hidden[None])
        tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._causal(input_ids=tokens, use_cache=False).logits[0]
        self._given.output = None
        return logits.float()

    def reference(self, tokens: Tensor) -> Tensor:
        """Logits [T, V] of a sequence of tokens [T], with the library's own attention."""
        causal = self._causal
        setattr(causal, causal.base_model_prefix, self._body)
        causal.set_attn_implementation("eager")
        try:
            logits: Tensor = causal(input_ids=tokens[None], use_cache=False).logits[0]
        finally:
            causal.set_attn_implementation(NAME)
            setattr(causal, causal.base_model_prefix, self._given)
        return logits.float()


class _Trial:
    """Causal attention for several sequences, over keys and values as they come."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self._layers = model.config.layers()
        self.cached: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        """(layer, sequence) → its keys and values, [n, G, D] each."""
        self._lengths: dict[str, int] = {}
        self._chunks: Sequence[tuple[str, Tensor]] = ()

    def step(self, *chunks: tuple[str, Tensor]) -> Tensor:
        """Hidden states [T, E] of the next tokens of sequences, which have names."""
        self._chunks = chunks
        starts = [self._lengths.get(name, 0) for name, _ in chunks]
        ranges = [
            torch.arange(start, start + len(tokens))
            for start, (_, tokens) in zip(starts, chunks, strict=True)
        ]
        tokens = torch.cat([part for _, part in chunks])
        hidden = self.model.forward(tokens, torch.cat(ranges).to(tokens.device), self)
        for start, (name, part) in zip(starts, chunks, strict=True):
            self._lengths[name] = start + len(part)
        return hidden

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: object) -> Tensor:
        """See `Attend`."""
        results, end = [], 0
        for name, tokens in self._chunks:
            start, end = end, end + len(tokens)
            queries, keys, values = q[start:end], k[start:end], v[start:end]
            if past := self.cached.get((layer, name)):
                keys, values = torch.cat([past[0], keys]), torch.cat([past[1], values])
            self.cached[layer, name] = keys, values
            results.append(self._attended(layer, queries, keys, values))
        return torch.cat(results)

    def _attended(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = self._layers[layer]
        group = q.shape[1] // k.shape[1]
        queries, keys, values = (heads.float().transpose(0, 1) for heads in (q, k, v))
        keys, values = (heads.repeat_interleave(group, 0) for heads in (keys, values))
        scores = queries @ keys.transpose(1, 2) * shape.attention_scale
        if shape.score_softcap is not None:
            scores = torch.tanh(scores / shape.score_softcap) * shape.score_softcap
        at = torch.arange(len(k), device=q.device)
        position = at[len(k) - len(q) :, None]
        seen = (at <= position) & (at > position - (shape.window or len(k) + 1))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1).to(v.dtype)


def _differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Norm of the difference of each row, relative to that of `theirs`; [T], float32."""
    ours, theirs = ours.float().flatten(1), theirs.float().flatten(1)
    norms = theirs.square().sum(1).sqrt().clamp_min(1e-12)
    return (ours - theirs).square().sum(1).sqrt() / norms


def _check_chunks(alone: _Trial, hidden: Tensor, tokens: Tensor, limit: float) -> bool:
    """Whether a sequence has the same bits beside another; `alone` has computed it by itself.

    `LoadError` if it is another in chunks. Experts may be chosen otherwise where two are nearly
    equal, so that single tokens differ; but the first token of each chunk does not, at most cuts.
    """
    model, is_same = alone.model, True
    layers = range(model.config.num_layers)
    differences = []
    for cut in (at for at in _TRIAL_CUTS if at < len(tokens)):
        among, other = _Trial(model), tokens.flip(0)
        company = among.step(("other", other[:7]), ("it", tokens[:cut]))[7:]
        is_same &= torch.equal(_Trial(model).step(("it", tokens[:cut])), company)
        rest = among.step(("other", other[7:12]), ("it", tokens[cut:]))[5:]
        pairs = [(rest[:1], hidden[cut : cut + 1])]
        for layer in layers:
            both = zip(among.cached[layer, "it"], alone.cached[layer, "it"], strict=True)
            pairs += [(ours[cut : cut + 1], theirs[cut : cut + 1]) for ours, theirs in both]
        differences.append(torch.cat([_differences(*pair) for pair in pairs]))
    worst = float(torch.stack(differences).median(0).values.max()) if differences else 0.0
    if not worst <= limit:
        raise LoadError(
            f"{model.config.architecture}: a sequence in chunks, beside another, differs from the"
            f" same alone by {worst:.2g} of its size (at most {limit:g}): the model keeps a state"
            " that the cache does not hold, or does not take positions"
        )
    return is_same


@torch.inference_mode()
def _try_out(model: TransformersModel, dtype: torch.dtype) -> None:
    """Compare a model with the library's own, and its sequences in chunks and in company.

    `LoadError` if it computes something else; a warning if bits depend on company."""
    name, limit = model.config.architecture, _TOLERANCES.get(dtype, _TOLERANCE)
    count = min(_TRIAL_TOKENS, model.config.max_seq_len)
    tokens = (torch.arange(count) * 7919 + 13) % model.config.vocab_size
    alone = _Trial(model)
    hidden = alone.step(("it", tokens))
    gap = float(_differences(model.logits(hidden), model.reference(tokens)).median())
    if not gap <= limit:
        raise LoadError(
            f"{name}: logits differ from those with the attention of transformers by {gap:.2g}"
            f" of their size (at most {limit:g}); the engine would compute something else"
        )
    is_same = _check_chunks(alone, hidden, tokens, limit)
    if not is_same and batch_invariance_problem(model) is None:  # the engine says that of products
        log.warning(
            "%s: on this machine a sequence does not have the same bits alone and beside another:"
            " an answer may depend on other requests in the batch",
            name,
        )


def load_transformers_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The model of a checkpoint, with its weights, on the CPU; a `Model`.

    `LoadError` if the files lack a weight, have another one, or compute something else here than
    with the attention of transformers.
    """
    library = _library()
    try:
        causal, report = library.AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:
        raise LoadError(f"{folder}: transformers does not load it ({error!s:.300})") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := report.get(what):
            listed = ", ".join(sorted(map(str, names))[:5])
            label = what.replace("_", " ")
            raise LoadError(f"{folder}: {len(names)} {label} for the model: {listed:.300}")
    model = TransformersModel(causal.eval(), config)
    name = config.architecture
    fast = ARCHITECTURES.get(name)
    log.warning(
        "%s is computed by transformers' own layers, which is the slow way%s",
        name,
        "" if fast is None else f"; {fast.family} is native here: leave out --model-impl",
    )
    try:
        _try_out(model, dtype)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{name}: a first pass fails ({error!s:.300})") from error
    return model
