"""Tests of checkpoints whose tensor names differ from those that transformers writes today."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.models.model import build_model
from infer.models.registry import read_model_config
from infer.models.weights import open_checkpoint
from tests.support.checkpoints import write_checkpoint
from tests.support.model_shapes import LONGROPE
from tests.support.parity import Bench, deviation, reference, tokens_of

TOKENS = tokens_of(60)


def rename(folder: Path, new_name: Callable[[str], str], **extra: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {new_name(name): tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, **extra}, path)


def assert_same(folder: Path, theirs: Any) -> None:
    bench = Bench(folder)
    (ours,) = bench.step((bench.sequence(TOKENS), len(TOKENS)))
    assert deviation(ours, reference(theirs, TOKENS)) <= 2e-4


@pytest.mark.parametrize(
    ("prefix", "vision"),
    [
        ("language_model.model.", "vision_tower.x.weight"),
        ("model.language_model.", "model.vision_tower.x.weight"),
    ],
)
def test_the_text_part_of_a_multimodal_gemma3(tmp_path: Path, prefix: str, vision: str) -> None:
    theirs = write_checkpoint(tmp_path, "gemma3")
    rename(
        tmp_path, lambda name: prefix + name.removeprefix("model."), **{vision: torch.ones(2, 2)}
    )
    text = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": text.pop("dtype"),
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert_same(tmp_path, theirs)


def test_a_qwen2_vl_with_the_names_and_fields_of_the_hub(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The decoder has no prefix, and the outer config has the text's fields."""
    theirs = write_checkpoint(tmp_path, "qwen2_5_vl")
    rename(
        tmp_path,
        lambda name: name.replace("model.language_model.", "model.").replace(
            "model.visual.", "visual."
        ),
    )
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    text = raw.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps({**text, **raw}), encoding="utf-8")
    with caplog.at_level("INFO"):
        assert_same(tmp_path, theirs)
    lines = [each for each in caplog.messages if "its text part is loaded" in each]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("max_seq_len", "words", "first"), [(64, "of up to 64", 1.25), (65, "beyond 64", 2.5)]
)
def test_the_context_chooses_the_factors_of_longrope(
    max_seq_len: int, words: str, first: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for all sequences: one that grows past the original context keeps its keys."""
    rope = {**LONGROPE, "short_factor": [1.25] * 6, "long_factor": [2.5] * 6}
    write_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    source = open_checkpoint(tmp_path, torch.float32, torch.device("cpu"))
    with caplog.at_level("INFO"):
        model = build_model(read_model_config(tmp_path), source, max_seq_len)
    assert model.config.rope.frequency_divisors == (first,) * 6
    assert f"contexts {words} tokens" in caplog.text


def test_gpt2_as_it_is_on_the_hub(tmp_path: Path) -> None:
    """The names have no prefix, and the causal masks are stored too."""
    theirs = write_checkpoint(tmp_path, "gpt2")
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(3)}
    rename(tmp_path, lambda name: name.removeprefix("transformer."), **masks)
    assert_same(tmp_path, theirs)


def test_a_llama_with_stored_rope_frequencies_and_a_stored_tied_head(tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, tie_word_embeddings=True)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": head,
    }
    rename(tmp_path, lambda name: name, **extra)
    assert_same(tmp_path, theirs)
