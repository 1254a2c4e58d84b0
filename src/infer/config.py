"""Settings: `EngineConfig`, what a user may choose, and `SchedulerConfig`, what the scheduler gets.

`EngineConfig` is the one place where a setting is named, typed, given a default and described. The
command line and `LLM(**kwargs)` are made from it. The limits of a value are part of its type, and
msgspec holds values to them. Every problem is a `ConfigError` that names the field and says what
would be right. `SchedulerConfig` is the resolved part that the scheduler needs;
`engine.build.assemble` makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, inspect

from infer.errors import ConfigError

BatchingMode = Literal["continuous", "static", "sequential"]
StaticOrder = Literal["arrival", "prompt_length"]
Quantization = Literal["int8", "int4"]
ToolParser = Literal[
    "hermes", "mistral", "deepseek", "nemotron", "apriel", "functionary-v3.1",
    "functionary-v3.2", "functools", "functiongemma", "gemma4", "seed-oss", "qwen3-coder",
    "glm", "hunyuan", "hunyuan-v3", "minimax-m2", "minimax-m3", "deepseek-v3.2", "deepseek-v4",
    "minicpm5", "muse", "kimi-k3", "harmony", "kimi-k2", "solar", "apertus", "command-a",
    "phi4", "gigachat", "lfm2", "olmo3", "llama4", "json", "pythonic",
]  # fmt: skip
"""The names of `text.tools.formats`."""
ReasoningParser = Literal[
    "none", "think", "mistral", "seed-oss", "minimax-m3", "hunyuan-v3", "kimi-vl", "command-a",
    "apertus", "gemma4", "kimi-k3", "harmony", "deepseek-r1",
]  # fmt: skip
"""The names of the marks of reasoning in `text.tools.formats`."""
BATCHING_MODES: tuple[str, ...] = get_args(BatchingMode)
STATIC_ORDERS: tuple[str, ...] = get_args(StaticOrder)
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
TOOL_PARSERS: tuple[str, ...] = get_args(ToolParser)
REASONING_PARSERS: tuple[str, ...] = get_args(ReasoningParser)
SCHEDULER_POLICIES = (
    "fcfs",
    "prefill_first",
    "decode_round_robin",
)
MAX_COUNT = 2**50
"""Maximum of any count and any size in bytes: a pebibyte."""
MAX_SECONDS = 1e9
"""Maximum of any time in seconds and any other number: 30 years; what waits takes no longer time.
"""
MAX_SEED = 2**63 - 1
MAX_THREADS = 4096
"""Maximum of the threads of an engine; no machine has so many cores."""
MAX_REPLICAS = 64
"""Maximum of the engines of one server."""
MAX_FRONTS = 64
"""Maximum of the processes of one server that answer HTTP."""
PositiveInt = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=MAX_COUNT)]

DEFAULT_PAGE_SIZE = 16
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
SHIPPED_NAME = "infer-demo"
"""Name under which the model that ships is served."""


def option(
    default: Any,
    help: str,
    *,
    secret: str = "",
    is_live: bool = False,
    is_common: bool = False,
    is_repeatable: bool = False,
) -> Any:
    """A field of a settings class, with the help text of its command-line option. `secret`,
    `is_live`, `is_common`, `is_repeatable`: see `Setting`."""
    more = {"secret": secret, "is_live": is_live, "is_common": is_common}
    return field(default=default, metadata={"help": help, "is_repeatable": is_repeatable, **more})


def at_least(low: float) -> Meta:
    """The limits of a number that is not below `low`; see `MAX_SECONDS`."""
    return Meta(ge=low, le=MAX_SECONDS)


def name_or_function(*names: str) -> Meta:
    """The limits of a string that is one of `names` or a `module:function`."""
    return name_or_pattern(":", "module:function of your own", *names)


def name_or_pattern(pattern: str, description: str, *names: str) -> Meta:
    """The limits of a string that is one of `names` or has a match of `pattern`."""
    any_of = f"^({'|'.join(names)})$|{pattern}"
    return Meta(pattern=any_of, examples=list(names), description=description)


JSONObject = Annotated[str, name_or_pattern(r"^\s*[{]", "a JSON object")] | dict[str, Any]
"""The type of a setting that is a JSON object: its text, as on a command line, or a mapping."""


class Setting(NamedTuple):
    """A field of a settings class, as `check_fields` and the command line need it."""

    name: str
    default: Any
    help: str
    annotation: Any
    """The field's type with its limits, as msgspec takes it; without mappings."""
    kind: type[bool | int | float | str]
    """The field's type without its limits and without None."""
    names: tuple[str, ...]
    """The allowed strings; empty where every value of the kind is allowed."""
    or_else: str
    """Description of the strings that are allowed in addition to `names`; empty if none are."""
    takes_mapping: bool
    """Whether the string is a JSON object, which may also be given as a mapping."""
    low: float | None
    """The smallest allowed number; None where there is no limit."""
    high: float | None
    """The largest allowed number; None where there is no limit."""
    secret: str
    """A pattern whose first group is what nobody may see of a value; empty where all is shown."""
    is_live: bool
    """Whether a running server can take a new value (SIGHUP)."""
    is_common: bool
    """Whether many people choose it, so that `--help` shows it; the others need `--help-all`."""
    is_repeatable: bool
    """Whether the string may be several, separated by commas: several flags, a list in a file."""

    def from_text(self, text: str) -> Any:
        """The value that a text means, as on a command line or in a variable; raises
        `ConfigError`."""
        if self.kind is str:
            return text
        if self.kind is bool:
            if text.lower() not in _WORDS:
                raise ConfigError(self.name, f"must be true or false, not {text!r:.80}")
            return _WORDS[text.lower()]
        try:
            return self.kind(text)
        except ValueError:
            raise ConfigError(self.name, self.problem(text)) from None

    def shown(self, value: Any) -> Any:
        """The value for everybody's eyes: without its secret, JSON as the mapping that it is."""
        if self.takes_mapping and isinstance(value, str):
            with contextlib.suppress(ValueError):
                return json.loads(value)
        if not self.secret or not isinstance(value, str):
            return value
        return re.sub(self.secret, lambda match: match[0].replace(match[1], "***"), value)

    def problem(self, value: Any) -> str:
        """The message for a value that is not allowed: what would be right, and what was given."""
        if value is None:
            return "must be given"
        if self.kind is bool:
            return f"must be True or False, not {value!r}"
        if self.kind is str:
            if self.takes_mapping and not isinstance(value, str):
                return f"must be {self.or_else}, as text or as a mapping, not {value!r:.80}"
            if not isinstance(value, str):
                return f"must be a string, not {type(value).__name__}"
            if not self.names:
                return f"must be {self.or_else}, not {value!r:.80}"
            others = f", or {self.or_else}" if self.or_else else ""
            return f"must be one of {', '.join(self.names)}{others}; not {value!r}"
        kinds = (int,) if self.kind is int else (int, float)
        if type(value) not in kinds:
            return f"must be {'an integer' if self.kind is int else 'a number'}, not {value!r:.80}"
        given = f"{value:g}" if abs(value) > 1e30 else repr(value)
        if self.high not in _HIGHEST:
            return f"must be between {self.low} and {self.high}, not {given}"
        if self.low is not None and not value >= self.low:
            return f"must be at least {self.low}, not {given}"
        return f"must be a finite number, at most {self.high:g}, not {given}"


_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""Words of texts that mean a truth value."""
_HIGHEST = (None, MAX_COUNT, MAX_SECONDS, MAX_SEED)
"""Limits that are no property of a setting."""
_KINDS: dict[type[inspect.Type], type[bool | int | float | str]] = {
    inspect.BoolType: bool,
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.LiteralType: str,
}


@functools.cache
def settings_of(config: type[Any]) -> tuple[Setting, ...]:
    """The fields of a settings class that are options, in their order."""
    annotations = get_type_hints(config, include_extras=True)
    settings = []
    for spec in dataclasses.fields(config):
        if "help" not in spec.metadata:  # no option
            continue
        annotation = _without_mapping(annotations[spec.name])
        kind: Any = inspect.type_info(annotation)
        if isinstance(kind, inspect.UnionType):
            (kind,) = (part for part in kind.types if not isinstance(part, inspect.NoneType))
        schema: dict[str, Any] = {}
        if isinstance(kind, inspect.Metadata):
            kind, schema = kind.type, kind.extra_json_schema or {}
        names = _literals(annotation) or schema.get("examples", ())
        settings.append(
            Setting(
                name=spec.name,
                default=spec.default,
                help=spec.metadata["help"],
                annotation=annotation,
                kind=_KINDS[type(kind)],
                names=tuple(names),
                or_else=schema.get("description", ""),
                takes_mapping=annotation != annotations[spec.name],
                low=getattr(kind, "ge", None),
                high=getattr(kind, "le", None),
                secret=spec.metadata["secret"],
                is_live=spec.metadata["is_live"],
                is_common=spec.metadata["is_common"],
                is_repeatable=spec.metadata["is_repeatable"],
            )
        )
    return tuple(settings)


def _literals(annotation: Any) -> tuple[str, ...]:
    """The strings of a `Literal` (or of one with `| None`) as they are written; msgspec sorts them.

    Empty where the annotation has none.
    """
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return get_args(part)
    return ()


def _without_mapping(annotation: Any) -> Any:
    """The annotation of the text, where a mapping is allowed in its place."""
    if get_origin(annotation) is not Union:
        return annotation
    kept = (part for part in get_args(annotation) if part != dict[str, Any])
    return functools.reduce(operator.or_, kept)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def check_fields(config: Any) -> None:
    """Raises `ConfigError` for the first field whose value its type does not allow."""
    kind: Any = type(config)
    for setting in settings_of(kind):
        value = getattr(config, setting.name)
        if setting.takes_mapping and isinstance(value, dict) and all(map(_is_text, value)):
            continue
        try:
            msgspec.convert(value, setting.annotation)
        except msgspec.ValidationError:
            raise ConfigError(setting.name, setting.problem(value)) from None


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of speculation; `EngineConfig.speculative_config` holds them as JSON, or as the
    mapping that the JSON is."""

    method: Literal["ngram", "draft_model"]
    """Source of proposals: ngram = what followed the same tokens before, in prompt and output;
    draft_model = a smaller model of the same vocabulary."""
    model: str | None = None
    """Draft model: a folder, a GGUF file, `package:NAME` or a hub id."""
    quantization: Quantization | None = None
    """How the linear layers of the draft model are stored; None: as those of the model."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] = 8
    """The most tokens that are proposed for a sequence in a step."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 2
    """Number of tokens that an earlier place must have in common with the end."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 4
    """Number of tokens in common for which a longer match is not looked for."""

    @classmethod
    def read(cls, given: str | Mapping[str, Any]) -> SpeculativeConfig:
        """Read the setting; raises `ConfigError` that says which field is wrong."""
        name = "speculative_config"
        try:
            if isinstance(given, str):
                config = msgspec.json.decode(given, type=cls)
            else:
                config = msgspec.convert(given, type=cls)
        except msgspec.MsgspecError as error:
            form = '{"method": "ngram", "num_speculative_tokens": 8}'
            raise ConfigError(name, f"{error}; it must be JSON such as {form}") from None
        if config.method == "draft_model" and not config.model:
            raise ConfigError(
                name, "method 'draft_model' needs `model`: a folder, file, package:NAME or hub id"
            )
        if config.method == "ngram" and (config.model or config.quantization):
            field_name = "model" if config.model else "quantization"
            raise ConfigError(
                name, f"`{field_name}` is for method 'draft_model'; leave it out with 'ngram'"
            )
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(
                name,
                f"prompt_lookup_min ({config.prompt_lookup_min}) must not exceed"
                f" prompt_lookup_max ({config.prompt_lookup_max})",
            )
        return config


def unknown_setting(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is no setting, with the one that was meant if it can be told."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return ConfigError(name, f"there is no such setting; {hint}")


def own_function(field_name: str, value: str) -> Callable[..., Any]:
    """The function that a setting names as `module:function`.

    Raises `ConfigError` with `field_name` if it cannot be imported or is not callable.
    """
    try:
        function = resolve_name(value)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{value!r} cannot be imported ({error}); give module:function"
        raise ConfigError(field_name, message) from error
    if not callable(function):
        raise ConfigError(field_name, f"{value!r} is not a function, but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def check_min_batch_size(min_batch_size: int | None, max_batch_size: int) -> None:
    """Raise `ConfigError` if a static batch would have to wait for more requests than it holds."""
    if min_batch_size is not None and min_batch_size > max_batch_size:
        raise ConfigError(
            "min_batch_size",
            f"must be at most max_batch_size, which is {max_batch_size}; not {min_batch_size}",
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. The constructor raises `ConfigError`."""

    model: str | None = option(
        None,
        "Folder of a checkpoint, GGUF file, package:NAME or hub id; default: the model that ships.",
        is_common=True,
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub id; default: main.")
    served_model_name: str | None = option(
        None,
        "Name of the model in the API; default: the folder's name or the hub id.",
        is_common=True,
    )
    chat_template: str | None = option(
        None, "File of a chat template; it replaces the model's own."
    )
    tool_parser: ToolParser | None = option(
        None, "Format in which the model writes tool calls; default: as its chat template says."
    )
    reasoning_parser: ReasoningParser | None = option(
        None,
        "Marks between which the model writes its reasoning; none = it writes none; default: as its"
        " chat template says.",
    )
    generation_config: Annotated[
        str, name_or_pattern(".", "a folder with a generation_config.json", "auto", "none")
    ] = option(
        "auto",
        "Defaults of requests that leave out temperature, top_p and the like: auto = what the"
        " checkpoint says (generation_config.json, or a GGUF file's general.sampling); none = the"
        " fixed ones of the API; or a folder with a generation_config.json.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "int8", "int4"] = option(
        "auto",
        "Weights and computation; auto = the checkpoint's (float32 on CPUs without bfloat16"
        " arithmetic; quantised weights of a GGUF file stay in its own bits); int8, int4 = the same"
        " as --quantization.",
    )
    quantization: Quantization | None = option(
        None,
        "Linear layers hold their weights in int8, or on CPUs in int4 (the head in int8), and"
        " compute in int8; everything else is bfloat16.",
        is_common=True,
    )
    device: Annotated[
        str,
        name_or_pattern("^cuda:[0-9]{1,4}$", "cuda:N for the GPU number N", "auto", "cpu", "cuda"),
    ] = option(
        "auto", "auto = cuda where there is one, else cpu; cuda:1 = the second GPU.", is_common=True
    )
    max_seq_len: PositiveInt | None = option(
        None,
        "Longest prompt plus output, in tokens; default: the model's own limit.",
        is_common=True,
    )
    max_batch_size: PositiveInt | None = option(
        None, "Most sequences that run at the same time; default: 32, on a GPU 256.", is_common=True
    )
    max_waiting_requests: NonNegativeInt = option(
        256, "Most requests that wait for a seat; further ones are refused (503)."
    )
    max_waiting_tokens: NonNegativeInt | None = option(
        None,
        "Most prompt tokens of the requests that wait for a seat; a request that would exceed it is"
        " refused (503); default: no limit.",
    )
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = option(
        None,
        "Requests without a seed get seeds derived from this one; default: 0; a server draws a"
        " random one at its start.",
    )
    batching_mode: BatchingMode = option("continuous", "When waiting requests may join the batch.")
    scheduler_policy: Annotated[str, name_or_function(*SCHEDULER_POLICIES)] = option(
        "fcfs",
        "Order of the sequences of a continuous batch; module:function for a policy of your own.",
    )
    sampler: Annotated[str, name_or_function("default")] = option(
        "default",
        "module:function of your own sampler; it replaces runner.sampler:sample (CPU).",
    )
    batch_wait_timeout_s: Annotated[float, at_least(0.0)] = option(
        0.05, "Static mode: seconds that a batch which is too small waits for more requests."
    )
    min_batch_size: PositiveInt | None = option(
        None, "Static mode: requests with which a batch leaves at once; default: max_batch_size."
    )
    static_order: StaticOrder = option(
        "arrival",
        "Static mode: prompt_length = batches of similar prompts; for this a request is put one"
        " batch behind its turn at most.",
    )
    kv_cache_backend: Literal["paged", "slotted", "contiguous", "none"] = option(
        "paged",
        "paged; slotted = a slot of max_seq_len for each seat; contiguous = slots that are freed"
        " batch by batch; none = every step computes whole sequences again (slow, for comparison).",
    )
    kv_cache_dtype: Literal["auto", "model", "int8"] = option(
        "auto",
        "Keys and values: model = the dtype they are computed in; int8 = with a scale for each"
        " head (CPUs with AMX or AVX-512-BF16); auto = int8 where layers are quantised and int8"
        " is faster, else model.",
    )
    page_size: PositiveInt | None = option(
        None, f"Tokens in a page of the paged cache; default: {DEFAULT_PAGE_SIZE}."
    )
    max_num_batched_tokens: PositiveInt | None = option(
        None,
        "Most tokens that one step computes; longer prompts are cut into chunks. Default on a CPU:"
        " 512, and 1,024 while nobody streams if matrix products are fast.",
    )
    max_step_ms: Annotated[float, at_least(1.0)] | None = option(
        None,
        "While streams run, prompts are cut so that a step takes about this many milliseconds.",
    )
    kv_cache_memory_bytes: PositiveInt | None = option(
        None,
        "Largest size of the KV cache in bytes; default: chosen from free memory, and at most what"
        " max_batch_size sequences of max_seq_len need.",
    )
    kv_cache_pages: PositiveInt | None = option(
        None, "Size of the KV cache in pages, instead of bytes."
    )
    cache_keep_s: Annotated[float, at_least(0.0)] = option(
        300.0,
        "Seconds after which memory of the KV cache that nobody has used is given back to the"
        " system (CPU); 0 = never. Under memory pressure it is given back at once.",
    )
    gpu_memory_utilization: Annotated[float, Meta(ge=0.01, le=1)] | None = option(
        None,
        "Fraction of the GPU's memory that weights, steps and KV cache of the engine may take"
        " together; default: what is free, and equal parts for several models.",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy = random weights in the shapes that the config gives."
    )
    model_impl: Literal["auto", "native", "transformers"] = option(
        "auto",
        "Whose layers compute the model: native = infer's own, for the families that `infer models`"
        " lists; transformers = the library's (extra: transformers), for other causal models,"
        " slow (CPU). auto = native.",
    )
    enable_prefix_caching: bool | None = option(
        None, "Share pages between prompts that begin alike; default: yes if paged."
    )
    num_threads: Annotated[int, Meta(ge=1, le=MAX_THREADS)] | None = option(
        None,
        "CPU threads; default: one for each physical performance core, within the CPU quota of a"
        " container (one less to serve a small model).",
        is_common=True,
    )
    numa: Literal["auto", "one", "all"] = option(
        "auto",
        "On a machine with several NUMA nodes: auto = threads and memory of the nodes of one"
        " socket; one = of one node; all = of all.",
    )
    attention_backend: Literal["auto", "native", "triton", "sdpa"] = option(
        "auto",
        "native = the compiled CPU kernel; triton = the CUDA kernels; sdpa = torch's own;"
        " auto = the first of them that works here.",
    )
    speculative_config: JSONObject | None = option(
        None,
        "Proposes tokens that one step verifies, which changes no token (CPU): JSON such as"
        ' {"method": "ngram", "num_speculative_tokens": 8} or'
        ' {"method": "draft_model", "model": PATH}.',
    )
    batch_invariant: bool = option(
        False,
        "On a GPU: a request's tokens do not depend on the batch that it runs in, at some cost in"
        " speed (on a CPU they never do).",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.quantization and self.dtype not in ("auto", "bfloat16", self.quantization):
            raise ConfigError(
                "dtype",
                f"{self.dtype!r} does not go with quantization={self.quantization!r}, which decides"
                " what is computed in; leave dtype out",
            )
        if self.model_impl == "transformers":
            self._check_borrowed()
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
        if self.kv_cache_backend == "none":
            self._check_without_cache()
        if self.speculative is not None and self.sampler != "default":
            raise ConfigError(
                "speculative_config",
                "a sampler of your own may depend on the steps, which speculation changes; leave"
                " one of the two out",
            )
        if self.scheduler_policy != "fcfs" and self.batching_mode != "continuous":
            raise ConfigError(
                "scheduler_policy",
                f"{self.scheduler_policy!r} is an order for a continuous batch; with"
                f" batching_mode={self.batching_mode!r} only 'fcfs' is possible",
            )
        self._check_static_batches()

    def _check_borrowed(self) -> None:
        """Refuse the settings that only our own decoders obey."""
        for name, value in (
            ("quantization" if self.quantization else "dtype", self.weight_format),
            ("load_format", self.load_format if self.load_format == "dummy" else None),
        ):
            if value is not None:
                raise ConfigError(
                    name,
                    f"{value!r} is for models of infer's own, not for model_impl='transformers'",
                )

    def _check_static_batches(self) -> None:
        """Refuse settings of static batches that are impossible."""
        for name, value in (
            ("min_batch_size", self.min_batch_size),
            ("static_order", None if self.static_order == "arrival" else self.static_order),
        ):
            if value is not None and self.batching_mode != "static":
                raise ConfigError(
                    name,
                    f"{value!r} is for batching_mode='static'; leave it out with"
                    f" batching_mode={self.batching_mode!r}",
                )
        if self.max_batch_size is not None:
            check_min_batch_size(self.min_batch_size, self.max_batch_size)

    def _check_without_cache(self) -> None:
        """Refuse the settings that divide sequences between steps."""
        if self.max_step_ms is not None:
            raise ConfigError(
                "max_step_ms",
                "cuts prompts, but kv_cache_backend='none' computes whole sequences; leave it out",
            )
        if self.scheduler_policy != "fcfs":
            raise ConfigError(
                "scheduler_policy",
                f"{self.scheduler_policy!r} divides a step's tokens, but kv_cache_backend='none'"
                " computes whole sequences in turn; only 'fcfs' is possible",
            )
        # `engine.build.memory_plan` checks max_num_batched_tokens; it knows the model's limit.

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Like the constructor; for an unknown name, `ConfigError` suggests a known one."""
        known = [spec.name for spec in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in known:
                raise unknown_setting(name, known)
        given: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in kwargs.items()
        }
        return cls(**given)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The settings of speculation; None: no tokens are proposed."""
        if self.speculative_config is None:
            return None
        return SpeculativeConfig.read(self.speculative_config)

    def of_draft_model(self) -> EngineConfig | None:
        """The settings with which the draft model of speculation is loaded; None: there is none."""
        speculative = self.speculative
        if speculative is None or speculative.model is None:
            return None
        quantization = speculative.quantization or self.weight_format
        dtype = "auto" if quantization else self.dtype
        return EngineConfig(
            model=speculative.model,
            quantization=quantization,  # type: ignore[arg-type]
            dtype=dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            attention_backend=self.attention_backend,
            load_format=self.load_format,
            device=self.device,
            page_size=DEFAULT_PAGE_SIZE,
        )

    @property
    def weight_format(self) -> str | None:
        """The quantization of the linear layers' weights; None: they are not quantised."""
        return self.quantization or (self.dtype if self.dtype in QUANTIZATIONS else None)

    @property
    def prefix_caching(self) -> bool:
        """Whether prompts that begin alike share pages."""
        if self.enable_prefix_caching is None:
            return self.kv_cache_backend == "paged"
        return self.enable_prefix_caching


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The settings of the scheduler, with every default resolved."""

    max_batch_size: int
    max_num_batched_tokens: int
    max_tokens_beside_streams: int | None = None
    """The most tokens of a step that a stream waits for; None: `max_num_batched_tokens`."""
    max_seq_len: int
    max_waiting_requests: int = 256
    max_waiting_tokens: int | None = None
    batching_mode: str = "continuous"
    scheduler_policy: str = "fcfs"
    batch_wait_timeout_s: float = 0.05
    min_batch_size: int | None = None
    """The number of requests with which a static batch leaves; None: `max_batch_size`."""
    static_order: str = "arrival"
    max_step_ms: float | None = None
    speculative: SpeculativeConfig | None = None
    """Settings of speculation; None: no tokens are proposed."""
    hold_pages_until_batch_ends: bool = False
    """Whether a finished sequence keeps its pages until its whole batch has finished."""
