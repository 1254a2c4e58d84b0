"""What a server with some settings needs on this machine: `plan_for`, and how many engines fit

`infer plan` asks for it. It reads a checkpoint's config and no weights, makes no tokenizer and, for
a CPU, imports no torch, so that it answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from infer.config import EngineConfig
from infer.engine.build.checkpoint import (
    Checkpoint,
    chosen_blocks,
    defaults_for,
    find_checkpoint,
)
from infer.engine.build.draft_checkpoint import find_draft
from infer.engine.build.hardware import planned_device
from infer.engine.build.memory_ledger import MemoryLedger, for_newcomer
from infer.engine.build.memory_plan import MemoryPlan, make_plan, replicas_that_fit
from infer.engine.build.processors import Cpu, read_processors
from infer.engine.build.server_memory import ServerMemory, memory_of_server
from infer.types.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    import torch


def planner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device | Cpu,
) -> Callable[..., MemoryPlan]:
    """`make_plan` of these settings and checkpoints; what it takes is `free` or `server`."""
    return partial(
        make_plan,
        config,
        checkpoint.config,
        checkpoint.name,
        blocks=chosen_blocks(config, checkpoint, device),
        draft=None if draft is None else (draft.config, draft.name),
    )


def opened(config: EngineConfig) -> Checkpoint:
    """The checkpoint that the settings name, for several of the functions below."""
    return find_checkpoint(config.model, revision=config.revision, model_impl=config.model_impl)


def request_defaults(
    config: EngineConfig, checkpoint: Checkpoint | None = None
) -> SamplingDefaults:
    """What requests to this model get where they leave out fields; reads no weights."""
    return defaults_for(checkpoint or opened(config), config)


def plan_for(
    config: EngineConfig,
    checkpoint: Checkpoint | None = None,
    *,
    free: int | None = None,
    replicas: int = 1,
    fronts: int = 1,
) -> MemoryPlan:
    """The memory plan of a server with these settings on this machine; loads nothing.

    `free`: bytes to plan with instead of what the device has free. `replicas`: number of engines
    between which main memory is divided; the plan is that of one of them. `fronts`: number of
    processes that answer HTTP.
    """
    checkpoint = checkpoint or opened(config)
    device = planned_device(config)
    plan_with = planner(config, checkpoint, find_draft(config), device)
    if device.type != "cpu":
        return plan_with(free=free)
    memory = _memory_of_server(checkpoint, free, fronts)
    if free is None:
        ledger = MemoryLedger()
        with ledger.planning():
            usual, most = for_newcomer(memory.free, ledger.others())
        promised = memory.free - usual
        memory = replace(memory, free=usual, promised=promised)
        plan = plan_with(server=memory.divided(replicas))
        if not plan.fits:
            plan = plan_with(server=replace(memory, free=most).divided(replicas))
        return plan
    return plan_with(server=memory.divided(replicas))


def most_replicas(
    config: EngineConfig,
    checkpoint: Checkpoint | None = None,
    *,
    free: int | None = None,
    fronts: int = 1,
) -> int:
    """The number of engines with these settings that fit on this machine: into main memory, with a
    core for each, or one on each GPU. `free`, `fronts`: see `plan_for`."""
    checkpoint = checkpoint or opened(config)
    device = planned_device(config)
    plan_with = planner(config, checkpoint, find_draft(config), device)
    if device.type == "cuda":
        import torch

        return torch.cuda.device_count() if plan_with(free=free).fits else 0
    memory = _memory_of_server(checkpoint, free, fronts)
    most = read_processors().num_threads(numa="all")
    return replicas_that_fit(lambda count: plan_with(server=memory.divided(count)), most)


def _memory_of_server(checkpoint: Checkpoint, free: int | None, fronts: int) -> ServerMemory:
    vocab_size = checkpoint.config.vocab_size
    return memory_of_server(vocab_size, free=free, pids=[os.getpid()], num_fronts=fronts)
