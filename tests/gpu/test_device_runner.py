"""`DeviceRunner` against `ModelRunner`: the same requests, mixed in every way, one step ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from infer.models.model import Model
from infer.types import SamplingParams, StepOutput
from tests.support.device_runners import (
    SEATS,
    STEP_TOKENS,
    Replays,
    core_of,
    device_runner,
    make_model,
    plain_runner,
    request,
    run,
    tokens,
)
from tests.support.kernel_dtypes import INTERPRETED

REQUESTS = [
    request("greedy", 3, 4),
    request("a long prompt", 17, 3),
    request("top-p", 2, 4, temperature=1.1, top_p=0.7),
    request("min-p", 1, 3, temperature=1.3, min_p=0.05, top_p=0.95),
    request("log-probabilities", 2, 3, temperature=1.5, top_p=0.8, logprobs=3),
    request("of the prompt", 6, 2, prompt_logprobs=2),
    request("of all", 2, 2, temperature=1.0, logprobs=1),
    request("penalties", 3, 3, temperature=0.8, frequency_penalty=0.7, logit_bias={3: 2.0}),
]
FEW = 6
"""Of them, in the default suite."""


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
        assert captures.num_captured == len(runner.graphs) < 12
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
    scored = replace(wanted[1].sampling, logprobs=2)
    greedy = replace(wanted[0], request_id="greedy", sampling=SamplingParams(temperature=0))
    alone = [
        tokens(run(core_of(device_runner(model, device, graphs=False)), [each]))[each.request_id]
        for each in (greedy, wanted[1])
    ]
    wanted.append(replace(wanted[1], request_id="with log-probabilities", sampling=scored))
    together = tokens(run(core_of(device_runner(model, device, graphs=True)), wanted))
    assert together["k1"] == alone[0]
    assert together["k7"] == together["with log-probabilities"] == alone[1]


@pytest.mark.parametrize("fails", ["fetch", pytest.param("items", marks=SLOW)])
def test_a_launch_that_fails_leaves_nothing_of_its_own(
    fails: str, model: Model, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have drawn tokens that nobody gets, and page tables may not have been sent."""
    chosen = [request("greedy", 3, 6), request("another", 4, 5)]
    wanted = tokens(run(core_of(plain_runner(model, device)), chosen))
    runner = device_runner(model, device, graphs=True)
    owner: Any = runner.buffers if fails == "fetch" else runner.backend
    real, calls = getattr(owner, fails), []

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) % 2 == 0:
            raise RuntimeError("for once")
        return real(*given)

    monkeypatch.setattr(owner, fails, failing)
    assert tokens(run(core_of(runner), chosen)) == wanted
    assert len(calls) > 6


@pytest.mark.slow
def test_preempted_and_resumed(model: Model, device: torch.device) -> None:
    """Few pages: rows of page tables change hands, and prompts are computed again."""
    chosen = [
        request("grows", 3, 12),
        request("grows, too", 4, 11, temperature=1.1, top_p=0.7),
        request("a third", 2, 12),
        request("a long prompt", 17, 3),
    ]
    wanted = tokens(run(core_of(plain_runner(model, device)), chosen))
    core = core_of(device_runner(model, device, graphs=True), num_pages=7)
    assert tokens(run(core, chosen)) == wanted
    assert core.scheduler.stats.num_preemptions > 0


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
    runner.compile([(1, 1), (SEATS, 1), (1, STEP_TOKENS)])
    assert len(runner.graphs) == 0
    assert not runner.buffers.results.any(), "a kernel was launched"
    for count in (1, 2, SEATS):
        runner.rehearse(count, 1)
    runner.rehearse(1, STEP_TOKENS)
    chosen = REQUESTS[:3]
    got = tokens(run(core_of(runner), chosen))
    assert got == {each.request_id: tokens(expected)[each.request_id] for each in chosen}


@pytest.mark.slow
def test_without_a_cache(
    model: Model, expected: dict[str, list[StepOutput]], device: torch.device
) -> None:
    """Whoever has a pending token sits out, since every chunk holds all tokens of its sequence."""
    core = core_of(device_runner(model, device, graphs=False), max_seq_len=13, keeps_computed=False)
    core.scheduler.allocator.enable_prefix_caching = False
    chosen = [r for r in REQUESTS if r.request_id in ("greedy", "top-p")]
    outputs = tokens(run(core, chosen))
    assert outputs == {r.request_id: tokens(expected)[r.request_id] for r in chosen}
    assert core.scheduler.stats.num_computed_tokens == (3 + 4 + 5 + 6) + (2 + 3 + 4 + 5)


def test_the_logits_of_a_prompt(model: Model, device: torch.device) -> None:
    """At both sides of a chunk's end, and at the end of a prompt, beside a stream."""
    wanted = [
        request("greedy", 3, 4),
        replace(request("a long prompt", 17, 1), logits_at=(0, 12, 13, 16)),
        replace(request("one token", 1, 1), logits_at=(0,)),
    ]
    found = []
    for runner in (plain_runner(model, device), device_runner(model, device, graphs=True)):
        core, logits = core_of(runner), {}
        for each in wanted:
            core.add(each)
            logits[each.request_id] = core.scheduler.find(each.request_id).logits
        core.outputs_until_complete()
        found.append(logits)
    plain, own = found
    for each in wanted:
        name = each.request_id
        assert tuple(own[name]) == tuple(plain[name]) == each.logits_at
        for position in each.logits_at:
            assert own[name][position] == pytest.approx(plain[name][position], abs=2e-3)
