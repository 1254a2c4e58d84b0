"""`DeviceRunner` against `ModelRunner`: the same requests, mixed in every way, one step ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.attention.sdpa import SDPABackend
from infer.attention.triton import TritonBackend
from infer.config import SchedulerConfig
from infer.engine.core import EngineCore
from infer.models.model import Model, build_model
from infer.models.model_config import ModelConfig
from infer.models.weights import dummy_source
from infer.runner.device_runner import DeviceRunner
from infer.runner.grammar_masks import Restrictions
from infer.runner.graphs import CudaCapture, Graphs
from infer.runner.kv_storage import KVStorage
from infer.runner.model_runner import ModelRunner
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.types import Request, SamplingParams, StepOutput
from tests.support.kernel_dtypes import INTERPRETED

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
    windows = [SHAPE.window(layer) for layer in range(SHAPE.num_layers)]
    return kind(
        made.keys, made.values, num_heads=SHAPE.num_heads, scale=SHAPE.attention_scale,
        windows=windows, **settings,
    )  # fmt: skip


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

    def __call__(self, compute: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        self.num_captured += 1

        def replay() -> Tensor | None:
            self.num_replayed += 1
            return compute()

        return replay


def no_capture(compute: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    raise AssertionError("steps are not captured here")


class Eager(Graphs[Tensor | None]):
    """Graphs that are not: each step is launched kernel by kernel."""

    def run(self, key: Any, compute: Callable[[], Tensor | None]) -> Tensor | None:
        return compute()


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
        captures = Replays() if device.type == "cpu" else CudaCapture()
    runner = DeviceRunner(
        model,
        arrange(made, TritonBackend, ordered=ordered),
        Restrictions(no_grammars),
        (*made.keys, *made.values),
        device,
        max_tokens=STEP_TOKENS,
        max_sequences=SEATS,
        max_seq_len=SHAPE.max_seq_len,
        capture=captures if graphs else no_capture,
    )
    if not graphs:
        runner._graphs = Eager(no_capture)
    return runner


def core_of(runner: Any, *, num_pages: int = NUM_PAGES, **settings: Any) -> EngineCore:
    config = SchedulerConfig(
        **{
            "max_batch_size": SEATS,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_seq_len": SHAPE.max_seq_len,
            **settings,
        }
    )
    allocator = PageAllocator(num_pages, PAGE, enable_prefix_caching=True)
    return EngineCore(Scheduler(config, allocator, time.monotonic), runner)


def request(name: str, num_prompt: int, num_output: int, **sampling: Any) -> Request:
    numbers = np.random.default_rng(len(name) * 1000 + num_prompt)
    prompt = tuple(int(n) for n in numbers.integers(0, SHAPE.vocab_size, num_prompt))
    params = SamplingParams(**{"temperature": 0, **sampling})
    return Request(name, prompt, params, seed=num_prompt, max_tokens=num_output)


REQUESTS = [
    request("greedy", 3, 4),
    request("a long prompt", 17, 3),
    request("top-p", 2, 4, temperature=1.1, top_p=0.7),
    request("min-p", 1, 3, temperature=1.3, min_p=0.05, top_p=0.95),
    request("log-probabilities", 2, 3, temperature=1.5, top_k=9, logprobs=3),
    request("of the prompt", 6, 2, prompt_logprobs=2),
    request("of all", 2, 2, temperature=1.0, logprobs=1),
    request("penalties", 3, 3, temperature=0.8, frequency_penalty=0.7, logit_bias={3: 2.0}),
]
FEW = 6
"""of them, in the default suite"""


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


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(torch.device("cpu" if INTERPRETED else "cuda"))


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[str, list[StepOutput]]:
    return run(
        core_of(plain_runner(model, torch.device("cpu" if INTERPRETED else "cuda"))), REQUESTS
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("graphs", "count"),
    [(True, FEW), pytest.param(False, 99, marks=SLOW), pytest.param(True, 99, marks=SLOW)],
)
def test_every_request_has_the_tokens_of_the_plain_runner(
    graphs: bool,
    count: int,
    model: Model,
    expected: dict[str, list[StepOutput]],
    device: torch.device,
) -> None:
    captures = Replays() if INTERPRETED else None
    runner = device_runner(model, device, graphs=graphs, captures=captures)
    core = core_of(runner)
    chosen = REQUESTS[:count]
    outputs = run(core, chosen)
    wanted = tokens(expected)
    assert tokens(outputs) == {each.request_id: wanted[each.request_id] for each in chosen}
    for name, each in outputs.items():
        for got, want in zip(each, expected[name], strict=True):
            assert (got.finish_reason, got.error) == (want.finish_reason, want.error)
            _assert_alike(got.logprobs, want.logprobs)
            assert len(got.prompt_logprobs or ()) == len(want.prompt_logprobs or ())
            for pair in zip(got.prompt_logprobs or (), want.prompt_logprobs or (), strict=True):
                _assert_alike(*pair)
    assert any(o.logprobs for o in outputs["log-probabilities"])
    assert any(o.prompt_logprobs for o in outputs["of the prompt"])
    stats = core.scheduler.stats
    assert stats.num_steps < sum(r.max_tokens for r in chosen), "nobody had company"
    if captures is not None and graphs:
        assert captures.num_captured == runner.num_graphs < 12
        assert captures.num_replayed > 0


def _assert_alike(got: Any, want: Any) -> None:
    assert (got is None) == (want is None)
    if got is not None:
        assert got.logprob == pytest.approx(want.logprob, abs=2e-4)
        assert [token for token, _ in got.top] == [token for token, _ in want.top]
        assert [p for _, p in got.top] == pytest.approx([p for _, p in want.top], abs=2e-4)


@pytest.mark.slow
def test_top_k_alone_is_drawn_on_the_device(model: Model, device: torch.device) -> None:
    """Among those that it keeps the device goes by id, so its tokens are its own; they are the
    same in any company, and with k = 1 the greedy ones."""
    wanted = [
        request("k1", 5, 4, temperature=0.8, top_k=1),
        request("k7", 9, 4, temperature=0.8, top_k=7, top_p=0.9),
    ]
    greedy = replace(wanted[0], request_id="greedy", sampling=SamplingParams(temperature=0))
    alone = [
        tokens(run(core_of(device_runner(model, device, graphs=False)), [each]))[each.request_id]
        for each in (greedy, wanted[1])
    ]
    together = tokens(run(core_of(device_runner(model, device, graphs=True)), wanted))
    assert together["k1"] == alone[0]
    assert together["k7"] == alone[1]


@pytest.mark.slow
def test_preempted_and_resumed(
    model: Model, expected: dict[str, list[StepOutput]], device: torch.device
) -> None:
    """Few pages: rows of page tables change hands, and prompts are computed again."""
    core = core_of(device_runner(model, device, graphs=True), num_pages=9)
    chosen = [r for r in REQUESTS if r.request_id in ("greedy", "a long prompt", "top-p")]
    chosen += [replace(r, request_id=r.request_id + " 2") for r in chosen]
    outputs = tokens(run(core, chosen))
    assert core.scheduler.stats.num_preemptions > 0
    for name, got in outputs.items():
        assert got == tokens(expected)[name.removesuffix(" 2")]


@pytest.mark.slow
def test_a_row_that_is_not_finite_is_an_error_of_its_request(
    model: Model, expected: dict[str, list[StepOutput]], device: torch.device
) -> None:
    runner = device_runner(model, device, graphs=True)
    core = core_of(runner)
    good, bad = request("greedy", 3, 4), request("broken", 8, 5)
    for each in (good, bad):
        core.add(each)
    outputs = [o for _ in range(3) for o in core.step()]
    [sequence] = [s for s in core.scheduler.running if s.request_id == "broken"]
    runner.caches[0][sequence.table.pages[0]] = float("nan")
    while core.has_work:
        outputs += core.step()
    assert [o.token_id for o in outputs if o.request_id == "greedy"] == tokens(expected)["greedy"]
    end = [o for o in outputs if o.request_id == "broken"][-1]
    assert end.error is not None


@pytest.mark.slow
def test_a_rehearsal_leaves_nothing_behind(
    model: Model, expected: dict[str, list[StepOutput]], device: torch.device
) -> None:
    runner = device_runner(model, device, graphs=True)
    for count in (1, 2, SEATS):
        runner.rehearse(count, 1)
    runner.rehearse(1, STEP_TOKENS)
    chosen = REQUESTS[:3]
    got = tokens(run(core_of(runner), chosen))
    assert got == {each.request_id: tokens(expected)[each.request_id] for each in chosen}
