"""`Checkpoint`: configuration, text files and weights of a model on disk, in either file format

A checkpoint is a folder in Hugging Face's layout or a single GGUF file, given by a local path, an
installed package or a hub id; later code does not distinguish them. Opening reads the configuration
only; text files and weights are read on demand. Used by `engine.build.assemble`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infer.config import EngineConfig
from infer.errors import ConfigError, LoadError
from infer.extras import to_install
from infer.files import MAX_CONFIG_BYTES, read_text, reading
from infer.kernels.native import native_obstacle
from infer.models.gguf_file import GGUFFile
from infer.models.hub import SHIPPED_FOLDER, locate, verify
from infer.models.model_config import ModelConfig
from infer.models.registry import UnknownArchitecture, read_model_config
from infer.models.weights import BlockReader, WeightSource, dummy_source, open_checkpoint
from infer.text.checkpoint_text import TextFiles, read_defaults, read_text_files
from infer.text.generation_config import FILE, defaults_of_gguf
from infer.text.gguf_vocab import text_files
from infer.text.untrusted.pattern_trial import try_patterns
from infer.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults

if TYPE_CHECKING:
    import torch

    from infer.engine.build.processors import Cpu
    from infer.models.model import Model
    from infer.models.quantized_source import QuantizedFiles


@dataclass(frozen=True, slots=True)
class CheckpointBlocks:
    """Weights that linear layers can hold in the blocks of their file."""

    kinds: tuple[str, ...]
    """Types of the blocks, most numbers first."""
    read: BlockReader
    """Reads weights in blocks."""
    plan: BlockReader
    """Gives their types and shapes only."""
    is_near_int4: bool
    """Whether int4 would hardly be smaller."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: its name, its configuration, and functions that load the other parts."""

    name: str
    config: ModelConfig
    text: Callable[[], TextFiles]
    """Reads tokenizer and chat templates."""
    defaults: Callable[[], SamplingDefaults]
    """Reads what it says about requests that leave out fields."""
    source: Callable[[torch.dtype, torch.device], WeightSource]
    """Opens the weights, as tensors of a dtype on a device."""
    blocks: CheckpointBlocks | None = None
    """The forms in which quantised weights are kept; None: there are none."""
    verify: Callable[[], None] = lambda: None
    """Reads the weights' files and raises `LoadError` if one has another checksum than is listed.
    """
    borrowed: Callable[[torch.dtype], Model] | None = None
    """Loads the model as transformers computes it, in a dtype; None: it is one of our own."""


def find_checkpoint(
    model: str | None,
    *,
    revision: str | None = None,
    dummy: bool = False,
    model_impl: str = "auto",
) -> Checkpoint:
    """Find the checkpoint that `model` names, as `models.hub.locate` has it.

    `dummy` gives it random weights. `model_impl`: as in `EngineConfig`. Raises `LoadError` if there
    is no such checkpoint.
    """
    path, name = locate(model, revision=revision)
    try:
        with reading(str(path)):
            if model_impl == "transformers":
                checkpoint = _borrowed(path, name)
            else:
                checkpoint = _open(path, name, dummy)
    except LoadError as error:
        verify(model)  # a damaged download is said to be one
        is_other = isinstance(error, UnknownArchitecture) and error.is_causal
        if is_other and model_impl == "auto" and not path.is_file():
            raise LoadError(f"{error}; {_other_way()}") from None
        raise
    return dataclasses.replace(checkpoint, verify=functools.partial(verify, model))


def _other_way() -> str:
    """How a model without a decoder of our own may be loaded, for users."""
    way = "--model-impl transformers loads causal models of attention layers the slow way"
    if importlib.util.find_spec("transformers") is None:
        return f"{way}, with an optional part of infer: {to_install('transformers')}"
    return way


def _borrowed(path: Path, name: str) -> Checkpoint:
    """The checkpoint in a folder, as transformers computes it."""
    from infer.models.transformers_model import load_transformers_model, read_transformers_config

    if path.is_file():
        raise ConfigError(
            "model_impl", f"'transformers' reads folders, and {path.name} is a file; leave it out"
        )
    config = read_transformers_config(path)
    return Checkpoint(
        name,
        config,
        text=lambda: read_text_files(path),
        defaults=lambda: read_defaults(path),
        source=functools.partial(open_checkpoint, path),
        borrowed=lambda dtype: load_transformers_model(path, config, dtype),
    )


def _open(path: Path, name: str, dummy: bool) -> Checkpoint:
    if path.is_file():
        file = GGUFFile(path)
        kinds = () if dummy else tuple(file.block_kinds)
        return Checkpoint(
            name,
            file.config,
            text=lambda: text_files(file.metadata, str(path)),
            defaults=lambda: defaults_of_gguf(file.metadata),
            source=dummy_source if dummy else file.source,
            blocks=_blocks_of(file, kinds),
        )
    # With random weights any tokenizer will do, so a folder without one gets the shipped one.
    borrows = dummy and not (path / "tokenizer.json").is_file()
    config = read_model_config(path)
    quantized = None
    if config.quantization is not None and not dummy:
        from infer.models.quantized_source import QuantizedFiles  # this imports torch

        quantized = QuantizedFiles(path, config, config.quantization)
    opened = functools.partial(open_checkpoint, path)
    source = opened if quantized is None else quantized.source
    return Checkpoint(
        name,
        config,
        text=lambda: read_text_files(SHIPPED_FOLDER if borrows else path),
        defaults=lambda: read_defaults(path),
        source=dummy_source if dummy else source,
        blocks=None if quantized is None else _blocks_of(quantized, quantized.kinds),
    )


def _blocks_of(files: GGUFFile | QuantizedFiles, kinds: tuple[str, ...]) -> CheckpointBlocks | None:
    if not kinds:
        return None
    readers = files.block_reader(), files.block_reader(planned=True)
    return CheckpointBlocks(kinds, *readers, files.is_near_int4)


@contextlib.contextmanager
def verified(checkpoint: Checkpoint) -> Iterator[None]:
    """A block in which a checkpoint is loaded, while a thread reads its files and compares their
    checksums. At its end `LoadError` if one differs, whatever the block has raised itself: a
    damaged download is said to be one."""
    with ThreadPoolExecutor(1, "infer-verify") as pool:
        verifying = pool.submit(checkpoint.verify)
        try:
            yield
        finally:
            verifying.result()


def chosen_blocks(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device | Cpu
) -> CheckpointBlocks | None:
    """The blocks in which the linear layers hold their weights.

    None: the settings ask for a dtype, the file has none, or there are no kernels for them. With
    int4 blocks are kept that are about as small: rounded a second time, they would lose more than
    they gain.
    """
    blocks = checkpoint.blocks
    if blocks is None or device.type != "cpu" or native_obstacle() is not None:
        return None
    if config.weight_format == "int4":
        return blocks if blocks.is_near_int4 else None
    return blocks if config.dtype == "auto" and config.quantization is None else None


def text_of(checkpoint: Checkpoint, config: EngineConfig) -> TextFiles:
    """The text files of a checkpoint, with the operator's settings (`tool_parser`,
    `reasoning_parser`, `generation_config`, `chat_template`) applied.

    Raises `ConfigError` if a file that such a setting names cannot be read.
    """
    try:
        with reading(f"the tokenizer of {checkpoint.name}"):
            files = dataclasses.replace(
                checkpoint.text(),
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
            )
            try_patterns(files.tokenizer_json)
    except LoadError:
        checkpoint.verify()
        raise
    files = dataclasses.replace(files, sampling=defaults_for(checkpoint, config))
    if config.chat_template is None:
        return files
    path = Path(config.chat_template)
    if not path.is_file():
        raise ConfigError("chat_template", f"there is no file {config.chat_template!r}")
    try:
        template = read_text(path, MAX_CONFIG_BYTES)
    except LoadError as error:
        raise ConfigError("chat_template", str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        message = f"{config.chat_template!r} cannot be read: {reason}"
        raise ConfigError("chat_template", message) from None
    return dataclasses.replace(files, templates={"default": template})


def defaults_for(checkpoint: Checkpoint, config: EngineConfig) -> SamplingDefaults:
    """The defaults of requests: the checkpoint's, or what `generation_config` chooses.

    Raises `LoadError` for a checkpoint's file that cannot be read, `ConfigError` for a chosen one.
    """
    if config.generation_config == "auto":
        return checkpoint.defaults()
    if config.generation_config == "none":
        return NO_DEFAULTS
    folder = Path(config.generation_config)
    try:
        return read_defaults(folder, f"{FILE} of --generation-config", must_exist=True)
    except LoadError as error:
        raise ConfigError("generation_config", str(error)) from None
