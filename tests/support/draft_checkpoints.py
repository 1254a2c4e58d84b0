"""Draft models for tests: the first layers of the shipped model, and copies that differ from it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from infer.models.hub import SHIPPED_FOLDER


def write_first_layers(folder: Path, num_layers: int, *, vocab_size: int | None = None) -> Path:
    """The shipped model with its first layers only; all of them: a model that always agrees.

    `vocab_size`: number of rows of its embedding, of which rows are cut or zeros are appended.
    """
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SHIPPED_FOLDER / name, folder)
    config = json.loads((SHIPPED_FOLDER / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    tensors = load_file(SHIPPED_FOLDER / "model.safetensors")
    kept = {}
    for name, tensor in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < num_layers:
            kept[name] = tensor
    if vocab_size is not None:
        (name,) = (name for name in kept if "embed" in name)
        rows = kept[name].new_zeros(vocab_size, kept[name].shape[1])
        num = min(vocab_size, len(kept[name]))
        rows[:num] = kept[name][:num]
        kept[name], config["vocab_size"] = rows, vocab_size
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_other_vocabulary(folder: Path) -> Path:
    """The shipped model's first layer, with two words of the vocabulary exchanged."""
    write_first_layers(folder, 1)
    path = folder / "tokenizer.json"
    text = json.loads(path.read_text(encoding="utf-8"))
    vocab = text["model"]["vocab"]
    first, second = (word for word, token_id in vocab.items() if token_id in (100, 200))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(text), encoding="utf-8")
    return folder
