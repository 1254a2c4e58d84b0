"""Workloads: the promised shapes, the same for the same seed, other tokens in each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.bench.measure import BenchOptions
from infer.bench.workloads import WORKLOADS, Draw, Planned, resolve_options
from infer.errors import ConfigError


def plan(name: str, seed: int = 0, run: int = 0, **options: Any) -> list[Planned]:
    return WORKLOADS[name](Draw(seed, run), **resolve_options(name, options))


def shape(planned: list[Planned]) -> list[tuple[float, int, int]]:
    return [(each.arrival_s, len(each.prompt), each.output_len) for each in planned]


TEXTS = ["copy", "chat", "code"]
GENERATED = sorted(set(WORKLOADS) - {"trace"})


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_decides(name: str) -> None:
    assert plan(name) == plan(name)
    repeated = plan(name, run=1)
    assert shape(repeated) == shape(plan(name))
    pairs = zip(repeated, plan(name), strict=True)
    assert all(mine.prompt != other.prompt for mine, other in pairs)


@pytest.mark.parametrize("name", ["mixed", "continuous_batching", "long_tail"])
def test_another_seed_has_other_lengths(name: str) -> None:
    assert shape(plan(name, seed=1)) != shape(plan(name))


@pytest.mark.parametrize("name", sorted(set(GENERATED) - set(TEXTS)))
def test_tokens_are_in_every_vocabulary(name: str) -> None:
    for vocab_size in (262, 2048, 128256):
        for each in WORKLOADS[name](Draw(0, 0, vocab_size), **resolve_options(name, {})):
            tokens = [token for token in each.prompt if isinstance(token, int)]
            assert len(tokens) == len(each.prompt)
            assert min(tokens) >= min(vocab_size, 1024) // 2
            assert max(tokens) < min(vocab_size, 1024)


def test_single_and_burst() -> None:
    assert shape(plan("single")) == [(0.0, 256, 256)]
    burst = plan("burst", num_requests=5, input_len=7, output_len=3)
    assert shape(burst) == [(0.0, 7, 3)] * 5
    assert len({each.prompt for each in burst}) == 5


@pytest.mark.parametrize(
    ("name", "count", "inputs", "outputs"),
    [("mixed", 16, (32, 1024), (64, 256)), ("continuous_batching", 32, (64, 512), (32, 256))],
)
def test_uniform_lengths(
    name: str, count: int, inputs: tuple[int, int], outputs: tuple[int, int]
) -> None:
    planned = plan(name)
    assert len(planned) == count
    many = shape(plan(name, num_requests=4000))
    for column, (low, high) in ((1, inputs), (2, outputs)):
        lengths = [row[column] for row in many]
        assert (min(lengths), max(lengths)) == (low, high)


def test_four_a_second() -> None:
    assert [each.arrival_s for each in plan("continuous_batching")] == [i / 4 for i in range(32)]


def test_poisson_arrivals_have_the_rate_and_other_gaps() -> None:
    planned = plan("burst", num_requests=2000, rate=5.0, arrivals="poisson")
    times = [each.arrival_s for each in planned]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert all(gap > 0 for gap in gaps)
    assert times[-1] == pytest.approx(400, rel=0.1)
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # as exponential ones have


def test_long_tail_is_exponential() -> None:
    lengths = sorted(each.output_len for each in plan("long_tail", num_requests=4000))
    assert sum(lengths) / 4000 == pytest.approx(64, rel=0.05)
    assert lengths[2000] == pytest.approx(64 * 0.693, rel=0.1)
    assert lengths[0] >= 1
    assert lengths[-1] <= 8 * 64


def test_a_long_prompt_arrives_while_streams_run() -> None:
    *streams, long = plan("long_prompt", output_len=90)
    assert {(each.group, each.after, each.output_len) for each in streams} == {
        ("streams", None, 90)
    }
    assert (long.group, long.after, long.after_tokens, len(long.prompt)) == ("long", 0, 30, 4096)


def test_followers_share_a_prefix_and_nothing_more() -> None:
    first, *followers = plan("shared_prefix")
    assert len(followers) == 15
    assert [(each.group, each.after) for each in followers] == [("followers", i) for i in range(15)]
    assert {each.prompt[:1024] for each in followers} == {first.prompt[:1024]}
    assert len({each.prompt[1024:] for each in (first, *followers)}) == 16


def test_a_turn_follows_the_one_before_it_in_its_conversation() -> None:
    planned = plan("multi_turn", num_requests=3, num_turns=3)
    assert [each.after for each in planned] == [None, None, None, 0, 1, 2, 3, 4, 5]
    assert [each.continues for each in planned] == [False] * 3 + [True] * 6


def test_texts_that_speculation_is_measured_with() -> None:
    for name in TEXTS:
        planned = plan(name, num_requests=3, output_len=9)
        assert [(each.arrival_s, each.output_len) for each in planned] == [(0.0, 9)] * 3
        assert len({each.prompt for each in planned}) == 3
        assert {each.temperature for each in planned} == {0.8 if name == "chat" else 0.0}
    for each in plan("copy"):
        assert isinstance(each.prompt, str)
        repeated = each.prompt.partition("\n\n")[2]
        assert repeated == 4 * repeated[: len(repeated) // 4]


def test_a_trace(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 2, "prompt_len": 3, "output_len": 4},
        {"arrival_s": 0.5, "prompt": "hello", "output_len": 6},
        {"arrival_s": "3", "prompt": "null", "output_len": 4.0},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    planned = plan("trace", trace_file=str(file))
    assert shape(planned) == [(0.5, 5, 6), (2.0, 3, 4), (3.0, 4, 4)]
    assert [each.prompt for each in planned[::2]] == ["hello", "null"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"arrival_s": 0, "output_len": 3}',
        '{"arrival_s": 0, "prompt_len": 0, "output_len": 3}',
        '{"arrival_s": -1, "prompt_len": 4, "output_len": 3}',
        '{"arrival_s": 0, "prompt": [1, 2], "output_len": 3}',
        '{"arrival_s": 0, "prompt_len": 4, "output_len": 0}',
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "prompt_len": 4, "output_len": 3}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"trace_file: line 2: .* must be a JSONL|line 2"):
        plan("trace", trace_file=str(file))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workload": "nope"}, "must be one of single, mixed"),
        ({"workload": "mixed", "input_len": 3}, "input_len: .*'mixed' has no such option; it has"),
        ({"workload": "single", "rate": 3.0}, "rate: .*no such option"),
        ({"workload": "burst", "num_requests": 0}, "num_requests: must be between 1 and"),
        ({"workload": "burst", "arrivals": "poisson"}, "'poisson' needs a --rate"),
        ({"workload": "burst", "rate": 1.0, "arrivals": "often"}, "one of fixed, poisson"),
        ({"workload": "burst", "rate": 1.0, "concurrency": 2}, "a closed loop has no arrival"),
        ({"workload": "continuous_batching", "concurrency": 2}, "a closed loop has no arrival"),
        ({"workload": "trace"}, "trace_file: the workload 'trace' needs it"),
        ({"workload": "trace", "trace_file": "/nowhere/x"}, "trace_file: cannot be read"),
        ({"repeat": 0}, "repeat: must be between 1 and"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BenchOptions(**options)
