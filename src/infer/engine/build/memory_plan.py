"""The memory plan: what a model will need on this machine, before it is loaded

`infer plan` prints it, and the start-up check uses it. Weights are counted from the config alone
(`models.tensor_list`), exactly for every family, and no torch is imported. The size of the KV cache
follows from the settings. Activations are the peak of one full step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infer.config import DEFAULT_PAGE_SIZE, EngineConfig
from infer.engine.build.checkpoint import CheckpointBlocks
from infer.engine.build.exactness import cost_of, trade_of
from infer.engine.build.hardware import (
    NUMBER_BYTES,
    choose_cache_dtype,
    default_seats,
    free_bytes,
    planned_device,
    planned_dtype,
)
from infer.engine.build.processors import Cpu
from infer.engine.build.server_memory import ProcessNeed, ServerMemory
from infer.errors import ConfigError
from infer.kernels.blocks import IN_BYTES, BlockWeight
from infer.kernels.int8_weight import kept_bytes
from infer.kernels.loader import HUGE_PAGE, STRIP, cell_bytes
from infer.kernels.native import (
    BFLOAT16_SETS,
    embedding_is_packed,
    instruction_set,
    lm_head_quantization,
    native_obstacle,
    products,
    weight_bytes,
)
from infer.main_memory import gib
from infer.models.arrangement import stored_rows
from infer.models.model_config import ModelConfig
from infer.models.tensor_list import tensors_of
from infer.models.weights import BlockReader, HeldWeights

if TYPE_CHECKING:
    import torch

SHARE_OF_FREE_MEMORY = 0.8
"""Fraction of the memory left by weights and activations that the KV cache may take."""
LEAST_SHARE = 0.25
"""Fraction of that memory that the KV cache may take in a container that is too small for what is
left to others."""
LOW_WATER_BYTES, LOW_WATER_SHARE = 64 << 20, 0.25
"""Memory that a cache takes before it forgets prefixes: bytes, or a fraction of the weights."""
CPU_TOKENS_BESIDE_STREAMS = 512
"""Default limit of tokens in a step with running streams on a CPU; they wait for the step's end."""
CUDA_TOKENS_BESIDE_STREAMS = 2048
"""Default limit of tokens in a step with running streams on a GPU."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)
"""Sequence lengths, in tokens, for which a plan says how many fit."""

_NO_SERVER = ServerMemory(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Sizes of the draft model of speculation, in bytes, and counts."""

    model: str
    num_parameters: int
    weight_bytes: int
    activation_bytes: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    page_size: int
    num_pages: int
    """Number of pages, page 0 not counted; they hold as many tokens as the model's."""
    max_seq_len: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache, page 0 included."""
        return (self.num_pages + 1) * self.page_size * self.kv_bytes_per_token

    def beside(self, cache: _CacheSize) -> DraftPlan:
        """This plan with as many tokens in the cache as the model's cache has."""
        num_pages = -(-cache.num_pages * cache.page_size // self.page_size)
        max_seq_len = min(cache.max_seq_len, self.max_seq_len)
        return replace(self, num_pages=num_pages, max_seq_len=max_seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Sizes in bytes, and counts; `rows` describes them for a reader."""

    model: str
    device: str
    dtype: str
    products: str
    """How linear layers multiply on this machine, and why; empty on a GPU."""
    positions: str
    """What RoPE chose by the context's length; empty: nothing."""
    num_parameters: int
    weight_bytes: int
    activation_bytes: int
    free_bytes: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_bytes: int
    page_size: int
    num_pages: int
    """Number of pages, page 0 not counted."""
    max_seq_len: int
    max_batch_size: int
    max_num_batched_tokens: int
    fits: bool
    field: str
    """The setting to change if the plan does not fit."""
    advice: str
    """What would fit if the plan does not, for the user; else empty."""
    draft: DraftPlan | None = None
    """Draft model of speculation; None: there is none."""
    server: ServerMemory = _NO_SERVER
    """The memory of the server and what its processes need, where it is planned for one."""

    @property
    def processes(self) -> tuple[ProcessNeed, ...]:
        """What the server's processes hold beside the model."""
        return self.server.processes

    @property
    def kept_bytes(self) -> int:
        """What the default cache leaves to others in a container, beside those processes."""
        return self.server.kept_beside

    @property
    def process_bytes(self) -> int:
        """Bytes that the server's processes hold beside the model."""
        return self.server.process_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes of main memory that the engine's process may take."""
        engine_bytes = sum(need.num_bytes for need in self.processes if need.name == "engine")
        return self.total_bytes - self.process_bytes + engine_bytes

    @property
    def least_bytes(self) -> int:
        """The part of `promised_bytes` without which the engine could not serve: a cache for one
        sequence."""
        pages = min(self.num_pages, -(-self.max_seq_len // self.page_size))
        spare = (self.num_pages - pages) * self.page_size * self.kv_bytes_per_token
        return self.promised_bytes - spare

    @property
    def total_bytes(self) -> int:
        """Bytes of all that is planned: model, cache, draft model, and the server's processes."""
        mine = self.weight_bytes + self.activation_bytes + self.kv_bytes
        return mine + self.draft_bytes + self.process_bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model's weights and cache."""
        return 0 if self.draft is None else self.draft.weight_bytes + self.draft.kv_bytes

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens that the KV cache holds."""
        return self.num_pages * self.page_size

    def sequences_that_fit(self) -> dict[int, int]:
        """Sequence length in tokens → number of sequences of that length that the KV cache holds
        at the same time."""
        lengths = [n for n in LENGTHS if n < self.max_seq_len] + [self.max_seq_len]
        return {n: self.num_pages // -(-n // self.page_size) for n in lengths}

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        more = {"exactness": cost_of(self.dtype), "sequences_that_fit": self.sequences_that_fit()}
        return asdict(self) | more

    def __str__(self) -> str:
        return "\n".join(f"  {what:<20}{how_much}" for what, how_much in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """The plan as a table of (name, value)."""
        left = self.free_bytes - self.total_bytes
        promised = self.server.promised
        processes = ", ".join(f"{need.name} {gib(need.num_bytes)}" for need in self.processes)
        kept = f"{gib(self.kept_bytes)} of the container's limit, to others"
        fit = ", ".join(f"{count} x {n:,}" for n, count in self.sequences_that_fit().items())
        return [
            ("model", f"{self.model}, {self.num_parameters / 1e6:,.1f} M parameters"),
            ("computed in", f"{self.dtype} on {self.device}"),
            *([("linear layers", self.products)] if self.products else []),
            *([("positions", self.positions)] if self.positions else []),
            *([("exactness", trade)] if (trade := trade_of(self.dtype)) else []),
            ("free memory", gib(self.free_bytes)),
            *([("promised", f"{gib(promised)} more to other engines")] if promised else []),
            *([("processes", f"{gib(self.process_bytes)}: {processes}")] if processes else []),
            *([("left free", kept)] if self.kept_bytes else []),
            ("weights", gib(self.weight_bytes)),
            ("activations", f"{gib(self.activation_bytes)} in a step of"
             f" {self.max_num_batched_tokens} tokens"),
            ("KV cache a token", f"{self.kv_bytes_per_token:,} bytes, {self.kv_cache_dtype}"),
            ("KV cache", f"{gib(self.kv_bytes)}: {self.num_pages:,} pages of {self.page_size}"
             f" tokens, {self.num_cached_tokens:,} tokens"),
            *([("draft model", _draft_row(self.draft))] if self.draft else []),
            ("sequences that fit", f"{fit} tokens (seats: {self.max_batch_size})"),
            ("left over", gib(left) if left >= 0 else f"{gib(-left)} too little"),
            ("verdict", "fits" if self.fits else f"does not fit: {self.advice}"),
        ]  # fmt: skip


def _draft_row(draft: DraftPlan) -> str:
    return (
        f"{draft.model}, {draft.num_parameters / 1e6:,.1f} M parameters: weights"
        f" {gib(draft.weight_bytes)}, KV cache {gib(draft.kv_bytes)}"
        f" ({draft.kv_bytes_per_token:,} bytes a token, {draft.kv_cache_dtype})"
    )


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    name: str,
    *,
    blocks: CheckpointBlocks | None = None,
    free: int | None = None,
    server: ServerMemory | None = None,
    draft: tuple[ModelConfig, str] | None = None,
) -> MemoryPlan:
    """The plan for these settings; its `fits` says whether the memory suffices.

    `name`: the model's name in the plan. `blocks`: those in which weights are held. `free`: bytes
    to plan with instead of what the device has free. `server`: those of a server, whose processes
    count. `draft`: configuration and name of the draft model. Raises `ConfigError` if impossible.
    """
    dtype = planned_dtype(config, model, device := planned_device(config))
    _check_max_seq_len(config, model)
    server = server or ServerMemory(_free(config, device) if free is None else free)
    batched = step_tokens(config, model, device, dtype)
    seats = _num_seats(config, device)
    reader = None if blocks is None else blocks.plan
    weights = count_weights(model, dtype, device, config.weight_format, reader)
    activations = activation_bytes(model, dtype, tokens=batched, rows=min(seats, batched))
    page_size = page_size_for(config, model)
    cache_dtype = choose_cache_dtype(config, model, dtype, device, page_size)
    drafts = draft and _draft_plan(config, *draft, device, rows=seats)
    if drafts:
        activations = max(activations, drafts.activation_bytes)
    left = server.free - server.process_bytes - weights.num_bytes - activations
    left -= drafts.weight_bytes if drafts else 0
    draft_token_bytes = drafts.kv_bytes_per_token if drafts else 0
    page = page_size, _kv_bytes_per_token(model, cache_dtype)
    budget = _cache_budget(config, left, server.kept_beside, page, draft_token_bytes)
    cache = _CacheSize(config, page=page, model_max=model.max_seq_len, seats=seats, budget=budget)
    drafts = drafts and drafts.beside(cache)
    return MemoryPlan(
        model=name,
        device=device.type,
        dtype=dtype if config.weight_format is None or weights.kinds else config.weight_format,
        products=_products(config, model, dtype, device, weights),
        positions=model.rope_choice(cache.max_seq_len),
        num_parameters=weights.num_parameters,
        weight_bytes=weights.num_bytes,
        activation_bytes=activations,
        free_bytes=server.free,
        kv_cache_dtype=cache_dtype,
        kv_bytes_per_token=cache.token_bytes,
        kv_bytes=cache.kv_bytes,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        max_seq_len=cache.max_seq_len,
        max_batch_size=seats,
        max_num_batched_tokens=batched,
        fits=cache.advice == "" and left >= cache.kv_bytes + (drafts.kv_bytes if drafts else 0),
        field=cache.field,
        advice=_advice(left, cache, dtype, draft_token_bytes),
        draft=drafts,
        server=server,
    )


def _free(config: EngineConfig, device: torch.device | Cpu) -> int:
    return free_bytes(device, config.gpu_memory_utilization)


def _products(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    device: torch.device | Cpu,
    weights: WeightCount,
) -> str:
    if device.type != "cpu":
        return ""
    if model.num_parameters is not None:
        return f"transformers' own, in {dtype}"
    why = ["int4 would hardly be smaller"] * bool(weights.kinds and config.weight_format)
    return products(dtype, config.weight_format, [*weights.block_forms, *why])


def _check_max_seq_len(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` for a longer sequence than the model can have."""
    if config.max_seq_len is not None and config.max_seq_len > model.max_seq_len:
        raise ConfigError(
            "max_seq_len", f"{config.max_seq_len} exceeds the model's own limit {model.max_seq_len}"
        )


def _num_seats(config: EngineConfig, device: torch.device | Cpu) -> int:
    if config.batching_mode == "sequential":
        return 1
    return config.max_batch_size or default_seats(device)


def _kv_bytes_per_token(model: ModelConfig, cache_dtype: str) -> int:
    size = NUMBER_BYTES[cache_dtype]
    return sum(
        2 * layer.num_kv_heads * cell_bytes(layer.head_dim, size) for layer in model.layers()
    )


def _cache_budget(
    config: EngineConfig, left: int, kept: int, page: tuple[int, int], draft_token_bytes: int
) -> int:
    """Bytes for the model's cache: as the settings say, else a share of those that are `left`, of
    which the draft model's cache gets its part. In a container the default leaves `kept` bytes to
    others, but a small one serves, too. `page`: tokens per page, and bytes per token."""
    page_size, token_bytes = page
    if config.kv_cache_pages is not None:
        return (config.kv_cache_pages + 1) * page_size * token_bytes
    caches = min(SHARE_OF_FREE_MEMORY * left, max(left - kept, LEAST_SHARE * left))
    share = token_bytes / (token_bytes + draft_token_bytes)
    return config.kv_cache_memory_bytes or max(0, int(caches * share))


def _draft_plan(
    config: EngineConfig, model: ModelConfig, name: str, device: torch.device | Cpu, *, rows: int
) -> DraftPlan:
    """The draft model's plan, without pages yet. `rows`: rows that are sampled in a pass."""
    settings = config.of_draft_model()
    assert settings is not None
    dtype = planned_dtype(settings, model, device)
    weights = count_weights(model, dtype, device, settings.weight_format)
    cache_dtype = choose_cache_dtype(settings, model, dtype, device, DEFAULT_PAGE_SIZE)
    return DraftPlan(
        model=name,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.num_bytes,
        activation_bytes=activation_bytes(
            model, dtype, tokens=CPU_TOKENS_BESIDE_STREAMS, rows=rows
        ),
        kv_cache_dtype=cache_dtype,
        kv_bytes_per_token=_kv_bytes_per_token(model, cache_dtype),
        page_size=DEFAULT_PAGE_SIZE,
        num_pages=0,
        max_seq_len=model.max_seq_len,
    )


def replicas_that_fit(plan_with: Callable[[int], MemoryPlan], most: int) -> int:
    """The largest number of engines, up to `most`, that fit when each gets the same part of main
    memory; 0 if not even one does. `plan_with`: the plan of one of so many engines."""
    low, high = 0, most
    while low < high:  # fewer fit whenever more do
        middle = (low + high + 1) // 2
        if plan_with(middle).fits:
            low = middle
        else:
            high = middle - 1
    return low


def page_size_for(config: EngineConfig, model: ModelConfig) -> int:
    """Number of tokens in a page. A contiguous cache has one page per sequence, whose length is
    rounded up to the kernel's `STRIP`."""
    if config.kv_cache_backend == "paged":
        return config.page_size or DEFAULT_PAGE_SIZE
    return -(-(config.max_seq_len or model.max_seq_len) // STRIP) * STRIP


def useful_pages(seats: int, max_seq_len: int, page_size: int) -> int:
    """The number of pages that a full batch of longest sequences needs; the default size of a paged
    cache is never above it. Seats that are empty or short leave pages for prefixes.

    `max_seq_len`, `page_size`: in tokens."""
    return seats * -(-max_seq_len // page_size)


def low_water_pages(plan: MemoryPlan, num_tensors: int) -> int:
    """The number of pages up to which a paged cache takes memory before it forgets prefixes: whole
    slabs. A slab is a huge page in each of the cache's `num_tensors` tensors."""
    page_bytes = plan.page_size * plan.kv_bytes_per_token
    slab = HUGE_PAGE * num_tensors
    wanted = int(max(LOW_WATER_BYTES, LOW_WATER_SHARE * plan.weight_bytes))
    return min(plan.num_pages, max(1, wanted // slab) * slab // page_bytes - 1)  # not page 0


def step_tokens(
    config: EngineConfig, model: ModelConfig, device: torch.device | Cpu, dtype: str
) -> int:
    """The limit of tokens in a step. Without a cache a step has room for a longest sequence.

    Raises `ConfigError` if the given limit is too small for that.
    """
    given = config.max_num_batched_tokens
    if config.kv_cache_backend != "none":
        return given or default_batched_tokens(device, dtype)
    longest = config.max_seq_len or model.max_seq_len
    if given is not None and given < longest:
        raise ConfigError(
            "max_num_batched_tokens",
            f"{given} is less than max_seq_len={longest}, but kv_cache_backend='none' computes a"
            " whole sequence in one step; raise it or lower max_seq_len",
        )
    return given or max(longest, default_batched_tokens(device, dtype))


def default_batched_tokens(device: torch.device | Cpu, dtype: str) -> int:
    """Default limit of tokens in a step: enough to use the device well."""
    if device.type == "cuda":
        return 4096
    native = dtype == "bfloat16" and native_obstacle() is None
    return 1024 if native and instruction_set() in BFLOAT16_SETS else CPU_TOKENS_BESIDE_STREAMS


class _CacheSize:
    """The cache's number of pages and their size, from the settings and a budget of bytes.

    `advice` is not empty if the budget is too small; it then says why and what to change.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        page: tuple[int, int],
        model_max: int,
        seats: int,
        budget: int,
    ) -> None:
        """`page`: tokens per page, and bytes per token. `model_max`: the model's longest sequence
        in tokens. `seats`: maximum of sequences in a batch. `budget`: bytes for the cache."""
        self.page_size, self.token_bytes = page
        self.max_seq_len = config.max_seq_len or model_max
        self.advice = ""
        self.field = "kv_cache_memory_bytes"
        if config.kv_cache_backend != "paged":
            self.num_pages = seats
            if self.kv_bytes > budget:
                self.field = "kv_cache_backend"
                self.advice = (
                    f"{config.kv_cache_backend!r} needs {gib(self.kv_bytes)} for"
                    f" {seats} seats of {self.max_seq_len} tokens, there are {gib(budget)}: lower"
                    " max_batch_size or max_seq_len, or use 'paged'"
                )
            return
        self.num_pages = max(0, budget // (self.page_size * self.token_bytes) - 1)
        if not (config.kv_cache_memory_bytes or config.kv_cache_pages):
            useful = useful_pages(seats, self.max_seq_len, self.page_size)
            self.num_pages = min(self.num_pages, useful)
        if config.max_seq_len is None and self.num_pages:
            self.max_seq_len = min(self.max_seq_len, self.num_pages * self.page_size)
        if self.num_pages < 1 or self.num_pages * self.page_size < self.max_seq_len:
            self.advice = (
                f"{gib(budget)} of KV cache hold {self.num_pages * self.page_size} tokens; one"
                f" sequence of max_seq_len={self.max_seq_len} does not fit: lower max_seq_len or"
                " give kv_cache_memory_bytes more"
            )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache, page 0 included."""
        return (self.num_pages + 1) * self.page_size * self.token_bytes


def _advice(left: int, cache: _CacheSize, dtype: str, draft_token_bytes: int) -> str:
    """What would fit if the plan does not; `left`: bytes beside weights and activations.
    `draft_token_bytes`: bytes of a token in the draft model's cache."""
    token_bytes = cache.token_bytes + draft_token_bytes
    tokens = left // token_bytes
    need = cache.kv_bytes * token_bytes // cache.token_bytes
    if tokens >= cache.page_size and (cache.advice or left >= need):
        return cache.advice
    if tokens < cache.page_size:
        narrower = ", or dtype='bfloat16'" if dtype == "float32" else ""
        return f"the weights alone leave no room: choose a smaller model{narrower}"
    return (
        f"beside the weights there is room for {tokens:,} tokens of KV cache: lower"
        f" kv_cache_memory_bytes to {tokens * cache.token_bytes:,}, max_seq_len or max_batch_size"
    )


@dataclass(frozen=True, slots=True)
class WeightCount:
    """A model's weights."""

    num_parameters: int
    num_bytes: int
    """Size in memory."""
    kinds: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(type of blocks in which numbers are held, type in the file) → how many numbers."""

    @property
    def block_forms(self) -> list[str]:
        """What is said of the blocks in which weights are held, the file's own types first."""
        kinds = sorted(self.kinds, key=lambda kind: -self.kinds[kind])
        in_file = ", ".join(held for held, stored in kinds if held == stored)
        return [f"in the file's own {in_file}"] * bool(in_file) + [
            f"{stored} held as {held}" + (", rounded" if stored not in IN_BYTES else "")
            for held, stored in kinds
            if held != stored
        ]


def count_weights(
    config: ModelConfig,
    dtype: str,
    device: torch.device | Cpu,
    quantization: str | None = None,
    blocks: BlockReader | None = None,
) -> WeightCount:
    """The weights of a model of this shape, from its config alone.

    A tied embedding counts twice in bytes if the head is quantised or packed by oneDNN: once for
    looking up tokens, once in the head's own layout. In blocks and in our layout it counts once.
    `blocks` gives the types of weights that are held in blocks.
    """
    if config.num_parameters is not None:
        return WeightCount(config.num_parameters, config.num_parameters * NUMBER_BYTES[dtype])
    tensors, rows, size = tensors_of(config), stored_rows(config), NUMBER_BYTES[dtype]
    kinds: Counter[tuple[str, str]] = Counter()

    def in_blocks(weights: Mapping[str, tuple[int, int]], *, gated: bool = False) -> int | None:
        """The size in bytes of weights in blocks; None if they are not."""
        if blocks is None:
            return None
        rows_of = {name: rows(name) for name in weights}
        stored = {
            place.name: (place.total or weights[name][0], weights[name][1])
            for name, place in rows_of.items()
        }
        forms = blocks(stored, gated and len(stored) > 1)
        if not forms:
            return None
        kinds.update(_kinds_of(forms))
        return kept_bytes(forms, gated=gated)

    name, shape = tensors.embedding
    count = math.prod(shape) + sum(map(math.prod, tensors.others.values()))
    num_bytes = float(size * sum(map(math.prod, tensors.others.values())))
    embedding = in_blocks({name: shape})
    num_bytes += size * math.prod(shape) if embedding is None else embedding
    if (
        embedding is None
        and config.tie_embeddings
        and (quantization or _packs(dtype, device))
        and (config.head_bias or not embedding_is_packed(dtype, quantization))
    ):
        num_bytes += math.prod(shape) * weight_bytes(
            lm_head_quantization(quantization), size, shape[1]
        )
    for product in tensors.products:
        count += product.num_weights
        forms = in_blocks(product.weights, gated=product.gated)
        way = lm_head_quantization(quantization) if product.is_head else quantization
        width = next(iter(product.weights.values()))[1]
        num_bytes += (
            product.num_weights * weight_bytes(way, size, width) if forms is None else forms
        )
    return WeightCount(count, int(num_bytes), kinds)


def _kinds_of(weights: HeldWeights) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        if isinstance(weight, BlockWeight):
            counts[weight.kind, weight.stored or weight.kind] += weight.num_weights
        else:
            counts["int8", "int8"] += weight.num_weights
    return counts


def _packs(dtype: str, device: torch.device | Cpu) -> bool:
    """Whether linear layers have a layout of their own for weights in `dtype`."""
    if device.type != "cpu":
        return False
    if dtype == "bfloat16" and native_obstacle() is None:
        return True
    import torch

    from infer.kernels.linear.onednn import can_pack

    return can_pack(torch.empty(1, 1, dtype=getattr(torch, dtype)))


def activation_bytes(config: ModelConfig, dtype: str, *, tokens: int, rows: int) -> int:
    """Peak of one step's activations in bytes, for `tokens` tokens of which `rows` are sampled.

    It is the widest layer over all tokens (a gate's two halves and its result, or its result and
    the kernel's packed input), and the logits of the sampled rows."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 4 * config.hidden_size + max(2 * heads, 3 * config.intermediate_size)
    # Logits exist in the computed dtype, in float32, and once more while they are sampled.
    logits = rows * config.vocab_size * (NUMBER_BYTES[dtype] + 8)
    return tokens * width * NUMBER_BYTES[dtype] + logits
