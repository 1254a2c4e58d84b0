"""Settings: what a user may choose, checked once, and what the scheduler is told.

`EngineConfig` is the one place where a setting is named, typed, given a default and described;
the command line and `LLM(**kwargs)` are made from it. Every problem is a `ConfigError` that names
the field and says what would be right. `SchedulerConfig` is the resolved part that the integer
side needs; `engine.build.assemble` makes it. Stdlib only.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from infer.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "int4")
QUANTIZATIONS = ("int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
BATCHING_MODES = ("continuous", "static", "sequential")
SCHEDULER_POLICIES = ("fcfs", "prefill_first", "decode_round_robin")
KV_CACHE_BACKENDS = ("paged", "slotted", "contiguous")
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = ("auto", "model", "int8")
ATTENTION_BACKENDS = ("auto", "native", "triton", "sdpa")
TOOL_PARSERS = (
    "hermes", "mistral", "deepseek", "nemotron", "apriel", "functionary-v3.1", "functionary-v3.2",
    "functools", "functiongemma", "gemma4", "json", "pythonic",
)  # fmt: skip
"""The names of `text.tools.formats`."""

DEFAULT_PAGE_SIZE = 16


def option(default: Any, help: str, **limits: Any) -> Any:
    """A field of a class of settings."""
    return field(default=default, metadata={"help": help, **limits})


def check_fields(config: Any) -> None:
    """Raises `ConfigError` if a field made by `option` has a value that it cannot have."""
    for spec in dataclasses.fields(config):
        _check_field(config, spec)


def _check_field(config: Any, spec: dataclasses.Field[Any]) -> None:
    name, value, limits = spec.name, getattr(config, spec.name), spec.metadata
    kinds = str(spec.type)
    if value is None:
        if "None" not in kinds:
            raise ConfigError(name, "must be given")
        return
    if kinds.startswith("str"):
        if not isinstance(value, str):
            raise ConfigError(name, f"must be a string, not {type(value).__name__}")
        is_function = limits.get("or_function") and ":" in value
        if "one_of" in limits and value not in limits["one_of"] and not is_function:
            own = ", or module:function of your own" if limits.get("or_function") else ""
            known = ", ".join(limits["one_of"])
            raise ConfigError(name, f"must be one of {known}{own}; not {value!r}")
    elif kinds.startswith("bool"):
        if not isinstance(value, bool):
            raise ConfigError(name, f"must be True or False, not {value!r}")
    else:
        wanted = int if kinds.startswith("int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind = "an integer" if wanted is int else "a number"
            raise ConfigError(name, f"must be {kind}, not {value!r}")
        if not math.isfinite(value) or value < limits["low"]:
            raise ConfigError(name, f"must be at least {limits['low']}, not {value!r}")


def own_function(field_name: str, value: str) -> Callable[..., Any]:
    """The function that a setting names as `module:function`; `ConfigError` if there is none."""
    try:
        found = resolve_name(value)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{value!r} cannot be imported ({error}); give module:function"
        raise ConfigError(field_name, message) from error
    if not callable(found):
        raise ConfigError(field_name, f"{value!r} is not a function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. Raises `ConfigError` at construction."""

    model: str | None = option(
        None, "Folder of a checkpoint, GGUF file or hub id; default: the model that ships."
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub id; default: main.")
    served_model_name: str | None = option(
        None, "Name of the model in the API; default: the folder's name or the hub id."
    )
    chat_template: str | None = option(
        None, "File of a chat template, in the place of the model's own."
    )
    tool_parser: str | None = option(
        None,
        "Format in which the model writes tool calls; default: as its chat template says.",
        one_of=TOOL_PARSERS,
    )
    dtype: str = option(
        "auto",
        "Weights and computation; auto = the checkpoint's (float32 on CPUs that have no arithmetic"
        " for bfloat16); int8, int4 = as --quantization.",
        one_of=DTYPES,
    )
    quantization: str | None = option(
        None,
        "Linear layers hold int8, or int4 (the head int8), and compute in int8 (CPU); the rest is"
        " bfloat16.",
        one_of=QUANTIZATIONS,
    )
    device: str = option("auto", "auto = cuda where there is one, else cpu.", one_of=DEVICES)
    max_seq_len: int | None = option(
        None, "Longest prompt + output in tokens; default: the model's own limit.", low=1
    )
    max_batch_size: int | None = option(
        None, "Sequences that run at the same time, at most; default: 32, on a GPU 256.", low=1
    )
    max_waiting_requests: int = option(
        256, "Requests that may wait for a seat; further ones are refused (503).", low=0
    )
    seed: int | None = option(
        None,
        "Seeds of requests that bring none are derived from it; default: 0, and for a server one"
        " that the system draws at its start.",
        low=0,
    )
    batching_mode: str = option(
        "continuous", "When waiting requests may join the batch.", one_of=BATCHING_MODES
    )
    scheduler_policy: str = option(
        "fcfs",
        "Who goes first inside a continuous batch; module:function for a policy of your own.",
        one_of=SCHEDULER_POLICIES,
        or_function=True,
    )
    sampler: str = option(
        "default",
        "module:function for a sampler of your own, in the place of runner.sampler:sample (CPU).",
        one_of=("default",),
        or_function=True,
    )
    batch_wait_timeout_s: float = option(
        0.05, "Static mode: how long a batch that is not full waits for more.", low=0.0
    )
    kv_cache_backend: str = option(
        "paged",
        "paged; slotted = one slot of max_seq_len a seat; contiguous = slots freed batch by batch.",
        one_of=KV_CACHE_BACKENDS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Keys and values: model = as computed; int8 = a scale for each head's (CPUs with AMX"
        " or AVX-512-BF16); auto = int8 where layers are quantised and it pays, else model.",
        one_of=KV_CACHE_DTYPES,
    )
    page_size: int | None = option(
        None, f"Tokens a page of the paged cache; default: {DEFAULT_PAGE_SIZE}.", low=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Tokens computed in one step, at most; longer prompts are cut in chunks. Default on a CPU:"
        " 512, and 1,024 while nobody streams if products are fast.",
        low=1,
    )
    max_step_ms: float | None = option(
        None,
        "While streams run, prompts are cut so that a step takes about so long, as measured.",
        low=1.0,
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache; default: chosen from free memory.", low=1
    )
    kv_cache_pages: int | None = option(
        None, "Pages of the KV cache, instead of a size in bytes.", low=1
    )
    load_format: str = option(
        "auto", "dummy = random weights of the config's shape.", one_of=LOAD_FORMATS
    )
    enable_prefix_caching: bool | None = option(
        None, "Share pages between equal prompt beginnings; default: yes if paged."
    )
    num_threads: int | None = option(
        None, "CPU threads; default: the physical cores (less one to serve a small model).", low=1
    )
    attention_backend: str = option(
        "auto",
        "native = the compiled CPU kernel; triton = the kernels for CUDA; sdpa = torch's own;"
        " auto = the first that can be used.",
        one_of=ATTENTION_BACKENDS,
    )
    batch_invariant: bool = option(
        False,
        "On a GPU: a request's tokens do not depend on the batch it runs in, at some cost in speed"
        " (on a CPU they never do).",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.quantization and self.dtype not in ("auto", "bfloat16", self.quantization):
            raise ConfigError(
                "dtype",
                f"{self.dtype!r} does not go with quantization={self.quantization!r}: around the"
                " quantised layers the machine decides what is computed in; leave dtype out",
            )
        if self.kv_cache_backend != "paged":
            if self.page_size is not None:
                raise ConfigError(
                    "page_size",
                    f"kv_cache_backend={self.kv_cache_backend!r} has one page of max_seq_len per"
                    " seat; leave page_size out, or use kv_cache_backend='paged'",
                )
            if self.enable_prefix_caching:
                raise ConfigError(
                    "enable_prefix_caching",
                    f"kv_cache_backend={self.kv_cache_backend!r} cannot share pages;"
                    " use kv_cache_backend='paged'",
                )
        if self.kv_cache_backend == "contiguous" and self.batching_mode == "continuous":
            raise ConfigError(
                "kv_cache_backend",
                "'contiguous' frees its memory batch by batch and so needs batching_mode='static'"
                " (or 'sequential'); for 'continuous' use 'paged' or 'slotted'",
            )
        if self.scheduler_policy != "fcfs" and self.batching_mode != "continuous":
            raise ConfigError(
                "scheduler_policy",
                f"{self.scheduler_policy!r} orders a continuous batch; with"
                f" batching_mode={self.batching_mode!r} only 'fcfs' has a meaning",
            )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Like the constructor, but an unknown name is a `ConfigError` with the nearest one."""
        known = [spec.name for spec in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(name, f"there is no such setting; {hint}")
        return cls(**kwargs)

    @property
    def weight_format(self) -> str | None:
        """The quantization in which linear layers hold their weights; None: the dtype's own."""
        return self.quantization or (self.dtype if self.dtype in QUANTIZATIONS else None)

    @property
    def prefix_caching(self) -> bool:
        """Whether equal prompt beginnings share pages."""
        if self.enable_prefix_caching is None:
            return self.kv_cache_backend == "paged"
        return self.enable_prefix_caching


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know, with every default resolved."""

    max_batch_size: int
    max_num_batched_tokens: int
    max_tokens_beside_streams: int | None = None
    """of a step that a stream waits for; None: as many"""
    max_seq_len: int
    max_waiting_requests: int = 256
    batching_mode: str = "continuous"
    scheduler_policy: str = "fcfs"
    batch_wait_timeout_s: float = 0.05
    max_step_ms: float | None = None
    hold_pages_until_batch_ends: bool = False
    """`kv_cache_backend='contiguous'`: pages of finished members go back with the whole batch"""
