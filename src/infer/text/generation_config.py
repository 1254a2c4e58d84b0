"""A checkpoint's own sampling settings, from `generation_config.json` or a GGUF file's metadata.

Only the sampling is read here; `text.checkpoint_text` reads the end-of-sequence ids. A value that
cannot be used does not keep a model from being served: it is named in `SamplingDefaults.notes`, as
is each setting that would change answers and has no implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from infer.errors import RequestError
from infer.types.sampling import SamplingParams
from infer.types.sampling_defaults import SamplingDefaults

FILE = "generation_config.json"
GGUF_PREFIX = "general.sampling."
GGUF_SOURCE = "the GGUF file's general.sampling"
_FIELDS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
"""Name in generation_config.json → name of the request's field."""
_GGUF_FIELDS = {
    "temp": "temperature",
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "penalty_repeat": "repetition_penalty",
}
"""Name below `general.sampling.` → name of the request's field."""
_INTEGERS = ("top_k", "max_tokens", "min_tokens")
_HARMLESS = frozenset({
    "do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "user_token_id", "assistant_token_id", "chat_format", "max_window_size", "trust_remote_code",
    "transformers_version", "_from_model_config", "_commit_hash", "use_model_defaults",
    "use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "low_memory",
    "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "compile_config", "disable_compile", "prefill_chunk_size",
    "continuous_batching_config", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "is_assistant",
})  # fmt: skip
"""Names in generation_config.json that change no answer, or are read elsewhere."""
_GGUF_HARMLESS = frozenset({"xtc_threshold", "mirostat_tau", "mirostat_eta"})
"""Names that matter only beside another one, which is named."""
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "num_return_sequences"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("xtc_probability", "mirostat"), 0),
    "max_length": 20,  # what transformers writes where nobody has chosen it
    "penalty_last_n": -1,  # ours look at all tokens
}
"""Values without effect of settings that are not supported; no name needs null, false or empty."""
_MAX_NAMED = 8
"""The most settings that a sentence names."""
_MAX_CHARS = 60
"""The most characters of a value that a sentence repeats."""


def defaults_of(config: Mapping[str, Any], source: str = FILE) -> SamplingDefaults:
    """The defaults that the object in a generation_config.json names; `source`: where it is."""
    notes: list[str] = []
    values = _usable(config, _FIELDS, source, notes)
    samples = config.get("do_sample")
    if samples is False:
        values["temperature"] = 0.0
    elif samples is not None and samples is not True:
        notes.append(f"{source}: do_sample must be true or false, not {_shown(samples)}")
    _note_others(config, _FIELDS.keys() | _HARMLESS, source, notes)
    return _made(values, source, notes)


def defaults_of_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults that the metadata of a GGUF file names."""
    notes: list[str] = []
    stored = {  # by its keys: to look at a value reads it, and some are whole vocabularies
        key.removeprefix(GGUF_PREFIX): _decimal(metadata[key])
        for key in metadata
        if key.startswith(GGUF_PREFIX)
    }
    if type(stored.get("temp")) is float and stored["temp"] < 0:  # llama.cpp's word for greedy
        stored["temp"] = 0.0
    if stored.get("penalty_last_n") == 0:  # no tokens are looked at
        stored = {name: value for name, value in stored.items() if not name.startswith("penalty_")}
    if stored.get("penalty_repeat") in (None, 1):
        stored.pop("penalty_last_n", None)
    values = _usable(stored, _GGUF_FIELDS, GGUF_SOURCE, notes)
    _note_others(stored, _GGUF_FIELDS.keys() | _GGUF_HARMLESS, GGUF_SOURCE, notes)
    return _made(values, GGUF_SOURCE, notes)


def _made(values: Mapping[str, Any], source: str, notes: Iterable[str]) -> SamplingDefaults:
    return SamplingDefaults(source=source if values else "", notes=tuple(notes), **values)


def _usable(
    config: Mapping[str, Any], names: Mapping[str, str], source: str, notes: list[str]
) -> dict[str, Any]:
    """The values that a request could have, by the names of its fields; `notes` gets the others."""
    values: dict[str, Any] = {}
    for theirs, ours in names.items():
        value: Any = config.get(theirs)
        if value is None:
            continue
        if ours in _INTEGERS and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            given: dict[str, Any] = {ours: value}
            params = SamplingParams(**given)
        except RequestError as error:
            reason = error.message if len(error.message) < 4 * _MAX_CHARS else "is not valid"
            notes.append(f"{source}: {theirs} is not used: {reason}")
            continue
        if ours == "stop":
            value = params.stop
        if not (ours == "max_tokens" and params.max_tokens is None):
            values[ours] = value
    return values


def _note_others(config: Mapping[str, Any], known: Set[str], source: str, notes: list[str]) -> None:
    """Add a sentence that names the settings which are not `known` and would have an effect."""
    names = [
        f"{name[:_MAX_CHARS]} ({_shown(value)})"
        for name, value in config.items()
        if name not in known and value not in (None, False, "", [], {}, _NEUTRAL.get(name))
    ]
    if len(names) > _MAX_NAMED:
        names[_MAX_NAMED:] = [f"{len(names) - _MAX_NAMED} more"]
    if names:
        notes.append(f"{source}: not supported, so without effect: {', '.join(names)}")


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):  # which may be long, and deep
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "…"


def _decimal(value: Any) -> Any:
    """A number that was written as 0.8 and stored in 32 bits, as it was written."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
