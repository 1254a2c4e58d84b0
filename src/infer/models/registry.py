"""The supported architectures: for each, the reader of its config and its decoder class.

A new family whose equations agree with an existing decoder takes one row here and one function in
`models.families`. The module imports the standard library only: it names the decoder, which is
imported when a model is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infer.errors import LoadError
from infer.models import families, older_families
from infer.models.model_config import ConfigReader, ModelConfig, load_json
from infer.models.quantized_config import read_quantization, with_quantization_file


@dataclass(frozen=True)
class Architecture:
    """One supported architecture."""

    family: str
    """Name of the model family, for users."""
    read: Callable[[str, ConfigReader], ModelConfig]
    """Function that reads the config: (architecture, reader) → config."""
    notes: str
    """Features of the family, for users."""
    model_types: tuple[str, ...] = ()
    """What `model_type` is in configs of the architecture."""
    decoder: str = "infer.models.decoder:Decoder"
    """Class with the equations, as `module:class`."""
    has_learned_positions: bool = False
    """Whether positions are added to the embeddings instead of rotating queries and keys."""


_F, _O = families, older_families
_GEMMA3 = "sliding and global layers with a RoPE each, four norms, scaled embedding, soft-capping"
# The supported architectures by their name in `config.json`.
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "Llama 2, 3.x", _F.read_llama,
        "default, linear, dynamic, llama3 and yarn RoPE; biases; tied or untied", ("llama",),
    ),
    "CwmForCausalLM": Architecture(
        "Code World Model", _F.read_cwm, "as Llama 3; sliding and global layers", ("cwm",)
    ),
    "MistralForCausalLM": Architecture(
        "Mistral (dense)", _F.read_mistral, "`sliding_window` on every layer", ("mistral",)
    ),
    "MinistralForCausalLM": Architecture(
        "Ministral (2024)", _F.read_ministral, "as Mistral, `layer_types`", ("ministral",)
    ),
    "Ministral3ForCausalLM": Architecture(
        "Ministral 3", _F.read_ministral3,
        "yarn RoPE; queries that grow beyond the original context", ("ministral3",),
    ),
    "Mistral3ForConditionalGeneration": Architecture(
        "Mistral Small 3.1, Ministral 3 (text part)",
        _F.text_part(
            {"mistral": _F.read_mistral, "ministral3": _F.read_ministral3}, is_tied=True
        ),
        "as Mistral or Ministral 3", ("mistral3",),
    ),
    "Qwen2ForCausalLM": Architecture(
        "Qwen2, Qwen2.5", _F.read_qwen2,
        "q/k/v biases; `use_sliding_window`, `max_window_layers`, `layer_types`", ("qwen2",),
    ),
    "Qwen2VLForConditionalGeneration": Architecture(
        "Qwen2-VL (text part)",
        _F.text_part({"qwen2_vl_text": _F.read_qwen2_vl, "qwen2_vl": _F.read_qwen2_vl}),
        "as Qwen2", ("qwen2_vl",),
    ),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        "Qwen2.5-VL (text part)",
        _F.text_part({"qwen2_5_vl_text": _F.read_qwen2_vl, "qwen2_5_vl": _F.read_qwen2_vl}),
        "as Qwen2", ("qwen2_5_vl",),
    ),
    "Qwen3ForCausalLM": Architecture(
        "Qwen3 (dense)", _F.read_qwen3,
        "q/k norm, `head_dim` of its own, windows as Qwen2", ("qwen3",),
    ),
    "Qwen3VLForConditionalGeneration": Architecture(
        "Qwen3-VL (dense, text part)", _F.text_part({"qwen3_vl_text": _F.read_qwen3_vl}),
        "as Qwen3", ("qwen3_vl",),
    ),
    "Gemma3ForCausalLM": Architecture(
        "Gemma 3", _F.read_gemma3, _GEMMA3, ("gemma3_text",)
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        "Gemma 3 (text part)", _F.text_part({"gemma3_text": _F.read_gemma3}, is_tied=True),
        "as Gemma 3", ("gemma3",),
    ),
    "SmolLM3ForCausalLM": Architecture(
        "SmolLM3", _F.read_smollm3, "layers without RoPE, sliding window", ("smollm3",)
    ),
    "Phi3ForCausalLM": Architecture(
        "Phi-3, Phi-4", _F.read_phi3,
        "part of each head rotates; longrope, chosen by the server's context; sliding window",
        ("phi3",),
    ),
    "SeedOssForCausalLM": Architecture(
        "Seed-OSS", _F.read_seed_oss, "a switch for each kind of bias", ("seed_oss",)
    ),
    "GraniteForCausalLM": Architecture(
        "Granite 3 (dense)", _F.read_granite,
        "multipliers of embeddings, residuals, attention scores and logits", ("granite",),
    ),
    "GraniteSWAForCausalLM": Architecture(
        "Granite with windows (SWAsh)", _F.read_granite_swa,
        "as Granite 3; sliding and global layers, attention sinks, a RoPE for each layer",
        ("granite_swa",),
    ),
    "HyperCLOVAXForCausalLM": Architecture(
        "HyperCLOVA X", _F.read_hyperclovax, "as Granite 3, with norms behind the blocks",
        ("hyperclovax",),
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "Granite 4 (dense, attention layers only)", _F.read_granite_hybrid,
        "as Granite 3; with or without RoPE", ("granitemoehybrid",),
    ),
    "OlmoForCausalLM": Architecture(
        "OLMo 1", _F.read_olmo, "norms without weights, `clip_qkv`", ("olmo",)
    ),
    "Olmo2ForCausalLM": Architecture(
        "OLMo 2", _F.read_olmo2, "norms behind the blocks and over all heads", ("olmo2",)
    ),
    "Olmo3ForCausalLM": Architecture(
        "OLMo 3", _F.read_olmo3, "as OLMo 2; sliding and global layers with a RoPE each",
        ("olmo3",),
    ),
    "GlmForCausalLM": Architecture(
        "GLM-4 (2024)", _F.read_glm, "half of each head rotates, in pairs", ("glm",)
    ),
    "Glm4ForCausalLM": Architecture(
        "GLM-4 (2025)", _F.read_glm4, "as GLM-4 of 2024, with norms behind the blocks", ("glm4",)
    ),
    "Exaone4ForCausalLM": Architecture(
        "EXAONE 4", _F.read_exaone4,
        "norms behind the blocks, q/k norm, global layers without RoPE", ("exaone4",),
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "Ernie 4.5 (dense)", _F.read_ernie, "rotation in pairs, `use_bias`", ("ernie4_5",)
    ),
    "HeliumForCausalLM": Architecture(
        "Helium 1", _F.read_helium, "rotation in pairs; biases", ("helium",)
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "HunYuan (dense)", _F.read_hunyuan, "q/k norm behind the rotation, `alpha` of RoPE",
        ("hunyuan_v1_dense",),
    ),
    "GemmaForCausalLM": Architecture(
        "Gemma 1", _F.read_gemma, "scaled embedding, norms of 1 + w", ("gemma",)
    ),
    "Gemma2ForCausalLM": Architecture(
        "Gemma 2", _F.read_gemma2,
        "sliding and global layers, four norms, scaled embedding, soft caps of scores and logits",
        ("gemma2",),
    ),
    "VaultGemmaForCausalLM": Architecture(
        "VaultGemma", _F.read_vaultgemma, "as Gemma 2, without the norms behind the blocks",
        ("vaultgemma",),
    ),
    "CohereForCausalLM": Architecture(
        "Command R", _F.read_cohere,
        "parallel blocks, LayerNorm, rotation in pairs, `use_qk_norm`, `logit_scale`", ("cohere",),
    ),
    "Cohere2ForCausalLM": Architecture(
        "Command R7B, Command A", _F.read_cohere2,
        "as Command R; sliding layers, and global ones without RoPE", ("cohere2",),
    ),
    "StableLmForCausalLM": Architecture(
        "StableLM", _F.read_stablelm,
        "LayerNorm, part of each head rotates, `use_parallel_residual`", ("stablelm",),
    ),
    "Starcoder2ForCausalLM": Architecture(
        "StarCoder2", _F.read_starcoder2, "LayerNorm, biases, no gate, sliding window",
        ("starcoder2",),
    ),
    "ArceeForCausalLM": Architecture(
        "Arcee AFM", _F.read_arcee, "squared ReLU without a gate", ("arcee",)
    ),
    "NemotronForCausalLM": Architecture(
        "Nemotron 3, 4, Minitron", _F.read_nemotron,
        "LayerNorm of 1 + w, squared ReLU without a gate, part of each head rotates",
        ("nemotron",),
    ),
    "Jais2ForCausalLM": Architecture(
        "Jais 2", _F.read_jais2, "LayerNorm, biases, squared ReLU without a gate", ("jais2",)
    ),
    "ApertusForCausalLM": Architecture(
        "Apertus", _F.read_apertus, "xIELU without a gate, q/k norm", ("apertus",)
    ),
    "GPT2LMHeadModel": Architecture(
        "GPT-2", _O.read_gpt2,
        "learned positions, fused projections; no chat template, so `/v1/completions` only",
        ("gpt2",), has_learned_positions=True,
    ),
    "GPTBigCodeForCausalLM": Architecture(
        "StarCoder 1, SantaCoder", _O.read_bigcode, "as GPT-2, with `multi_query`",
        ("gpt_bigcode",), has_learned_positions=True,
    ),
    "GPTNeoForCausalLM": Architecture(
        "GPT-Neo", _O.read_gpt_neo, "as GPT-2, with windows in every other layer", ("gpt_neo",),
        has_learned_positions=True,
    ),
    "GPTJForCausalLM": Architecture(
        "GPT-J", _O.read_gptj, "parallel blocks, rotation of pairs in part of each head", ("gptj",)
    ),
    "GPTNeoXForCausalLM": Architecture(
        "GPT-NeoX, Pythia", _O.read_neox, "parallel blocks, part of each head rotates",
        ("gpt_neox",),
    ),
    "PhiForCausalLM": Architecture(
        "Phi-1, Phi-2", _O.read_phi, "parallel blocks, part of each head rotates, head with a bias",
        ("phi",),
    ),
    "FalconForCausalLM": Architecture(
        "Falcon 1, 2", _O.read_falcon,
        "parallel blocks with one norm or two, `multi_query`, `new_decoder_architecture`; ALiBi",
        ("falcon",),
    ),
    "BloomForCausalLM": Architecture(
        "Bloom", _O.read_bloom, "ALiBi, norm of the embeddings", ("bloom",)
    ),
    "MptForCausalLM": Architecture(
        "MPT", _O.read_mpt, "ALiBi, `clip_qkv`, `softmax_scale`", ("mpt",)
    ),
    "OPTForCausalLM": Architecture(
        "OPT (norms before the blocks)", _O.read_opt, "learned positions, ReLU", ("opt",),
        has_learned_positions=True,
    ),
}  # fmt: skip


MODEL_TYPES: Mapping[str, str] = {
    kind: name for name, row in ARCHITECTURES.items() for kind in row.model_types
}
"""The architecture that a config without `architectures` means, by its `model_type`."""


_NEEDS: Mapping[str, tuple[str, ...]] = {
    "an encoder": ("Bert", "Electra", "T5", "Bart", "Whisper", "Marian", "Pegasus", "M2M100"),
    "a head for classes or tokens": ("ForSequenceClassification", "ForTokenClassification"),
    "latent attention": ("Deepseek", "MiniCPM3", "MoeLite", "Mistral4", "Kimi"),
    "layers of different shapes": ("Gemma4", "Gemma3n", "OpenELM", "DeciLM"),
    "a mixture of experts": (
        *("Moe", "MoE", "Mixtral", "GptOss", "Llama4", "Dbrx", "Deepseek", "Grok", "MiniMax"),
        *("Kimi", "Jamba", "Gemma4"),
    ),
    "a recurrent state": (
        *("Mamba", "Jamba", "Bamba", "Zamba", "FalconH1", "NemotronH", "Lfm", "Qwen3Next"),
        *("Qwen3_5", "Rwkv", "RWKV", "RecurrentGemma", "KimiLinear", "xLSTM", "Hybrid"),
    ),
}
"""What families that are not supported would need → parts of their architectures' names."""

_NO_CAUSAL_ATTENTION = frozenset(
    ("an encoder", "a head for classes or tokens", "a recurrent state")
)
"""The needs that no model has which is all causal attention."""


class UnknownArchitecture(LoadError):
    """The engine has no decoder of this architecture."""

    def __init__(self, message: str, is_causal: bool) -> None:
        """`is_causal`: whether it may be a causal model whose layers are all attention."""
        super().__init__(message)
        self.is_causal = is_causal


def find_architecture(name: str) -> Architecture:
    """The row of an architecture.

    An unknown name is an `UnknownArchitecture`, which says what the family would need, and what is
    near."""
    if name not in ARCHITECTURES:
        needs = [what for what, parts in _NEEDS.items() if any(part in name for part in parts)]
        why = f": it needs {' and '.join(needs)}, which the engine does not have" if needs else ""
        near = difflib.get_close_matches(name[:80], ARCHITECTURES, cutoff=0.75)
        also = f"near it: {', '.join(near)}; " if near else ""
        raise UnknownArchitecture(
            f"architecture {name!r:.80} is not supported{why} ({also}`infer models` lists the"
            f" {len(ARCHITECTURES)} that are)",
            is_causal=not _NO_CAUSAL_ATTENTION.intersection(needs),
        )
    return ARCHITECTURES[name]


def read_model_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`; `LoadError` lists everything unsupported in it."""
    path = folder / "config.json"
    return parse_model_config(with_quantization_file(folder, load_json(path)), str(path))


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
    name = next((known for known in ARCHITECTURES if known.lower() == name.lower()), name)
    row = find_architecture(name)
    reader = ConfigReader(raw, where)
    quantization = read_quantization(raw, reader.problems)
    config = row.read(name, reader)
    reader.finish()
    return config if quantization is None else replace(config, quantization=quantization)
