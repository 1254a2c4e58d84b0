"""The composition root: makes an engine from settings

It and `runner_factory` are the only modules that name concrete parts: decoder, attention backend,
storage, runner and scheduler. All other modules get their parts through constructors. Problems are
raised here as `LoadError` or `ConfigError`, before anything is served.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import infer.engine.build.hardware as machine
import infer.main_memory as main_memory
from infer.attention.cpu import threads_for
from infer.config import EngineConfig, SchedulerConfig, check_min_batch_size
from infer.engine.build.checkpoint import (
    Checkpoint,
    chosen_blocks,
    find_checkpoint,
    text_of,
    verified,
)
from infer.engine.build.draft_checkpoint import check_vocabulary, find_draft
from infer.engine.build.exactness import trade_of
from infer.engine.build.fingerprints import fingerprint_of
from infer.engine.build.machine_share import SETTING, MachineShare
from infer.engine.build.memory_ledger import MemoryLedger, Promise, for_newcomer, part_of
from infer.engine.build.memory_plan import (
    CPU_TOKENS_BESIDE_STREAMS,
    CUDA_TOKENS_BESIDE_STREAMS,
    MemoryPlan,
    low_water_pages,
    replicas_that_fit,
)
from infer.engine.build.placement import PINNED_FROM, Placement, free_near, live_on, place
from infer.engine.build.planner import planner
from infer.engine.build.processors import Processors, read_processors
from infer.engine.build.runner_factory import (
    RunnerFactory,
    make_attention,
    make_storage,
    pages_that_fit,
)
from infer.engine.build.server_memory import (
    NUM_FRONTS,
    held_bytes,
    memory_of_server,
    processes_beside,
)
from infer.engine.core import EngineCore
from infer.engine.loop import Announce, Blueprint, EngineThread
from infer.engine.memory_keeper import MemoryKeeper, Pool
from infer.errors import ConfigError, LoadError
from infer.files import reading
from infer.kernels import cuda
from infer.kernels.invariance import batch_invariance_problem
from infer.kernels.team import CoresTaken
from infer.load_stages import begin_stage
from infer.main_memory import gib
from infer.memory_pressure import MemoryRoom
from infer.models.model import Model, build_model
from infer.models.weights import WeightSource
from infer.readable_text import readable
from infer.runner.grammar_masks import Restrictions
from infer.runner.model_runner import ModelRunner
from infer.runner.sampler import sampler_for
from infer.schedule.drafting import Drafter
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.text.grammars.compiler import Compiler
from infer.text.library_tokenizer import read_vocabulary
from infer.types.engine_limits import EngineLimits
from infer.types.fingerprint import Fingerprint

if TYPE_CHECKING:
    from infer.engine.client.async_llm import AsyncLLM
    from infer.engine.client.input import InputProcessor
    from infer.models.model_config import ModelConfig
    from infer.text.checkpoint_text import TextFiles

log = logging.getLogger(__name__)

DEAD_ENGINE_S = 15.0
"""Seconds for which a new engine waits until a dead one's GPU memory is free."""
SMALL_MODEL_BYTES = 16 << 20
"""Size of the weights up to which one core is left to the server, whose work per token is then as
large as the engine's."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to step, and the other parts of a façade."""

    core: EngineCore
    input_processor: InputProcessor
    model_name: str


def assemble(config: EngineConfig) -> EngineParts:
    """Load the model and make an engine; raises `LoadError` or `ConfigError`."""
    # An engine process has no text side, and a start does not wait for its imports.
    from infer.engine.client.input import InputProcessor, log_defaults, log_tool_use
    from infer.text.tokenizer import Tokenizer

    blueprint = prepare(config)
    tokenizer = Tokenizer(blueprint.files)
    log_tool_use(tokenizer)
    defaults = blueprint.files.sampling
    log_defaults(blueprint.model_name, defaults)
    core, limits = blueprint.build(lambda request_id: None)
    main_memory.return_freed_memory()
    input_processor = InputProcessor(tokenizer, limits, config.seed or 0, defaults)
    return EngineParts(core, input_processor, blueprint.model_name)


def prepare(
    config: EngineConfig, num_fronts: int = 0, share: MachineShare | None = None
) -> Blueprint:
    """Do everything that needs no weights, and return the engine's blueprint.

    `num_fronts`: processes of a server that answer HTTP and share the machine; 0: there is none.
    `share`: the part of the machine that this engine gets, where other engines share it. Raises
    `LoadError` for a checkpoint that cannot be read, `ConfigError` for settings that are impossible
    or do not fit into memory.
    """
    main_memory.keep_freed_memory()
    begin_stage("reading the checkpoint")
    checkpoint = find_checkpoint(
        config.model,
        revision=config.revision,
        dummy=config.load_format == "dummy",
        model_impl=config.model_impl,
    )
    device = _device_for(config)
    dtype = machine.choose_dtype(config, checkpoint.config, device)
    if device.type == "cpu":
        machine.log_dtype(config, checkpoint.config, dtype)
    draft = find_draft(config)
    if draft is not None:
        check_vocabulary(text_of(checkpoint, config), draft)
    plan_with = planner(config, checkpoint, draft, device)
    ledger = MemoryLedger() if num_fronts and device.type == "cpu" else None
    with reading(str(config.model)):
        beside = (checkpoint, plan_with, share, config, num_fronts)
        plan = plan_with() if ledger is None else _plan_beside(ledger, *beside)
    ends_s = time.monotonic() + DEAD_ENGINE_S
    while device.type == "cuda" and not plan.fits and time.monotonic() < ends_s:
        time.sleep(0.2)  # the memory of a dead engine may not be free yet
        plan = plan_with()
    if not plan.fits:
        if share is not None and device.type == "cpu":
            _refuse_replicas(checkpoint, plan_with, share, num_fronts)
        raise ConfigError(plan.field, f"{plan.advice}; the plan was\n{plan}")
    _log_formats(plan)
    if ledger is None:
        torch.set_num_threads(machine.num_threads(config))
    unread = [text_of(checkpoint, config)]  # with a tokenizer, which nobody keeps
    files = replace(unread[0], built=None)

    def build(announce: Announce) -> tuple[EngineCore, EngineLimits]:
        # For a large vocabulary this takes a second, most of it with the interpreter's lock. While
        # the weights are loaded it costs little; later the first request would wait for it.
        restrictions = Restrictions(lambda: _grammar_compiler(unread.pop(), checkpoint.config))
        with cuda.current(device):  # kernels are launched there; it need not be the first GPU
            room = MemoryRoom() if ledger is None else _room_beside(ledger, plan)
            parts = checkpoint, draft, plan, (dtype, device), restrictions
            return _build(config, *parts, announce, room, has_process=num_fronts > 0)

    return Blueprint(
        model_name=readable(config.served_model_name or checkpoint.name),
        files=files,
        build=build,
        pinned=lambda core: pinned_settings(core, device),
        fingerprint=lambda core: _fingerprint(core, files, checkpoint.config, plan, device),
    )


def _device_for(config: EngineConfig) -> torch.device:
    """The device; raises `ConfigError` if a setting is for CPUs and it is none."""
    device = machine.choose_device(config)
    for name, given in (
        ("speculative_config", config.speculative),
        ("model_impl", config.model_impl == "transformers"),
    ):
        if given and device.type != "cpu":
            raise ConfigError(name, f"runs on CPUs, not on {device.type}; use device='cpu'")
    return device


def _log_formats(plan: MemoryPlan) -> None:
    if plan.products:
        log.info("linear layers: %s", plan.products)
    if trade := trade_of(plan.dtype):
        log.info("weights in %s: %s", plan.dtype, trade)


def _fingerprint(
    core: EngineCore,
    text: TextFiles,
    model: ModelConfig,
    plan: MemoryPlan,
    device: torch.device,
) -> Fingerprint:
    with cuda.current(device):
        return fingerprint_of(
            core,
            model=model,
            text=text,
            vocab_size=model.vocab_size,
            formats=(plan.dtype, plan.kv_cache_dtype),
        )


def _plan_beside(
    ledger: MemoryLedger,
    checkpoint: Checkpoint,
    plan_with: Callable[..., MemoryPlan],
    share: MachineShare | None,
    config: EngineConfig,
    num_fronts: int,
) -> MemoryPlan:
    """The plan of an engine of a server, beside the other engines of this machine. The threads of
    this process live on its cores from now on."""
    processors = read_processors()
    with ledger.planning():
        taken = ledger.cpus_of_others()
        beside = [pid for pid in processes_beside(os.getppid()) if pid != os.getpid()]
        pids, size = [os.getpid(), *beside], checkpoint.config.vocab_size
        whole = memory_of_server(size, pids=pids, num_fronts=num_fronts)
        memory = whole
        if share is not None:
            part = share.main_memory + sum(map(held_bytes, beside)) // share.count
            memory = replace(whole.divided(share.count), free=min(part, whole.free))
        elif (near := free_near(processors, processors.chosen(config.numa, taken))) is not None:
            memory = whole = replace(whole, free=min(near, whole.free))
        usual, most = (
            min(memory.free, num_bytes) for num_bytes in for_newcomer(whole.free, ledger.others())
        )
        promised = max(0, memory.free - usual)
        plan = plan_with(server=replace(memory, free=usual, promised=promised))
        if not plan.fits and most > usual:
            plan = plan_with(server=replace(memory, free=most))
        if plan.fits:
            is_small = plan.weight_bytes <= SMALL_MODEL_BYTES
            placement = _placement(config, processors, taken, share, is_small=is_small)
            ledger.enter(plan.promised_bytes, plan.least_bytes, placement.cpus)
            torch.set_num_threads(placement.num_threads)
            live_on(placement, processors)
    return plan


def _placement(
    config: EngineConfig,
    processors: Processors,
    taken: Collection[int],
    share: MachineShare | None,
    *,
    is_small: bool,
) -> Placement:
    """Where the threads of an engine of a server live. With a small model, and on a machine with
    many cores, one core is for the rest of the server."""
    if share is not None:
        cores, count = share.cores(processors), config.num_threads or 1
        return Placement(count, cores if len(cores) >= count else ())
    spare = is_small or len(processors.chosen(config.numa)) > PINNED_FROM
    count = machine.num_threads(config, spare, processors)
    return place(processors, count, config.numa, taken)


def _room_beside(ledger: MemoryLedger, plan: MemoryPlan) -> Callable[[], int]:
    """The room for this engine's cache: that of the machine, and its part of what all engines were
    promised, where that is more than there is."""
    room = MemoryRoom()

    def room_now() -> int:
        held = held_bytes(os.getpid())
        mine = Promise(plan.promised_bytes, plan.least_bytes, held)
        part = part_of(mine, ledger.others_now(), main_memory.available_bytes())
        return room() if part >= mine.promised else min(room(), part - held)

    return room_now


def _refuse_replicas(
    checkpoint: Checkpoint,
    plan_with: Callable[..., MemoryPlan],
    share: MachineShare,
    num_fronts: int,
) -> None:
    """Raise `ConfigError` if fewer engines would fit into main memory; it says how many."""
    free = share.main_memory_of_all
    size = checkpoint.config.vocab_size
    memory = memory_of_server(size, free=free, num_fronts=num_fronts)
    num = replicas_that_fit(lambda count: plan_with(server=memory.divided(count)), share.count - 1)
    if num:
        raise ConfigError(
            "replicas",
            f"{share.count} do not fit into the {gib(free)} that are free: at"
            f" most {num} would; infer plan --replicas N says what each needs",
        )


def pinned_settings(core: EngineCore, device: torch.device) -> dict[str, Any]:
    """Settings that an engine which replaces this one must keep.

    On a GPU the size of the cache follows from the memory that was free. The next engine continues
    the same requests, so it gets the same number of pages."""
    if device.type != "cuda":
        return {}
    scheduler = core.scheduler
    return {
        "kv_cache_pages": scheduler.allocator.num_usable,
        "max_seq_len": scheduler.config.max_seq_len,
    }


def prepare_process(settings: dict[str, Any]) -> Blueprint:
    """`prepare` for `replicas.child`, from the fields of an `EngineConfig`."""
    settings = dict(settings)
    given, num_fronts = settings.pop(SETTING, None), settings.pop(NUM_FRONTS, 1)
    config = EngineConfig(**settings)
    if given is not None:
        share = MachineShare(**given)
        return prepare(_with_share(config, share), num_fronts, share)
    return prepare(config, num_fronts)


def _with_share(config: EngineConfig, share: MachineShare) -> EngineConfig:
    """The settings of one of several engines: its GPU, or its number of threads. Raises
    `ConfigError` if there are more engines than GPUs."""
    if machine.choose_device(config).type == "cuda":
        count = torch.cuda.device_count()
        if share.count > count:
            raise ConfigError(
                "replicas",
                f"{share.count} do not fit: each needs a GPU, and there are {count} here; at most"
                f" {count} fit",
            )
        return replace(config, device=f"cuda:{share.index}")
    if config.num_threads is not None:
        return config
    return replace(config, num_threads=share.num_threads(read_processors()))


def _build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    plan: MemoryPlan,
    where: tuple[torch.dtype, torch.device],
    restrictions: Restrictions,
    announce: Announce,
    room: Callable[[], int],
    has_process: bool,
) -> tuple[EngineCore, EngineLimits]:
    started_s = time.perf_counter()
    _, device = where
    before = machine.used_bytes(device)
    begin_stage("loading the weights")
    model = _load(config, checkpoint, plan, where)
    after = machine.used_bytes(device)
    _warn_of_variance(config, model, device)
    scheduler_config = _scheduler_config(config, plan, device)
    seats = 1 if config.batching_mode == "sequential" else scheduler_config.max_batch_size
    factory = RunnerFactory(config, plan, model, restrictions, device, seats, has_process)
    begin_stage("making the KV cache")
    num_pages = pages_that_fit(factory)
    storage = factory.storage(num_pages)
    begin_stage("trying the kernels")
    runner = factory.runner(storage)
    if factory.launches:
        factory.warm_up(runner)
    on_cpu = device.type == "cpu"
    low_water = low_water_pages(plan, storage.num_tensors) if on_cpu else None
    allocator = _allocator(config, num_pages, plan.page_size, low_water)
    drafter, of_draft = _drafter(config, draft, plan, checkpoint.config.vocab_size, device)
    allowed = restrictions.allowed
    scheduler = Scheduler(scheduler_config, allocator, time.monotonic, allowed, drafter)
    pool = Pool(allocator, storage)
    keeper = _keeper(config, pool, scheduler, of_draft, room) if on_cpu else None
    limits = EngineLimits(
        vocab_size=checkpoint.config.vocab_size,
        max_seq_len=plan.max_seq_len,
        num_seats=scheduler.num_seats,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        batching_mode=config.batching_mode,
        page_size=plan.page_size,
        prefix_caching=config.prefix_caching,
        weights=f"{plan.dtype} on {device}",
        weight_bytes=plan.weight_bytes,
    )
    held = None if before is None or after is None else after - before
    _log_ready(checkpoint.name, plan, device, held, num_pages, started_s)
    kv_bytes = (num_pages + 1) * plan.page_size * plan.kv_bytes_per_token
    core = EngineCore(
        scheduler, runner, announce, kv_bytes=kv_bytes, cores_taken=CoresTaken(), keeper=keeper
    )
    if problem := core.try_out():
        raise LoadError(f"a first step fails, so every request would: {problem}")
    return core, limits


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    plan: MemoryPlan,
    where: tuple[torch.dtype, torch.device],
) -> Model:
    """The model with its weights, as tensors of a dtype on a device."""
    with reading(f"the weights of {checkpoint.name}"), verified(checkpoint):
        if checkpoint.borrowed is not None:
            return checkpoint.borrowed(where[0])
        source = _source(config, checkpoint, *where)
        return build_model(checkpoint.config, source, plan.max_seq_len)


def _keeper(
    config: EngineConfig,
    pool: Pool,
    scheduler: Scheduler,
    of_draft: Sequence[Pool],
    room: Callable[[], int],
) -> MemoryKeeper:
    return MemoryKeeper(
        pool,
        scheduler,
        room,
        keep_s=config.cache_keep_s,
        others=of_draft,
        may_limit=config.kv_cache_backend == "paged",
    )


def _grammar_compiler(files: TextFiles, model: ModelConfig) -> Compiler:
    compiler = Compiler(read_vocabulary(files, model.vocab_size))
    main_memory.return_freed_memory()  # the files' text, and a tokenizer
    return compiler


def _warn_of_variance(config: EngineConfig, model: Model, device: torch.device) -> None:
    """Log it if a row's bits depend on the other rows of its step."""
    if device.type == "cpu" and (problem := batch_invariance_problem(model)):
        log.warning("%s", problem)
        if config.speculative:
            log.warning("speculation changes the rows of a step, so it may change tokens, too")


def _drafter(
    config: EngineConfig,
    draft: Checkpoint | None,
    plan: MemoryPlan,
    vocab_size: int,
    device: torch.device,
) -> tuple[Drafter | None, Sequence[Pool]]:
    """Load the draft model, if there is one, with a cache of its own, which is returned, too.
    `vocab_size`: number of the model's logits.

    Raises `LoadError` if it cannot be read or computes nothing.
    """
    settings, sizes = config.of_draft_model(), plan.draft
    if draft is None or settings is None or sizes is None:
        return None, ()
    with reading(f"the weights of the draft model {draft.name}"), verified(draft):
        source = draft.source(machine.choose_dtype(settings, draft.config, device), device)
        source = source.with_layers(settings.weight_format, settings.batch_invariant)
        model = build_model(draft.config, source, sizes.max_seq_len)
    held = getattr(torch, sizes.kv_cache_dtype)
    num_pages, page_size = sizes.num_pages + 1, sizes.page_size
    wanted = config.attention_backend
    storage = make_storage(wanted, model.config, (num_pages, page_size), held, device)
    attention = make_attention(wanted, storage, model.config)
    caches = (*storage.keys, *storage.values)
    sampler, threads = sampler_for(vocab_size), threads_for(model, attention)
    runner = ModelRunner(model, attention, None, caches, device, sampler, threads)
    allocator = PageAllocator(num_pages, page_size, low_water=0)
    drafter = Drafter(
        runner,
        allocator,
        time.monotonic,
        vocab_size=min(vocab_size, draft.config.vocab_size),
        max_seq_len=sizes.max_seq_len,
        max_tokens=min(CPU_TOKENS_BESIDE_STREAMS, plan.max_num_batched_tokens),
        cost_ratio=min(1.0, sizes.weight_bytes / plan.weight_bytes),
    )
    if problem := drafter.try_out():
        raise LoadError(f"a first draft with {draft.name} fails: {problem}")
    log.info(
        "draft model: %s, weights %s, KV cache %s",
        *(draft.name, gib(sizes.weight_bytes), gib(sizes.kv_bytes)),
    )
    return drafter, [Pool(allocator, storage)]


def _source(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> WeightSource:
    """The checkpoint's tensors, for linear layers of the kind that the settings ask for."""
    blocks = chosen_blocks(config, checkpoint, device)
    return checkpoint.source(dtype, device).with_layers(
        config.weight_format, config.batch_invariant, blocks.read if blocks else None
    )


def _log_ready(
    name: str,
    plan: MemoryPlan,
    device: torch.device,
    weight_bytes: int | None,
    num_pages: int,
    started_s: float,
) -> None:
    """Log the planned and the actual sizes. `weight_bytes` is by how much the process grew: below 0
    where it gave memory of an earlier engine back meanwhile."""
    log.info(
        "%s: %s on %s, weights %s (planned %s), KV cache %s, %s (planned %s) for %s tokens,"
        " ready in %.1f s",
        name,
        plan.dtype,
        device,
        "?" if weight_bytes is None or weight_bytes < 0 else gib(weight_bytes),
        gib(plan.weight_bytes),
        plan.kv_cache_dtype,
        gib((num_pages + 1) * plan.page_size * plan.kv_bytes_per_token),
        gib(plan.kv_bytes),
        f"{num_pages * plan.page_size:,}",
        time.perf_counter() - started_s,
    )


def _allocator(
    config: EngineConfig, num_pages: int, page_size: int, low_water: int | None
) -> PageAllocator:
    """The allocator of `num_pages` pages, and of page 0."""
    return PageAllocator(
        num_pages + 1,
        page_size,
        enable_prefix_caching=config.prefix_caching,
        keeps_computed=config.kv_cache_backend != "none",
        low_water=low_water,
    )


def _scheduler_config(
    config: EngineConfig, plan: MemoryPlan, device: torch.device
) -> SchedulerConfig:
    """The scheduler's settings, with defaults that depend on model and machine resolved."""
    beside = CUDA_TOKENS_BESIDE_STREAMS if device.type == "cuda" else CPU_TOKENS_BESIDE_STREAMS
    divides = config.kv_cache_backend != "none" and config.max_num_batched_tokens is None
    max_batch_size = config.max_batch_size or machine.default_seats(device)
    check_min_batch_size(config.min_batch_size, max_batch_size)
    return SchedulerConfig(
        max_batch_size=max_batch_size,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_tokens_beside_streams=beside if divides else None,
        max_seq_len=plan.max_seq_len,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        batching_mode=config.batching_mode,
        scheduler_policy=config.scheduler_policy,
        batch_wait_timeout_s=config.batch_wait_timeout_s,
        min_batch_size=config.min_batch_size,
        static_order=config.static_order,
        max_step_ms=config.max_step_ms,
        speculative=config.speculative,
        hold_pages_until_batch_ends=config.kv_cache_backend == "contiguous",
    )


def build_async_llm(config: EngineConfig) -> AsyncLLM:
    """An engine in a thread behind the asyncio façade; not started yet."""
    from infer.engine.client.async_llm import AsyncLLM

    parts = assemble(config)
    return AsyncLLM(EngineThread(parts.core), parts.input_processor, parts.model_name)
