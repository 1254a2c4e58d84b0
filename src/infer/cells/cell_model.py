"""`CellModel`: a loaded model, from which contexts are made; `load_model` loads one.

This is the composition root of `infer.cells`, as `engine.build.assemble` is that of the engine: it
names the storage and the attention backends. A model is loaded once and may have several contexts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import infer.engine.build.hardware as machine
import infer.main_memory as main_memory
from infer.attention.cpu import NativeBackend, obstacle, threads_for
from infer.attention.layout import AttentionBackend
from infer.attention.sdpa import SDPABackend
from infer.config import EngineConfig
from infer.engine.build.checkpoint import (
    Checkpoint,
    chosen_blocks,
    find_checkpoint,
    text_of,
    verified,
)
from infer.engine.build.memory_plan import MemoryPlan, make_plan
from infer.errors import ConfigError
from infer.files import reading
from infer.main_memory import gib
from infer.models.model import Model, build_model
from infer.models.model_config import ModelConfig
from infer.models.registry import find_architecture
from infer.runner.kv_storage import KVStorage
from infer.text.tokenizer import Tokenizer

SAMPLES_PER_TENSOR = 64
"""Number of weights of each tensor that a model's fingerprint covers."""
SETTINGS = (
    "model", "revision", "dtype", "quantization", "max_seq_len", "load_format", "num_threads",
    "attention_backend", "chat_template",
)  # fmt: skip
"""Fields of `EngineConfig` that `load_model` takes."""


@dataclass(frozen=True, slots=True, eq=False)
class CellModel:
    """A model in memory, and what contexts need of it."""

    model: Model
    """The decoder."""
    name: str
    """Name of the checkpoint."""
    fingerprint: str
    """Hash of the configuration and of a sample of every weight, in hexadecimal."""
    dtype: torch.dtype
    """Dtype of activations, keys and values."""
    max_seq_len: int
    """Number of positions."""
    settings: EngineConfig
    """Settings that it was loaded with."""
    checkpoint: Checkpoint
    """Files that it was loaded from."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape and options."""
        return self.model.config

    @property
    def has_learned_positions(self) -> bool:
        """Whether positions are part of the embeddings, so that keys cannot be rotated."""
        return find_architecture(self.config.architecture).has_learned_positions

    def tokenizer(self) -> Tokenizer:
        """Read the checkpoint's tokenizer."""
        return Tokenizer(text_of(self.checkpoint, self.settings))

    def plan(self, num_cells: int, max_seqs: int, n_ubatch: int) -> MemoryPlan:
        """The memory plan of a context; the free memory is what this model's weights leave."""
        settings = dataclasses.replace(
            self.settings,
            page_size=1,
            kv_cache_pages=num_cells,
            max_seq_len=min(num_cells, self.max_seq_len),
            max_batch_size=max_seqs,
            max_num_batched_tokens=n_ubatch,
        )
        free = machine.free_bytes(torch.device("cpu"))
        blocks = chosen_blocks(settings, self.checkpoint, torch.device("cpu"))
        first = make_plan(settings, self.config, self.name, blocks=blocks, free=free)
        free += first.weight_bytes
        return make_plan(settings, self.config, self.name, blocks=blocks, free=free)

    def storage(self, num_cells: int) -> KVStorage:
        """A storage of `num_cells` pages of one cell, and page 0."""
        cpu = torch.device("cpu")
        return KVStorage(self.config, num_cells + 1, 1, dtype=self.dtype, device=cpu)

    def backend(self, storage: KVStorage, windows: Sequence[int | None]) -> AttentionBackend:
        """The fastest attention over a storage; `windows`: of each layer.

        Raises `ConfigError` if the settings ask for the native one and it is not possible.
        """
        config, cache = self.config, storage.keys[0]
        reason = obstacle(config.head_dim, cache.dtype, cache.device, cache.shape[1])
        wanted = self.settings.attention_backend
        if wanted == "native" and reason:
            message = f"'native' is not possible: {reason}; use 'auto'"
            raise ConfigError("attention_backend", message)
        kind = SDPABackend if wanted == "sdpa" or reason else NativeBackend
        arguments = config.attention()
        arguments["windows"] = list(windows)
        return kind(storage.keys, storage.values, **arguments)

    def threads(self, attention: AttentionBackend) -> AbstractContextManager[None]:
        """A context for forward passes: whether torch or the kernels have the threads."""
        return threads_for(self.model, attention) or nullcontext()


def load_model(model: str | None = None, **settings: Any) -> CellModel:
    """Load a checkpoint for contexts: a folder, GGUF file, package:NAME or hub id; None: the one
    that ships.

    `settings`: those of `SETTINGS`, as in `EngineConfig`. Raises `LoadError` for a checkpoint that
    cannot be read, `ConfigError` for a setting that is not possible.
    """
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise ConfigError(unknown[0], f"is not a setting of a model; known: {', '.join(SETTINGS)}")
    if settings.get("attention_backend") == "triton":
        raise ConfigError("attention_backend", "'triton' is not possible: contexts are on CPUs")
    config = EngineConfig(model=model, device="cpu", **settings)
    main_memory.keep_freed_memory()
    checkpoint = find_checkpoint(
        model, revision=config.revision, dummy=config.load_format == "dummy"
    )
    device = torch.device("cpu")
    dtype = machine.choose_dtype(config, checkpoint.config, device)
    limit = checkpoint.config.max_seq_len
    if config.max_seq_len is not None and config.max_seq_len > limit:
        message = f"{config.max_seq_len} exceeds the model's own limit {limit}"
        raise ConfigError("max_seq_len", message)
    torch.set_num_threads(config.num_threads or machine.default_threads())
    digest = hashlib.sha256(repr(checkpoint.config).encode())

    def note(name: str, tensor: Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLES_PER_TENSOR)][:SAMPLES_PER_TENSOR]
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.float().numpy().tobytes())

    with reading(f"the weights of {checkpoint.name}"), verified(checkpoint):
        blocks = chosen_blocks(config, checkpoint, device)
        source = checkpoint.source(dtype, device)
        source = source.with_layers(config.weight_format, blocks=blocks.read if blocks else None)
        built = build_model(checkpoint.config, source.noted(note), config.max_seq_len or limit)
    return CellModel(
        model=built,
        name=checkpoint.name,
        fingerprint=digest.hexdigest(),
        dtype=dtype,
        max_seq_len=config.max_seq_len or limit,
        settings=config,
        checkpoint=checkpoint,
    )


def check_memory(model: CellModel, num_cells: int, max_seqs: int, n_ubatch: int) -> None:
    """Raise `ConfigError` with the plan's table if a context does not fit into memory."""
    plan = model.plan(num_cells, max_seqs, n_ubatch)
    need = plan.weight_bytes + plan.activation_bytes + plan.kv_bytes
    if need > plan.free_bytes:
        left = plan.free_bytes - plan.weight_bytes - plan.activation_bytes
        fit = max(0, left // plan.kv_bytes_per_token - 1)
        raise ConfigError(
            "num_cells",
            f"{num_cells:,} cells take {gib(plan.kv_bytes)}; there is room for {fit:,}; the plan"
            f" was\n{plan}",
        )
