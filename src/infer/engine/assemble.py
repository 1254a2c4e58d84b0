"""The composition root: settings in, an engine out.

The only module that names concrete parts: which decoder, attention backend, storage, runner,
scheduler. Everything else receives what it works with. A problem is a `LoadError` or `ConfigError`
here, before anything is served.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

import infer.engine.machine as machine
from infer.attention.layout import AttentionBackend
from infer.attention.native import NativeBackend, obstacle
from infer.attention.sdpa import SDPABackend
from infer.cache.allocator import PageAllocator
from infer.config import EngineConfig, SchedulerConfig
from infer.engine.async_llm import AsyncLLM
from infer.engine.checkpoint import Checkpoint, find_checkpoint
from infer.engine.core import EngineCore
from infer.engine.intake import Intake, Limits
from infer.engine.plan import CPU_TOKENS_BESIDE_STREAMS, MemoryPlan, gib, make_plan
from infer.engine.worker import Blueprint, EngineThread
from infer.errors import ConfigError
from infer.kernels.invariance import batch_invariance_problem
from infer.models.config import ModelConfig
from infer.models.model import build_model
from infer.runner.model_runner import ModelRunner
from infer.runner.restrict import Restrictions
from infer.runner.storage import KVStorage
from infer.schedule.scheduler import Scheduler
from infer.text.grammar import Compiler
from infer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 16 << 20
"""of weights, up to which a server has as much to do for a token as its engine, and so a core"""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to be stepped, and what its façade needs."""

    core: EngineCore
    intake: Intake
    model_name: str


def assemble(config: EngineConfig) -> EngineParts:
    """Load the model and put an engine together; `LoadError` / `ConfigError` if that cannot be."""
    blueprint = prepare(config)
    tokenizer = Tokenizer(blueprint.files)
    core, limits = blueprint.build()
    return EngineParts(core, Intake(tokenizer, limits, config.seed), blueprint.model_name)


def prepare(config: EngineConfig, beside_server: bool = False) -> Blueprint:
    """All that can be known, and refused, before the weights are loaded."""
    machine.keep_freed_memory()
    checkpoint = find_checkpoint(
        config.model, revision=config.revision, dummy=config.load_format == "dummy"
    )
    device = machine.choose_device(config)
    dtype = machine.choose_dtype(config, checkpoint.config, device)
    plan = make_plan(config, checkpoint.config, checkpoint.name)
    if not plan.fits:
        raise ConfigError(plan.field, f"{plan.advice}; the plan was\n{plan}")
    spare = beside_server and plan.weight_bytes <= SMALL_MODEL_BYTES
    torch.set_num_threads(config.num_threads or machine.default_threads(spare))
    return Blueprint(
        model_name=config.served_model_name or checkpoint.name,
        files=checkpoint.text(),
        build=lambda: _build(config, checkpoint, plan, dtype, device),
    )


def prepare_process(settings: dict[str, Any]) -> Blueprint:
    """`prepare` for `engine.child`, which gets the settings as plain data."""
    return prepare(EngineConfig(**settings), beside_server=True)


def _build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    plan: MemoryPlan,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[EngineCore, Limits]:
    started_s = time.perf_counter()
    model_config = checkpoint.config
    # A second's work for a large vocabulary, most of it with the interpreter's lock: beside the
    # weights it costs little, beside the first request a second.
    restrictions = Restrictions(
        lambda: Compiler(Tokenizer(checkpoint.text()), model_config.vocab_size), device
    )
    before = machine.resident_bytes()
    source = checkpoint.source(dtype, device)
    source.quantization = config.weight_format
    model = build_model(model_config, source, plan.max_seq_len)
    after = machine.resident_bytes()
    if device.type == "cpu" and (problem := batch_invariance_problem(model)):
        log.warning("%s", problem)
    is_default = device.type != "cuda" and not config.max_num_batched_tokens
    scheduler_config = SchedulerConfig(
        max_batch_size=config.max_batch_size,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_tokens_beside_streams=CPU_TOKENS_BESIDE_STREAMS if is_default else None,
        max_seq_len=plan.max_seq_len,
        max_waiting_requests=config.max_waiting_requests,
        batching_mode=config.batching_mode,
        scheduler_policy=config.scheduler_policy,
        batch_wait_timeout_s=config.batch_wait_timeout_s,
        max_step_ms=config.max_step_ms,
        hold_pages_until_batch_ends=config.kv_cache_backend == "contiguous",
    )
    allocator = PageAllocator(
        plan.num_pages + 1, plan.page_size, enable_prefix_caching=config.prefix_caching
    )
    scheduler = Scheduler(scheduler_config, allocator, time.monotonic)
    limits = Limits(
        vocab_size=model_config.vocab_size,
        max_seq_len=plan.max_seq_len,
        num_seats=scheduler.num_seats,
        max_waiting_requests=config.max_waiting_requests,
    )
    log.info(
        "%s: %s on %s, weights %s (planned %s), KV cache %s, %s for %s tokens, ready in %.1f s",
        checkpoint.name,
        plan.dtype,
        device,
        "?" if before is None or after is None else gib(after - before),
        gib(plan.weight_bytes),
        plan.kv_cache_dtype,
        gib(plan.kv_bytes),
        f"{plan.num_cached_tokens:,}",
        time.perf_counter() - started_s,
    )
    num_pages = plan.num_pages + 1
    held = getattr(torch, plan.kv_cache_dtype)
    storage = KVStorage(model_config, num_pages, plan.page_size, dtype=held, device=device)
    backend = _attention(config.attention_backend, storage, model_config)
    caches = (*storage.keys, *storage.values)
    runner = ModelRunner(model, backend, restrictions, caches, device)
    return EngineCore(scheduler, runner), limits


def plan_for(config: EngineConfig, *, free: int | None = None) -> MemoryPlan:
    """What the settings would need on this machine; loads nothing. `free`: bytes to plan with."""
    checkpoint = find_checkpoint(config.model, revision=config.revision)
    return make_plan(config, checkpoint.config, checkpoint.name, free=free)


def build_async_llm(config: EngineConfig) -> AsyncLLM:
    """An engine in a thread behind the asyncio façade; not started yet."""
    parts = assemble(config)
    return AsyncLLM(EngineThread(parts.core), parts.intake, parts.model_name)


def _attention(wanted: str, storage: KVStorage, shape: ModelConfig) -> AttentionBackend:
    cache = storage.keys[0]
    reason = obstacle(shape.head_dim, cache.dtype, cache.device, cache.shape[1])
    if wanted == "native" and reason:
        raise ConfigError("attention_backend", f"'native' is not possible: {reason}; use 'auto'")
    if wanted == "auto" and reason and cache.device.type == "cpu":
        log.warning("attention will be several times slower than it could be: %s", reason)
    kind = SDPABackend if wanted == "sdpa" or reason else NativeBackend
    backend = kind(
        storage.keys,
        storage.values,
        num_heads=shape.num_heads,
        scale=shape.attention_scale,
        windows=[shape.window(layer) for layer in range(shape.num_layers)],
    )
    isa = f"native, {backend.isa}" if isinstance(backend, NativeBackend) else "torch's SDPA"
    log.info("attention: %s", isa)
    return backend
