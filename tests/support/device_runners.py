"""A small model on a device runner, its engine core, and requests of every kind."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from infer.attention.sdpa import SDPABackend
from infer.attention.triton import TritonBackend
from infer.config import SchedulerConfig
from infer.engine.core import EngineCore
from infer.models.model import Model, build_model
from infer.models.model_config import ModelConfig
from infer.models.weights import dummy_source
from infer.runner.device_runner import DeviceRunner
from infer.runner.grammar_masks import Restrictions
from infer.runner.graphs import CudaCapture, Graphs, Work
from infer.runner.kv_storage import KVStorage
from infer.runner.model_runner import ModelRunner
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.types import Request, SamplingParams, StepOutput

SHAPE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_seq_len=256,
    norm_eps=1e-6,
    tie_embeddings=True,
    dtype="float32",
    qk_norm=True,
    windows=(None, 8),
)


SEATS, STEP_TOKENS, PAGE, NUM_PAGES = 4, 13, 5, 60


def make_model(device: torch.device, dtype: torch.dtype = torch.float32) -> Model:
    return build_model(SHAPE, dummy_source(dtype, device), SHAPE.max_seq_len)


def no_grammars() -> Any:
    raise AssertionError("nobody here has a grammar")


def storage(device: torch.device, dtype: torch.dtype) -> KVStorage:
    made = KVStorage(SHAPE, NUM_PAGES, PAGE, dtype=dtype, device=device)
    for cache in (*made.keys, *made.values):
        cache[1:] = float("nan")  # page 0 is scrap, and finite
    return made


def arrange(made: KVStorage, kind: type, **settings: Any) -> Any:
    return kind(made.keys, made.values, **SHAPE.attention(), **settings)


def plain_runner(model: Model, device: torch.device) -> ModelRunner:
    made = storage(device, torch.float32)
    backend = arrange(made, SDPABackend)
    caches = (*made.keys, *made.values)
    return ModelRunner(model, backend, Restrictions(no_grammars), caches, device)


class Replays:
    """Captures that are replayed on the CPU: the work of the launch that was captured is done
    again, so whatever it took from anywhere but the buffers is of that launch."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, compute: Work) -> Work:
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            compute()

        return replay


def no_capture(compute: Work) -> Work:
    raise AssertionError("steps are not captured here")


class Eager(Graphs):
    """Graphs that are not: each step is launched kernel by kernel."""

    def run(self, key: Any, compute: Work) -> None:
        compute()


def device_runner(
    model: Model,
    device: torch.device,
    *,
    graphs: bool,
    dtype: torch.dtype = torch.float32,
    ordered: bool = False,
    captures: Any = None,
) -> DeviceRunner:
    made = storage(device, dtype)
    if captures is None:
        captures = Replays() if device.type == "cpu" else CudaCapture(device)
    return DeviceRunner(
        model,
        arrange(made, TritonBackend, ordered=ordered),
        Restrictions(no_grammars),
        (*made.keys, *made.values),
        device,
        max_tokens=STEP_TOKENS,
        max_sequences=SEATS,
        max_seq_len=SHAPE.max_seq_len,
        graphs=Graphs(captures) if graphs else Eager(no_capture),
    )


def core_of(
    runner: Any, *, num_pages: int = NUM_PAGES, keeps_computed: bool = True, **settings: Any
) -> EngineCore:
    config = SchedulerConfig(
        **{
            "max_batch_size": SEATS,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_seq_len": SHAPE.max_seq_len,
            **settings,
        }
    )
    allocator = PageAllocator(num_pages, PAGE, keeps_computed=keeps_computed)
    return EngineCore(Scheduler(config, allocator, time.monotonic), runner)


def request(name: str, num_prompt: int, num_output: int, **sampling: Any) -> Request:
    numbers = np.random.default_rng(len(name) * 1000 + num_prompt)
    prompt = tuple(int(n) for n in numbers.integers(0, SHAPE.vocab_size, num_prompt))
    params = SamplingParams(**{"temperature": 0, **sampling})
    # Log-probabilities of a prompt need all of it computed; the engine's client sees to it, too.
    scope = "" if params.prompt_logprobs is None else name
    made = Request(name, prompt, params, seed=num_prompt, max_tokens=num_output)
    return replace(made, cache_scope=scope)


def run(core: EngineCore, requests: list[Request]) -> dict[str, list[StepOutput]]:
    """Requests come one by one between steps; outputs by request."""
    outputs: dict[str, list[StepOutput]] = {each.request_id: [] for each in requests}
    left = list(requests)
    while left or core.has_work:
        if left:
            core.add(left.pop(0))
        for output in core.step():
            outputs[output.request_id].append(output)
        core.scheduler.check()
    return outputs


def tokens(outputs: dict[str, list[StepOutput]]) -> dict[str, list[int | None]]:
    return {name: [o.token_id for o in each] for name, each in outputs.items()}
