"""`RunnerFactory`: makes the runner of a model for a device, and finds how large its cache can be.

Like the composition root, which uses it, it names concrete parts: attention backends, storage and
runners.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

import infer.engine.build.hardware as machine
from infer.attention.cpu import NativeBackend, obstacle, threads_for
from infer.attention.layout import AttentionBackend
from infer.attention.sdpa import SDPABackend
from infer.config import EngineConfig
from infer.engine.build.memory_plan import MemoryPlan, useful_pages
from infer.errors import ConfigError
from infer.kernels import cuda
from infer.kernels.invariance import invariant_sizes
from infer.main_memory import gib
from infer.models.model import Model
from infer.models.model_config import ModelConfig
from infer.runner.grammar_masks import Restrictions
from infer.runner.graphs import CudaCapture, Graphs, Work, row_sizes, step_sizes
from infer.runner.kv_storage import KVStorage
from infer.runner.model_runner import AheadRunner, ModelRunner
from infer.runner.own_sampler import find_sampler

log = logging.getLogger(__name__)

SHARE_AFTER_FULL_STEP = 0.92
"""Fraction of the GPU memory left free by a full step that the KV cache takes."""
REHEARSED_STREAMS = (1, 2, 8, 16, 32, 64)
"""Numbers of decoding sequences that need different kernels; all seats are rehearsed, too."""
REHEARSED_PROMPTS = (2, 20, 160)
"""Numbers of tokens of a prompt that need different kernels."""


class RunnerFactory:
    """Makes runners for one model, with caches of any size.

    On a GPU a runner is made twice: with a small cache to measure a full step, then to serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        model: Model,
        restrictions: Restrictions,
        device: torch.device,
        seats: int,
        has_process: bool = False,
    ) -> None:
        """`has_process`: whether the engine has a process of its own, in whose threads nothing else
        works."""
        self.config, self.plan, self.model = config, plan, model
        self.restrictions, self.device, self.seats = restrictions, device, seats
        self._has_process = has_process
        self.max_tokens = max(plan.max_num_batched_tokens, seats)
        self.sizes: list[int] | None = None
        self._is_compiled = False
        self.obstacle = cuda.obstacle(device)
        if config.attention_backend == "sdpa":
            self.obstacle = "attention_backend='sdpa'"
        if self.obstacle is None and model.config.form.sinks:
            self.obstacle = "they do not know attention sinks"
        if config.attention_backend == "triton" and self.obstacle:
            raise ConfigError("attention_backend", f"'triton' is not possible: {self.obstacle}")
        if config.attention_backend == "native" and device.type == "cuda":
            raise ConfigError("attention_backend", "'native' runs on CPUs; use 'auto' on a GPU")
        if device.type != "cuda":
            return
        if config.batch_invariant:
            if self.obstacle:
                raise ConfigError("batch_invariant", f"is not possible here: {self.obstacle}")
            sizes = step_sizes(self.max_tokens, seats)
            self.sizes = invariant_sizes(model, sizes, device)
            lost = sorted(set(sizes).difference(self.sizes))
            if sizes[-1] in lost or row_sizes(seats)[-1] in lost:
                raise ConfigError(
                    "batch_invariant",
                    f"is not possible here: rows differ in steps of {lost}; lower max_batch_size"
                    " or max_num_batched_tokens",
                )
            log.info("batch-invariant: steps have %d sizes; without %s", len(self.sizes), lost)
        else:
            log.info(
                "on this device an answer may depend on the requests beside it, in its last bits;"
                " batch_invariant (--batch-invariant) keeps it from that"
            )

    @property
    def launches(self) -> bool:
        """Whether the runners are `LaunchingRunner`s, which work one step ahead: on a GPU, and on
        a CPU where tests have Triton's interpreter."""
        return self.obstacle is None

    @property
    def rehearsals(self) -> list[tuple[int, int]]:
        """Steps (sequences, tokens of each) that together need every kernel a step may need."""
        streams = sorted({*(n for n in REHEARSED_STREAMS if n <= self.seats), self.seats})
        prompts = sorted({min(n, self.plan.max_seq_len) for n in REHEARSED_PROMPTS})
        return [*((n, 1) for n in streams), *((1, n) for n in prompts)]

    @property
    def full_step(self) -> tuple[int, int]:
        """The largest step of all seats: (sequences, tokens of each)."""
        return self.seats, min(self.max_tokens // self.seats, self.plan.max_seq_len)

    def compile(self, runner: Any) -> None:
        """Compile every kernel that a step may need, several at a time, if none is compiled."""
        if not self._is_compiled:
            started_s = time.perf_counter()
            runner.compile(self.rehearsals)
            log.info("kernels compiled in %.1f s", time.perf_counter() - started_s)
        self._is_compiled = True

    def warm_up(self, runner: Any) -> None:
        """Compile every kernel and make the steps that need them, before the first request.

        A full step shows before the first request whether the memory suffices for it.
        """
        self.compile(runner)
        for num_sequences, num_tokens in self.rehearsals:
            runner.rehearse(num_sequences, num_tokens)
        self.make_full_step(runner)

    def make_full_step(self, runner: Any) -> None:
        """Execute the largest step; raises `ConfigError` if the memory does not suffice for it."""
        num_sequences, num_tokens = self.full_step
        try:
            runner.rehearse(num_sequences, num_tokens)
        except MemoryError:
            count = num_sequences * num_tokens
            raise ConfigError(
                "max_num_batched_tokens",
                f"a step of {count:,} tokens does not fit into the GPU's memory beside weights and"
                " KV cache: lower it, max_batch_size or the size of the cache",
            ) from None

    def storage(self, num_pages: int) -> KVStorage:
        """Make a cache of `num_pages` pages and page 0."""
        plan, device = self.plan, self.device
        held = getattr(torch, plan.kv_cache_dtype)
        return make_storage(
            self.config.attention_backend,
            self.model.config,
            (num_pages + 1, plan.page_size),
            held,
            device,
        )

    def runner(self, storage: KVStorage) -> Any:
        """Make a runner with a cache."""
        plan, shape, device = self.plan, self.model.config, self.device
        caches = (*storage.keys, *storage.values)
        if self.launches:
            if self.config.sampler != "default":
                raise ConfigError("sampler", "a GPU's runner draws with a kernel; leave it out")
            from infer.attention.triton import TritonBackend
            from infer.runner.device_runner import DeviceRunner

            backend = TritonBackend(
                storage.keys,
                storage.values,
                **shape.attention(),
                ordered=self.config.batch_invariant,
            )
            log.info("attention: Triton kernels")
            return DeviceRunner(
                self.model,
                backend,
                self.restrictions,
                caches,
                device,
                max_tokens=self.max_tokens,
                max_sequences=self.seats,
                max_seq_len=plan.max_seq_len,
                graphs=Graphs(CudaCapture(device) if device.type == "cuda" else _again),
                sizes=self.sizes,
            )
        if device.type == "cuda":
            log.warning("the kernels for CUDA are not used, and steps are slow: %s", self.obstacle)
        attention = make_attention(self.config.attention_backend, storage, shape)
        sampler = find_sampler(self.config.sampler)
        threads = threads_for(self.model, attention)
        runner = ModelRunner(
            self.model, attention, self.restrictions, caches, device, sampler, threads
        )
        return AheadRunner(runner) if self._may_go_ahead else runner

    @property
    def _may_go_ahead(self) -> bool:
        """Whether steps on a CPU may be launched before the one before is committed: proposals and
        samplers of one's own depend on its tokens. A program that steps in its own thread gets each
        step's tokens at once."""
        config = self.config
        return (
            self._has_process
            and self.device.type == "cpu"
            and not config.speculative
            and config.sampler == "default"
            and config.kv_cache_backend != "none"
        )


def _again(work: Work) -> Work:
    """The capture for a CPU, which has no graphs: the work is done again."""
    return work


def pages_that_fit(factory: RunnerFactory) -> int:
    """Number of pages (without page 0) of the cache: as the plan says; on a GPU without settings
    computed from the memory that a full step leaves free.

    Raises `ConfigError` if the cache could not hold one sequence of `max_seq_len` tokens.
    """
    config, plan, device = factory.config, factory.plan, factory.device
    given = config.kv_cache_memory_bytes or config.kv_cache_pages
    on_gpu = factory.launches and device.type == "cuda"
    if given or config.kv_cache_backend != "paged" or not on_gpu:
        return plan.num_pages
    longest = max(num_tokens for _, num_tokens in (factory.full_step, *factory.rehearsals))
    page_bytes = plan.page_size * plan.kv_bytes_per_token
    held = torch.cuda.memory_allocated(device)
    num_pages = -(-longest // plan.page_size) + 1
    rehearsal = factory.runner(factory.storage(num_pages))
    factory.compile(rehearsal)  # the memory that compiling takes is not part of a step
    torch.cuda.reset_peak_memory_stats(device)
    factory.make_full_step(rehearsal)
    # What a runner always holds counts, too.
    peak = torch.cuda.max_memory_allocated(device) - held - (num_pages + 1) * page_bytes
    del rehearsal
    free = machine.free_bytes(device, config.gpu_memory_utilization)
    pages = int(SHARE_AFTER_FULL_STEP * (free - peak)) // page_bytes - 1
    useful = useful_pages(factory.seats, plan.max_seq_len, plan.page_size)
    log.info("a full step takes %s; %s are free beside it", gib(peak), gib(free - peak))
    least = -(-plan.max_seq_len // plan.page_size)
    if pages < least:
        raise ConfigError(
            "max_seq_len",
            f"weights and a full step leave room for {max(0, pages) * plan.page_size:,} tokens of"
            f" KV cache, but a sequence may have {plan.max_seq_len:,}: lower max_seq_len,"
            " max_num_batched_tokens or max_batch_size",
        )
    return min(pages, useful)


def make_storage(
    wanted: str,
    shape: ModelConfig,
    pages: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> KVStorage:
    """A cache for the backend of `EngineConfig.attention_backend`; `pages`: how many, and their
    size in cells. One that the native kernels read is divided among NUMA nodes."""
    num_pages, size = pages
    by_node = wanted != "sdpa" and not obstacle(shape.head_dim, dtype, device, size)
    return KVStorage(shape, num_pages, size, dtype=dtype, device=device, by_node=by_node)


def make_attention(wanted: str, storage: KVStorage, shape: ModelConfig) -> AttentionBackend:
    """The backend of `EngineConfig.attention_backend` for a `ModelRunner`, over a cache.

    Raises `ConfigError` if the native kernels are asked for and cannot be used.
    """
    cache = storage.keys[0]
    reason = obstacle(shape.head_dim, cache.dtype, cache.device, cache.shape[1])
    if wanted == "native" and reason:
        raise ConfigError("attention_backend", f"'native' is not possible: {reason}; use 'auto'")
    if wanted == "auto" and reason and cache.device.type == "cpu":
        log.warning("attention will be several times slower than it could be: %s", reason)
    if wanted == "sdpa" or reason:
        log.info("attention: torch's SDPA")
        return SDPABackend(storage.keys, storage.values, **shape.attention())
    backend = NativeBackend(
        storage.keys, storage.values, by_node=storage.by_node, **shape.attention()
    )
    log.info("attention: native, %s", backend.isa)
    return backend
