"""The time that a decode step takes outside of the model: `python benchmarks/overhead_runner.py`.

The table has medians in microseconds for B decoding sequences at two lengths of context. On the
engine's side: packing, the attention backend's plan, and greedy sampling from a vocabulary of 512,
where little but the host's work is left. On the caller's side, for each step: the text of the
tokens, their way through the event loop to the readers, and what the traces of the requests add.
overhead.py measures the scheduler. Nothing else may run at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from infer.attention.cpu import NativeBackend
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.engine.client.mailbox import Mailbox
from infer.engine.client.output import OutputProcessor
from infer.models.hub import SHIPPED_FOLDER
from infer.requests.state import RequestStates
from infer.runner.pack import Packer
from infer.runner.sampler import sample
from infer.schedule.sequence import Chunk, Plan, Sequence
from infer.server.http.context import RequestContext
from infer.server.observe.request_trace import RequestTraces
from infer.text.tokenizer import Tokenizer
from infer.types import Request, SamplingParams, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.step_events import StepEvents

PAGE = 16
COUNTS = (1, 8, 32, 128)
CONTEXTS = (200, 2000)


def make_plan(count: int, context: int) -> Plan:
    """The plan of a step in which each sequence computes one token; pages are in random order."""
    pages = list(range(1, 1 + count * (context // PAGE + 1)))
    random.Random(0).shuffle(pages)
    chunks = []
    for i in range(count):
        sampling = SamplingParams(temperature=0.0)
        sequence = Sequence.from_request(Request(f"{i}", (1,) * 20, sampling, i, 10**6), i)
        sequence.tokens += [7] * (context - 20)
        sequence.num_computed = context - 1
        sequence.table.pages = [pages.pop() for _ in range(-(-context // PAGE))]
        chunks.append(Chunk(sequence, context - 1, 1))
    return tuple(chunks)


def microseconds(run: Callable[[], object], rounds: int) -> float:
    """The median duration of a call."""
    times = []
    for _ in range(rounds + 3):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:]) * 1e6


def step_parts(count: int, context: int, rounds: int) -> dict[str, float]:
    """Measures the engine's side."""
    plan = make_plan(count, context)
    cache = torch.zeros(1 + count * (context // PAGE + 1), PAGE, 1, 8)
    backend = NativeBackend([cache], [cache.clone()], num_heads=1, scale=1.0)
    logits = torch.randn(count, 512)
    packer = Packer(PAGE, torch.device("cpu"))
    step = packer.pack(plan)
    return {
        "pack": microseconds(lambda: packer.pack(plan), rounds),
        "plan": microseconds(lambda: backend.plan(step.layout), rounds),
        "sample": microseconds(lambda: sample(logits, step.sampled), rounds),
    }


def without_engine(tokenizer: Tokenizer) -> AsyncLLM:
    """The caller's side alone; what is measured of it sends nothing to an engine."""
    limits = EngineLimits(
        vocab_size=tokenizer.vocab_size, max_seq_len=10**7, num_seats=1, max_waiting_requests=0
    )
    return AsyncLLM(None, InputProcessor(tokenizer, limits), "")  # type: ignore[arg-type]


def text_parts(count: int, rounds: int) -> dict[str, float]:
    """Measures the caller's side: text alone, then with delivery to a task for each stream."""
    tokenizer = Tokenizer.from_folder(SHIPPED_FOLDER)
    ids = tokenizer.encode("Once upon a time there was a little fox, and it went to the river. ")
    turn = iter(range(10**9))

    def outputs() -> list[StepOutput]:
        token = ids[next(turn) % len(ids)]
        return [StepOutput(f"{i}", token) for i in range(count)]

    sampling = SamplingParams(stop=("###",))
    requests = [Request(f"{i}", (1,), sampling, i, 10**6) for i in range(count)]
    processors = [OutputProcessor(request, tokenizer) for request in requests]

    def push() -> None:
        for processor, output in zip(processors, outputs(), strict=True):
            processor.push(output)

    async def deliver() -> float:
        llm = without_engine(tokenizer)
        boxes = [Mailbox(OutputProcessor(request, tokenizer), merge=False) for request in requests]
        llm._mailboxes = {f"{i}": box for i, box in enumerate(boxes)}

        async def read(box: Mailbox) -> None:
            while True:
                await box.take()

        tasks = [asyncio.create_task(read(box)) for box in boxes]
        times = []
        for _ in range(rounds + 3):
            started = time.perf_counter()
            llm._receive(outputs())
            await asyncio.sleep(0)  # the readers run
            times.append(time.perf_counter() - started)
        for task in tasks:
            task.cancel()
        return statistics.median(times[3:]) * 1e6

    def trace() -> float:
        traces, states = RequestTraces(without_engine(tokenizer)), RequestStates()
        for request in requests:
            traces.begin(request.request_id, RequestContext(), "", [request], 1)
            traces.entered(request, states.add(request.request_id, 1))
        given, times, clock = outputs(), [], 0.0
        for number in range(rounds + 3):
            clock += random.uniform(0.01, 0.02)
            started = time.perf_counter()
            step = StepEvents(number, clock - 0.01, clock, count)
            traces.stepped(states.stepped(given, step))
            times.append(time.perf_counter() - started)
        return statistics.median(times[3:]) * 1e6

    return {
        "text": microseconds(push, rounds),
        "text + delivery": asyncio.run(deliver()),
        "trace": trace(),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        "| B × context | pack | plan | sample | their sum | text | with delivery | trace |"
        " µs a token |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for context in CONTEXTS:
            for count in COUNTS:
                parts: dict[str, Any] = step_parts(count, context, options.rounds)
                engine = sum(parts.values())
                parts |= text_parts(count, options.rounds)
                print(
                    f"| {count} × {context} | {parts['pack']:.0f} | {parts['plan']:.0f} |"
                    f" {parts['sample']:.0f} | {engine:.0f} | {parts['text']:.0f} |"
                    f" {parts['text + delivery']:.0f} |"
                    f" {parts['trace']:.1f} |"
                    f" {(engine + parts['text + delivery'] + parts['trace']) / count:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
