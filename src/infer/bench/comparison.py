"""The three batching modes one after the other on the same requests, each recorded.

`python -m infer.bench.comparison WORKLOAD SEATS NUM_REQUESTS` prints one JSON object with a
recording of each mode, on the model that ships; with a fourth argument, `events`, the same as
server-sent events while it is computed. `POST /v1/engine/comparisons` runs it as a process
of the lowest priority, which ends when its parent has gone. `benchmarks/modes.py` has the same
requests and settings, and so the same steps.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from infer.bench.recording import Recorder
from infer.bench.results import percentile
from infer.engine.llm import LLM
from infer.requests.state import RequestStates
from infer.types import SamplingParams

MODES = ("sequential", "static", "continuous")
NUM_REQUESTS = 64
_TEXT = "one day the little fox went to the river and saw a red boat under an old tree"
_WORDS = _TEXT.split()

Requests = tuple[list[str], list[SamplingParams]]
Send = Callable[[str, dict[str, Any]], None]
"""Gets the name and the data of an event: `hello`, `frame` or `summary` of a mode."""


def _requests(num_requests: int, num_words: list[int], num_tokens: list[int]) -> Requests:
    rng = random.Random(0)
    prompts, params = [], []
    for _ in range(num_requests):
        words = [rng.choice(_WORDS) for _ in range(rng.choice(num_words))]
        prompts.append("Once upon a time " + " ".join(words))
        params.append(SamplingParams(temperature=0, max_tokens=rng.choice(num_tokens)))
    return prompts, params


def mixed(num_requests: int = NUM_REQUESTS) -> Requests:
    """Prompts of 2 to 200 words and answers of 4 to 64 tokens; some end by themselves."""
    return _requests(num_requests, [2, 8, 40, 200], [4, 16, 32, 64])


def equal(num_requests: int = NUM_REQUESTS) -> Requests:
    """Prompts of 8 words and answers of 32 tokens."""
    return _requests(num_requests, [8], [32])


def long_tail(num_requests: int = NUM_REQUESTS) -> Requests:
    """Prompts of 8 words; one answer in eight has 128 tokens, the others have 8."""
    return _requests(num_requests, [8], [8] * 7 + [128])


WORKLOADS: dict[str, Callable[[int], Requests]] = {
    "mixed": mixed,
    "equal": equal,
    "long_tail": long_tail,
}


def recorded(
    mode: str,
    requests: Requests,
    seats: int,
    step: Callable[[], None],
    send: Send = lambda name, data: None,
) -> dict[str, Any]:
    """The recording of one mode; all requests are there from the start. `step` is called before
    each step, `send` for each part of the recording."""
    # Several threads of the lowest priority would wait for one another beside a busy engine.
    settings: dict[str, Any] = {"batching_mode": mode, "max_batch_size": seats, "num_threads": 1}
    with LLM(dtype="float32", **settings) as llm:
        llm.generate("warm up", SamplingParams(max_tokens=4))
        before, states, core = llm.stats(), RequestStates(), llm.core
        recorder = Recorder(lambda frame: send("frame", frame))
        hello = recorder.hello(
            model=llm.model_name,
            mode=mode,
            num_seats=core.scheduler.num_seats,
            page_size=core.scheduler.allocator.page_size,
            max_seq_len=core.scheduler.config.max_seq_len,
        )
        send("hello", hello)
        first_s: dict[str, float] = {}
        started_s = time.monotonic()
        for number, (prompt, params) in enumerate(zip(*requests, strict=True)):
            request = llm.make_request(prompt, params, request_id=f"request-{number + 1}")
            state = states.add(request.request_id, len(request.prompt_token_ids))
            recorder.entered(request, state)
            core.add(request)
        while core.has_work:
            step()
            outputs = core.step(flush=True)
            now_s = time.monotonic()
            for output in outputs:
                first_s.setdefault(output.request_id, now_s - started_s)
            recorder.stepped(states.stepped(outputs, core.step_events))
        duration_s = time.monotonic() - started_s
        after = llm.stats()
        counts = {
            name: after.get(f"num_{name}", 0) - before.get(f"num_{name}", 0)
            for name in (
                *("steps", "computed_tokens", "sampled_tokens", "cached_tokens"),
                *("batch_tokens", "padded_tokens"),
            )
            if f"num_{name}" in after  # static batches only have padding
        }
        summary = _summary(counts, duration_s, sorted(first_s.values()))
        recording = recorder.document(hello, summary)
        send("summary", summary)
        return recording


def _summary(
    counts: dict[str, int | float], duration_s: float, first_s: list[float]
) -> dict[str, Any]:
    padded, real = counts.get("padded_tokens", 0), counts.get("batch_tokens", 0)
    return {
        **counts,
        "padding": round(padded / real, 3) if real else None,
        "duration_s": round(duration_s, 3),
        "output_tok_s": round(counts["sampled_tokens"] / duration_s, 1),
        "first_token_p50_ms": round(1000 * percentile(first_s, 50), 1),
        "first_token_p99_ms": round(1000 * percentile(first_s, 99), 1),
    }


def compared(
    workload: str,
    seats: int,
    num_requests: int,
    step: Callable[[], None] = lambda: None,
    send: Send = lambda name, data: None,
) -> dict[str, Any]:
    """The recordings of all modes, as JSON values."""
    requests = WORKLOADS[workload](num_requests)
    about = {"workload": workload, "seats": seats, "num_requests": num_requests}
    send("comparison", {**about, "modes": MODES})
    return {
        "object": "engine.comparison",
        **about,
        "recordings": [recorded(mode, requests, seats, step, send) for mode in MODES],
    }


def _print_event(name: str, data: dict[str, Any]) -> None:
    line = msgspec.json.encode(data)
    sys.stdout.buffer.write(b"event: " + name.encode() + b"\ndata: " + line + b"\n\n")
    sys.stdout.buffer.flush()


def main(arguments: list[str]) -> None:
    """Compare, and write the JSON object or the events to stdout."""
    workload, seats, num_requests, *how = arguments
    os.nice(19)
    parent = os.getppid()

    def step() -> None:
        if os.getppid() != parent:
            sys.exit("the parent has gone")

    asked = workload, int(seats), int(num_requests), step
    if how == ["events"]:
        compared(*asked, _print_event)
    else:
        sys.stdout.buffer.write(msgspec.json.encode(compared(*asked)))


if __name__ == "__main__":
    main(sys.argv[1:])
