"""`infer bench gpu`: how near a model comes to the limits of the GPU at hand.

The GPU's own peaks are measured first, with a large copy (bytes read and written), a large read and
a large product; those of the data sheet are not used. Then each row has one measured value and the
limit that the peaks set to it: the step of 1 to 256 streams at a context of 512 tokens, requests of
mixed lengths, prompts, the device's idle time between steps, the launches of a step, and the host's
time for each sequence and step. `gpu_kernels` has the rows of single kernels. `WANTED` has the
goals of this project, by GPU and model.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from infer.bench.gpu_kernels import CONTEXT, CachedAttention, kernel_rows, weight_size
from infer.bench.gpu_rows import Peaks, Row
from infer.bench.results import environment
from infer.config import EngineConfig
from infer.engine.build.assemble import prepare
from infer.engine.core import EngineCore
from infer.engine.loop import freeze_heap as freeze_heap
from infer.errors import ConfigError
from infer.kernels import cuda
from infer.kernels.invariance import linears
from infer.models.model_config import ModelConfig
from infer.types import Request, SamplingParams

STREAMS = (1, 8, 32, 128, 256)
STEPS = 60
BATCH_REQUESTS, BATCH_OUTPUT = 128, 128
BATCH = f"{BATCH_REQUESTS} requests, 100 to 400 tokens in, {BATCH_OUTPUT} out, greedy"
"""A workload that other engines are measured with, too."""
COPIED_BYTES = 4 << 30
MODEL_NAMES = {
    (28, 1024): "Qwen3 0.6B",
    (16, 2048): "Llama 3.2 1B",
    (28, 3072): "Llama 3.2 3B",
    (36, 2560): "Qwen3 4B",
}
"""The names of published models in `WANTED`, by number of layers and hidden size."""
WANTED: dict[tuple[str, str], dict[str, float]] = {
    ("H100", "Qwen3 0.6B"): {
        "step 1": 0.80, "step 32": 1.45, "step 128": 3.9, "step 256": 7.3,
        "256 requests": 18_000, "prompts": 315,
    },
    ("H100", "Llama 3.2 1B"): {
        "step 1": 1.05, "step 32": 1.35, "step 128": 2.1, "step 256": 3.1,
        "256 requests": 33_000, "prompts": 395,
    },
    ("H100", "Llama 3.2 3B"): {"step 1": 2.55, "prompts": 435},
    ("H100", "Qwen3 4B"): {"step 1": 3.2, "prompts": 435},
    ("H200", "Qwen3 0.6B"): {
        "step 1": 0.65, "step 32": 1.0, "step 128": 2.75, "step 256": 5.1,
        "256 requests": 25_000, "prompts": 315,
    },
    ("H200", "Llama 3.2 1B"): {
        "step 1": 0.80, "step 32": 0.95, "step 128": 1.45, "step 256": 2.2,
        "256 requests": 45_000, "prompts": 395,
    },
    ("H200", "Llama 3.2 3B"): {"step 1": 1.85, "prompts": 435},
    ("H200", "Qwen3 4B"): {"step 1": 2.3, "prompts": 435},
}  # fmt: skip
ANY_MODEL = {
    "H100": {"rope": 2.4, "idle 256": 3.0, "idle 1": 30.0, "host": 5.0},
    "H200": {"rope": 3.4, "idle 256": 3.0, "idle 1": 30.0, "host": 5.0},
}


def measure_gpu(
    config: EngineConfig, print_row: Callable[[Row], None], *, quick: bool = False
) -> dict[str, Any]:
    """Everything that was measured, as plain data.

    `print_row` is called with each row as soon as it is measured. With `quick`, only one stream and
    prompts are measured. Raises `ConfigError` where the GPU cannot be used.
    """
    if not torch.cuda.is_available():
        raise ConfigError("device", "this measures a GPU, and torch finds no CUDA device here")
    device = torch.device("cuda")
    if reason := cuda.obstacle(device):
        raise ConfigError("device", f"the kernels for CUDA cannot run here: {reason}")
    gpu = torch.cuda.get_device_name(device)
    peaks = measure_peaks(device)
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        print_row(row)

    started_s = time.perf_counter()
    core = build_core(config)
    ready_s = time.perf_counter() - started_s
    shape: ModelConfig = core.runner.model.config  # type: ignore[attr-defined]
    name = MODEL_NAMES.get((shape.num_layers, shape.hidden_size), "")
    kind = next((kind for kind in ANY_MODEL if kind in gpu), "")
    wanted = {**ANY_MODEL.get(kind, {}), **WANTED.get((kind, name), {})}
    note(Row("ready", "ready after", "s", ready_s, wanted=30.0))
    layers = linears(core.runner.model)  # type: ignore[attr-defined]
    attention = CachedAttention(core.runner.backend, core.runner.caches)  # type: ignore[attr-defined]
    kernels = kernel_rows(shape, layers, attention, peaks, device, wanted, timed_us)
    for row in () if quick else kernels:
        note(row)
    for row in engine_rows(core, shape, peaks, wanted, quick):
        note(row)
    return {
        **environment(),
        "gpu": gpu,
        "torch": torch.__version__,
        "model": name or config.model or "",
        "settings": {"batch_invariant": config.batch_invariant, "dtype": config.dtype},
        "peaks": asdict(peaks),
        "rows": [row.as_dict() for row in rows],
    }


def build_core(config: EngineConfig) -> EngineCore:
    """An engine on the GPU, for a caller that makes its steps one by one."""
    core, _ = prepare(config).build(lambda request_id: None)
    freeze_heap()  # as the engine's own process does
    if not hasattr(core.runner, "launch"):
        raise ConfigError("attention_backend", "the kernels for CUDA are not in use; use 'auto'")
    return core


def timed_us(work: Callable[[], object], calls: int = 1, repeats: int = 15) -> float:
    """The median time of a call on the device, in µs. `calls` calls are in one CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    times = []
    for _ in range(repeats + 2):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000 / calls)
    return statistics.median(times[2:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_peaks(device: torch.device) -> Peaks:
    """The peaks, by a copy and a read of several GiB and a bfloat16 product of random 8192³."""
    copy_us, read_us = _memory_us(device)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_us = timed_us(lambda: torch.mm(a, b), 4)
    return Peaks(
        copy_tb_s=2 * COPIED_BYTES / copy_us / 1e6,
        read_tb_s=COPIED_BYTES / read_us / 1e6,
        product_tflop_s=2 * 8192**3 / product_us / 1e6,
    )


def _memory_us(device: torch.device) -> tuple[float, float]:
    """The times of a copy and of a read of `COPIED_BYTES` bytes, in µs."""
    source = torch.empty(COPIED_BYTES // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return timed_us(lambda: target.copy_(source), 2), timed_us(lambda: source.sum(), 2)


# The engine.


def _request(name: str, num_prompt: int, num_output: int, vocab: int, **sampling: Any) -> Request:
    numbers = random.Random(name)
    prompt = tuple(numbers.randrange(min(vocab, 30_000)) for _ in range(num_prompt))
    params = SamplingParams(**sampling)
    return Request(name, prompt, params, seed=len(name), max_tokens=num_output)


def engine_rows(
    core: EngineCore, shape: ModelConfig, peaks: Peaks, wanted: dict[str, float], quick: bool
) -> Iterator[Row]:
    """Rows for steps, mixed requests and prompts, with limits by their bytes and operations."""
    model = core.runner.model  # type: ignore[attr-defined]
    layers = {id(layer): layer for layer in linears(model)}.values()
    head = shape.vocab_size * shape.hidden_size
    weights = sum(layer.num_weights for layer in layers)
    weight_bytes = sum(layer.num_weights * weight_size(layer) for layer in layers)
    token_bytes = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    for count in STREAMS[:1] if quick else STREAMS:
        if count > core.scheduler.num_seats:
            continue
        steps = decode_steps(core, count, shape.vocab_size)
        num_bytes = weight_bytes + count * (CONTEXT * token_bytes + 8 * shape.vocab_size)
        floor_ms = num_bytes / peaks.read_tb_s / 1e9
        yield Row(
            f"step {count}", f"step of {count} at a context of {CONTEXT}", "ms",
            steps["step_ms"], floor=floor_ms, wanted=wanted.get(f"step {count}"),
        )  # fmt: skip
        if count == 1:
            yield Row(
                "idle 1", "idle between steps of one stream", "µs", steps["idle_ms"] * 1000,
                wanted=wanted.get("idle 1"),
            )  # fmt: skip
        if count == 256:
            share = 100 * steps["idle_ms"] / steps["step_ms"]
            yield Row(
                "idle 256", "idle between steps of 256", "% of a step", share,
                wanted=wanted.get("idle 256"),
            )  # fmt: skip
            yield Row(
                "host", "host time for a sequence and step, of 256", "µs", steps["host_us"] / 256,
                wanted=wanted.get("host"),
            )  # fmt: skip
    per_token = (
        2 * (weights - head) + 2 * shape.num_layers * shape.num_heads * shape.head_dim * 1024
    )
    took_s = min(run_prompts(core, shape.vocab_size, turn) for turn in range(4))
    yield Row(
        "prompts", "4 prompts of 1,024", "Tflop/s", per_token * 4096 / took_s / 1e12,
        floor=peaks.product_tflop_s, wanted=wanted.get("prompts"), higher_is_better=True,
    )  # fmt: skip
    if quick:
        return
    rates = [run_batch(core, shape.vocab_size, turn) for turn in range(2)]
    yield Row("batch", BATCH, "tok/s", max(rates), higher_is_better=True)
    rates = [run_mixed(core, shape.vocab_size, turn) for turn in range(2)]
    yield Row(
        "256 requests", "256 requests, 100 to 1,024 tokens in and out", "tok/s", max(rates),
        wanted=wanted.get("256 requests"), higher_is_better=True,
    )  # fmt: skip
    for count in (STREAMS[0], STREAMS[-1]):
        if count <= core.scheduler.num_seats:
            launches = step_launches(core, count, shape.vocab_size)
            what = f"launches of a step of {count}"
            yield Row(f"launches {count}", what, "launches", launches or None)


class _TimedFlight:
    """A `Flight` that also measures how long the host waits for its results."""

    def __init__(self, flight: Any, waited_s: list[float]) -> None:
        """The time of waiting is added to the last element of `waited_s`."""
        self._flight = flight
        self._waited_s = waited_s

    def results(self) -> Any:
        """See `Flight`."""
        begun_s = time.perf_counter()
        results = self._flight.results()
        self._waited_s[-1] += time.perf_counter() - begun_s
        return results

    def elapsed_ms(self) -> float | None:
        """See `Flight`."""
        elapsed_ms: float | None = self._flight.elapsed_ms()
        return elapsed_ms


@contextmanager
def decoding(core: EngineCore, count: int, vocab: int) -> Iterator[None]:
    """A context in which `count` sequences decode, at a context of about `CONTEXT` tokens."""
    num_prompt = CONTEXT - STEPS // 2 - 30
    requests = [
        _request(f"d{count}-{i}", num_prompt, STEPS + 200, vocab, temperature=0)
        for i in range(count)
    ]
    for request in requests:
        core.add(request)
    seated = core.scheduler.running
    while len(seated) < count or any(s.num_remaining > 1 for s in seated):
        core.step()
    for _ in range(30):
        core.step()
    torch.cuda.synchronize()
    yield
    for request in requests:
        core.abort(request.request_id)
    while core.has_work:
        core.step()
    torch.cuda.synchronize()


def decode_steps(core: EngineCore, count: int, vocab: int) -> dict[str, float]:
    """Medians of a step: its time, the device's idle time before it, the host's own time in it."""
    runner = core.runner
    flights: list[Any] = []
    waited_s = [0.0]
    launch = runner.launch  # type: ignore[attr-defined]

    def noted(plan: Any) -> Any:
        flights.append(launch(plan))
        return _TimedFlight(flights[-1], waited_s)

    runner.launch = noted  # type: ignore[attr-defined]
    steps, hosts = [], []
    try:
        with decoding(core, count, vocab):
            flights.clear()
            for _ in range(STEPS):
                waited_s[-1] = 0.0
                begun_s = time.perf_counter()
                core.step()
                took_s = time.perf_counter() - begun_s
                steps.append(took_s)
                hosts.append(took_s - waited_s[-1])
            timed = flights[:STEPS]
    finally:
        runner.launch = launch  # type: ignore[attr-defined]
    idle = [a.events[1].elapsed_time(b.events[0]) for a, b in itertools.pairwise(timed)]
    return {
        "step_ms": 1000 * statistics.median(steps),
        "idle_ms": max(0.0, statistics.median(idle)),
        "host_us": 1e6 * statistics.median(hosts),
    }


def step_launches(core: EngineCore, count: int, vocab: int) -> int:
    """The number of kernels that a step launches; 0 if the profiler sees none, as without CUPTI.

    To be called after all that is timed, which a profiler may slow down for good.
    """
    with decoding(core, count, vocab):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            core.step()
            torch.cuda.synchronize()
    on_device = [e for e in profile.events() or () if e.device_type.name == "CUDA"]
    return len([e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))])


def _run(core: EngineCore, requests: list[Request]) -> tuple[int, float]:
    """Runs the requests to their ends; returns the number of tokens and the seconds."""
    begun_s, count = time.perf_counter(), 0
    for request in requests:
        core.add(request)
    while core.has_work:
        count += sum(output.token_id is not None for output in core.step())
    return count, time.perf_counter() - begun_s


def run_prompts(core: EngineCore, vocab: int, turn: int) -> float:
    """Seconds for four prompts of 1,024 tokens."""
    names = [f"p{turn}-{i}" for i in range(4)]
    return _run(core, [_request(name, 1024, 1, vocab, temperature=0) for name in names])[1]


def run_batch(core: EngineCore, vocab: int, turn: int) -> float:
    """Tokens a second of `BATCH`."""
    sampling = SamplingParams(temperature=0)
    requests = [
        Request(f"b{turn}-{i}", tuple(prompt), sampling, seed=i, max_tokens=BATCH_OUTPUT)
        for i, prompt in enumerate(batch_prompts(vocab))
    ]
    count, took_s = _run(core, requests)
    return count / took_s


def batch_prompts(vocab: int, count: int = BATCH_REQUESTS) -> list[list[int]]:
    """The prompts of `BATCH`, the same each time."""
    numbers = random.Random(0)
    return [
        [numbers.randrange(min(vocab, 30_000)) for _ in range(numbers.randint(100, 400))]
        for _ in range(count)
    ]


def run_mixed(core: EngineCore, vocab: int, turn: int) -> float:
    """Tokens a second of 256 simultaneous requests, each of 100 to 1,024 tokens in and out."""
    numbers = random.Random(0)
    requests = [
        _request(
            f"m{turn}-{i}", numbers.randint(100, 1024), numbers.randint(100, 1024), vocab,
            temperature=0.6,
        )
        for i in range(256)
    ]  # fmt: skip
    count, took_s = _run(core, requests)
    return count / took_s
