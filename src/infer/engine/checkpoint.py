"""`Checkpoint`: the three parts of a model on disk, whatever it is stored as.

A folder in Hugging Face's layout or a single GGUF file, a local path or a hub id: from here on
nobody asks which. Opening reads configuration only; the text side and the weights are read when
they are asked for. Used by `engine.assemble`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from infer.models.config import ModelConfig
from infer.models.gguf_file import GGUFFile
from infer.models.hub import SHIPPED_FOLDER, locate
from infer.models.registry import read_model_config
from infer.models.weights import WeightSource, dummy_source, open_checkpoint
from infer.text.checkpoint_files import TextFiles, read_text_files
from infer.text.gguf_vocab import text_files


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: what it is called, its shape, how its other parts are loaded."""

    name: str
    config: ModelConfig
    text: Callable[[], TextFiles]
    source: Callable[[torch.dtype, torch.device], WeightSource]


def find_checkpoint(
    model: str | None, *, revision: str | None = None, dummy: bool = False
) -> Checkpoint:
    """The checkpoint that `model` names, `dummy`: with random weights; `LoadError` if none does."""
    path, name = locate(model, revision=revision)
    if path.is_file():
        file = GGUFFile(path)
        return Checkpoint(
            name,
            file.config,
            text=lambda: text_files(file.metadata, str(path)),
            source=dummy_source if dummy else file.source,
        )
    # Random weights speak noise in any vocabulary: a config alone borrows the shipped tokenizer.
    borrows = dummy and not (path / "tokenizer.json").is_file()
    return Checkpoint(
        name,
        read_model_config(path),
        text=lambda: read_text_files(SHIPPED_FOLDER if borrows else path),
        source=dummy_source if dummy else lambda *where: open_checkpoint(path, *where),
    )
