"""Workloads: pure functions from options and a seed to the requests that are sent, and when.

A workload returns the planned requests in the order in which they are sent. Lengths and arrival
times depend on the seed alone. Tokens depend on the number of the run too, so that a repeated run
finds nothing of the run before it in a prefix cache. The parameters of a workload's function are
its options; `resolve_options` refuses all others.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from infer.config import PositiveInt, at_least
from infer.errors import ConfigError, LoadError
from infer.files import MAX_LIST_BYTES, read_text

ARRIVALS = ("fixed", "poisson")
_COMMON_IDS = 1024
"""The number of token ids that all vocabularies have. Prompts are drawn from the upper half of
them, where no usual vocabulary has special tokens."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a workload."""

    arrival_s: float
    """The seconds from the start of the run, or from the event that `after` names."""
    prompt: tuple[int, ...] | str
    output_len: int
    group: str = ""
    """The name of a group of requests that is also reported by itself."""
    after: int | None = None
    """The index of a request that must have ended before this one arrives."""
    after_tokens: int | None = None
    """The number of tokens of request `after` that are waited for; None: all of them."""
    continues: bool = False
    """Whether the prompt comes after the prompt and the answer of request `after`."""
    temperature: float = 0.0
    """The temperature with which the answer is sampled; 0: greedy."""


class Draw:
    """The random numbers of one run. Tokens depend on seed and run, all else on the seed alone."""

    def __init__(self, seed: int = 0, run: int = 0, vocab_size: int = 1 << 30) -> None:
        self._lengths = random.Random(f"{seed} lengths")
        self._times = random.Random(f"{seed} times")
        self._tokens = random.Random(f"{seed} tokens {run}")
        self._vocab_size = min(vocab_size, _COMMON_IDS)

    def length(self, low: int, high: int) -> int:
        """A uniform random length; both ends are included."""
        return self._lengths.randint(low, high)

    def exponential(self, mean: float) -> int:
        """An exponential random length of at least 1 and at most eight times the mean."""
        return max(1, min(round(self._lengths.expovariate(1 / mean)), round(8 * mean)))

    def ids(self, count: int) -> tuple[int, ...]:
        """`count` random token ids."""
        low = self._vocab_size // 2
        return tuple(self._tokens.choices(range(low, self._vocab_size), k=count))

    def number(self) -> int:
        """A random number of six digits, for texts that must differ."""
        return self._tokens.randrange(100_000, 1_000_000)

    def times(self, count: int, rate: float | None, arrivals: str) -> list[float]:
        """The arrival times in seconds, at `rate` requests a second; all 0 without a rate."""
        if rate is None:
            return [0.0] * count
        if arrivals == "fixed":
            return [i / rate for i in range(count)]
        gaps = [self._times.expovariate(rate) for _ in range(count)]
        return [sum(gaps[: i + 1]) for i in range(count)]


def single(draw: Draw, *, input_len: int = 256, output_len: int = 256) -> list[Planned]:
    """one request: 256 tokens in, 256 out"""
    return [Planned(0.0, draw.ids(input_len), output_len)]


def mixed(
    draw: Draw, *, num_requests: int = 16, rate: float | None = None, arrivals: str = "fixed"
) -> list[Planned]:
    """16 at once: prompts of 32 to 1,024 tokens, outputs of 64 to 256"""
    return _uniform(draw, (32, 1024), (64, 256), num_requests, rate, arrivals)


def continuous_batching(
    draw: Draw, *, num_requests: int = 32, rate: float = 4.0, arrivals: str = "fixed"
) -> list[Planned]:
    """32 requests, 4 a second: prompts of 64 to 512 tokens, outputs of 32 to 256"""
    return _uniform(draw, (64, 512), (32, 256), num_requests, rate, arrivals)


def burst(
    draw: Draw,
    *,
    num_requests: int = 32,
    input_len: int = 128,
    output_len: int = 64,
    rate: float | None = None,
    arrivals: str = "fixed",
) -> list[Planned]:
    """32 equal ones at once: 128 tokens in, 64 out"""
    times = draw.times(num_requests, rate, arrivals)
    return [Planned(at, draw.ids(input_len), output_len) for at in times]


def long_tail(
    draw: Draw,
    *,
    num_requests: int = 64,
    input_len: int = 64,
    output_len: int = 64,
    rate: float | None = None,
    arrivals: str = "fixed",
) -> list[Planned]:
    """64 at once: prompts of 64 tokens, outputs exponential with a mean of 64"""
    times = draw.times(num_requests, rate, arrivals)
    return [Planned(at, draw.ids(input_len), draw.exponential(output_len)) for at in times]


def long_prompt(
    draw: Draw, *, num_requests: int = 8, input_len: int = 4096, output_len: int = 256
) -> list[Planned]:
    """8 streams of 256 tokens; when a third has come, a prompt of 4,096 tokens arrives"""
    streams = [Planned(0.0, draw.ids(32), output_len, "streams") for _ in range(num_requests)]
    long = Planned(
        0.0, draw.ids(input_len), 16, "long", after=0, after_tokens=max(1, output_len // 3)
    )
    return [*streams, long]


def shared_prefix(
    draw: Draw, *, num_requests: int = 16, input_len: int = 1024, output_len: int = 32
) -> list[Planned]:
    """16 requests with the same 1,024 tokens in front, one after the other"""
    prefix = draw.ids(input_len)
    first = Planned(0.0, prefix + draw.ids(32), output_len, "first")
    return [first] + [
        Planned(0.0, prefix + draw.ids(32), output_len, "followers", after=i)
        for i in range(num_requests - 1)
    ]


def multi_turn(
    draw: Draw,
    *,
    num_requests: int = 8,
    num_turns: int = 4,
    input_len: int = 64,
    output_len: int = 64,
) -> list[Planned]:
    """8 conversations of 4 turns: each holds all before it, 64 tokens are new, 64 are answered"""
    return [
        Planned(
            0.0,
            draw.ids(input_len),
            output_len,
            f"turn {turn + 1}",
            after=(turn - 1) * num_requests + i if turn else None,
            continues=turn > 0,
        )
        for turn in range(num_turns)
        for i in range(num_requests)
    ]


_QUESTION = "What is 10 * 10?\n\n10 * 10 = 100\n\n"
_CODE = """def sum_of_{0}(values):
    total = 0
    for value in values:
        total = total + value
    return total


def product_of_{0}(values):
    total = 1
    for value in values:
        total = total * value
    return total


def largest_of_{0}(values):
    total = values[0]
    for value in values:
"""


def copy(draw: Draw, *, num_requests: int = 8, output_len: int = 128) -> list[Planned]:
    """8 at once: a question and its answer four times, which the model repeats; greedy"""
    texts = (f"{draw.number()}\n\n{4 * _QUESTION}" for _ in range(num_requests))
    return [Planned(0.0, text, output_len) for text in texts]


def chat(draw: Draw, *, num_requests: int = 8, output_len: int = 128) -> list[Planned]:
    """8 at once: stories, sampled at temperature 0.8"""
    return [
        Planned(0.0, f"One day, number {draw.number()} met a ", output_len, temperature=0.8)
        for _ in range(num_requests)
    ]


def code(draw: Draw, *, num_requests: int = 8, output_len: int = 128) -> list[Planned]:
    """8 at once: functions that are alike, of which the answer writes more; greedy"""
    return [Planned(0.0, _CODE.format(draw.number()), output_len) for _ in range(num_requests)]


class _TraceRow(msgspec.Struct):
    """A line of a trace, which is one request."""

    arrival_s: Annotated[float, at_least(0)]
    output_len: PositiveInt
    prompt: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    prompt_len: PositiveInt | UnsetType = UNSET


def trace(draw: Draw, *, trace_file: str) -> list[Planned]:
    """a JSONL file: {"arrival_s": …, "prompt_len": … or "prompt": …, "output_len": …}"""
    try:
        lines = read_text(Path(trace_file), MAX_LIST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError, LoadError) as error:
        raise ConfigError("trace_file", f"cannot be read: {error}") from None
    plan = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_TraceRow, strict=False)
            prompt = row.prompt or (row.prompt_len and draw.ids(row.prompt_len))
            if not prompt:
                raise ValueError("it has neither prompt nor prompt_len")
        except ValueError as error:
            form = (trace.__doc__ or "").partition(": ")[2]
            message = f"line {number}: {error}; a line must be {form}"
            raise ConfigError("trace_file", message) from None
        plan.append(Planned(row.arrival_s, prompt, row.output_len))
    if not plan:
        raise ConfigError("trace_file", "has no requests")
    return sorted(plan, key=lambda planned: planned.arrival_s)


def _uniform(
    draw: Draw,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    num_requests: int,
    rate: float | None,
    arrivals: str,
) -> list[Planned]:
    return [
        Planned(at, draw.ids(draw.length(*inputs)), draw.length(*outputs))
        for at in draw.times(num_requests, rate, arrivals)
    ]


WORKLOADS: Mapping[str, Callable[..., list[Planned]]] = {
    made.__name__: made
    for made in (
        *(single, mixed, continuous_batching, burst, long_tail),
        *(long_prompt, shared_prefix, multi_turn, copy, chat, code, trace),
    )
}


def options_of(name: str) -> dict[str, Any]:
    """The options of a workload with their defaults.

    The default of an option that must be given is `inspect.Parameter.empty`. Raises `ConfigError`
    for an unknown workload.
    """
    if name not in WORKLOADS:
        raise ConfigError("workload", f"must be one of {', '.join(WORKLOADS)}; not {name!r}")
    parameters = list(inspect.signature(WORKLOADS[name]).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def resolve_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a workload: the given ones, and the defaults of the others.

    Raises `ConfigError` for options that the workload does not have, and for bad values.
    """
    options = options_of(name)
    for option, value in given.items():
        if option not in options:
            has = ", ".join(f"--{known.replace('_', '-')}" for known in options)
            raise ConfigError(option, f"the workload {name!r} has no such option; it has {has}")
        if option == "arrivals" and value not in ARRIVALS:
            raise ConfigError(option, f"must be one of {', '.join(ARRIVALS)}; not {value!r}")
        if isinstance(value, (int, float)) and value <= 0:
            raise ConfigError(option, f"must be above 0, not {value}")
    options.update(given)
    if options.get("arrivals") == "poisson" and options["rate"] is None:
        raise ConfigError("arrivals", "'poisson' needs a --rate")
    missing = [option for option, value in options.items() if value is inspect.Parameter.empty]
    if missing:
        raise ConfigError(missing[0], f"the workload {name!r} needs it")
    return options
