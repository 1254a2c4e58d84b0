"""The supported architectures: for each, the reader of its config and its decoder class.

A new family whose equations agree with an existing decoder takes one row here and one function in
`models.families`. The module imports the standard library only: it names the decoder, which is
imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import LoadError
from infer.models import families
from infer.models.model_config import ConfigReader, ModelConfig, load_json


@dataclass(frozen=True)
class Architecture:
    """One supported architecture."""

    family: str
    """Name of the model family, for users."""
    read: Callable[[str, ConfigReader], ModelConfig]
    """Function that reads the config: (architecture, reader) → config."""
    decoder: str
    """Class with the equations, as `module:class`."""
    notes: str
    """Features of the family, for users."""
    has_learned_positions: bool = False
    """Whether positions are added to the embeddings instead of rotating queries and keys."""


_DECODER = "infer.models.decoder:Decoder"
_GEMMA3 = Architecture(
    "Gemma 3",
    families.read_gemma3,
    "infer.models.gemma3:Gemma3",
    "text models; sliding and global layers, two RoPE tables, final soft-capping",
)
# The supported architectures by their name in `config.json`.
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "Llama 2, 3.x", families.read_llama, _DECODER, "RoPE scaling, biases, tied or untied"
    ),
    "MistralForCausalLM": Architecture(
        "Mistral (dense)", families.read_mistral, _DECODER, "sliding window"
    ),
    "Qwen2ForCausalLM": Architecture(
        "Qwen2, Qwen2.5", families.read_qwen2, _DECODER, "q/k/v biases, sliding window"
    ),
    "Qwen3ForCausalLM": Architecture(
        "Qwen3 (dense)", families.read_qwen3, _DECODER, "q/k norm, sliding window"
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GPT2LMHeadModel": Architecture(
        "GPT-2",
        families.read_gpt2,
        "infer.models.gpt2:GPT2",
        "learned positions; no chat template",
        has_learned_positions=True,
    ),
}


MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
}
"""The architecture that a config without `architectures` means, by its `model_type`."""


def find_architecture(name: str) -> Architecture:
    """The row of an architecture; an unknown name is a `LoadError` that lists the known ones."""
    if name not in ARCHITECTURES:
        raise LoadError(
            f"architecture {name!r:.80} is not supported; supported:"
            f" {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def read_model_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`; `LoadError` lists everything unsupported in it."""
    path = folder / "config.json"
    return parse_model_config(load_json(path), str(path))


def parse_model_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The config that the fields of a `config.json` describe.

    `LoadError` lists everything in it that is wrong or not supported, after the prefix `where`.
    """
    names = raw.get("architectures")
    if isinstance(names, str):
        names = [names]
    if not names and isinstance(kind := raw.get("model_type"), str) and kind in MODEL_TYPES:
        names = [MODEL_TYPES[kind]]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise LoadError(f"{where}: architectures must name one architecture, not {names!r:.200}")
    name = names[0].strip()
    name = next((each for each in ARCHITECTURES if each.lower() == name.lower()), name)
    row = find_architecture(name)
    reader = ConfigReader(raw, where)
    if raw.get("quantization_config"):
        reader.problems.append("quantization_config: quantised checkpoints are not supported")
    config = row.read(name, reader)
    reader.finish()
    return config
