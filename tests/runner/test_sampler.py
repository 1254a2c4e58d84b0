"""Tests of the sampler: definitions of parameters, distribution of draws, independence of rows."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from infer.kernels import loader
from infer.runner import sampler
from infer.runner.sampler import sample, uniform
from infer.schedule.sequence import Sequence
from infer.types import Request, SamplingParams
from infer.types.sampling import MIN_TEMPERATURE
from tests.support.cases import one_of

PROMPT = (3, 1, 4)


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test draws from whole rows with the kernel and without it."""
    if request.param == "torch":
        monkeypatch.setattr(loader, "library", lambda: "not here")
    elif isinstance(loader.library(), str):
        pytest.skip("no kernels here")


def sequence(seed: int = 0, output: tuple[int, ...] = (), **params: Any) -> Sequence:
    eos = params.pop("eos", ())
    made = sampled_by(SamplingParams(**params), seed, eos)
    made.tokens += output
    return made


def sampled_by(sampling: SamplingParams, seed: int, eos: tuple[int, ...] = ()) -> Sequence:
    request = Request("r", PROMPT, sampling, seed, 10, eos_token_ids=eos)
    return Sequence.from_request(request, 0)


def tokens(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return [s.token_id for s in sample(logits.clone(), list(sequences))]


@cache
def drawn_by(sampling: SamplingParams, count: int) -> list[Sequence]:
    """Sequences with the seeds 0, 1, …, which sampling does not change."""
    return [sampled_by(sampling, seed) for seed in range(count)]


def draws(logits: list[float], count: int = 1000, **params: Any) -> Counter[int]:
    rows = torch.tensor([logits]).repeat(count, 1)
    return Counter(tokens(rows, *drawn_by(SamplingParams(**params), count)))


def test_greedy_is_the_argmax_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [9.0, 0.0, 0.0, 0.0]])
    assert tokens(logits, sequence(temperature=0), sequence(temperature=0)) == [1, 0]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 4}, {"top_p": 0.999999}, {"min_p": 1e-9}, {"top_k": 3, "top_p": 0.9999}],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = [2.0, 0.0, 1.0, -9.0]
    counts = draws(logits, count=4000, **params)
    probs = torch.tensor(logits).softmax(0)
    chi2 = sum(
        (counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in enumerate(probs.tolist()) if i < 3
    )
    assert chi2 < 14  # 2 degrees of freedom, p = 0.001; the seeds are fixed


def test_temperature_sharpens() -> None:
    cold = draws([1.0, 0.0], count=4000, temperature=0.25)
    assert cold[0] / 4000 == pytest.approx(1 / (1 + math.exp(-4)), abs=0.01)


def test_top_k_keeps_k_tokens() -> None:
    assert set(draws([3.0, 2.0, 1.0, 0.0, -1.0], top_k=2)) == {0, 1}
    assert set(draws([3.0, 2.0, 1.0, 0.0, -1.0], top_k=1)) == {0}
    assert set(draws([1.0, 1.0, 1.0], top_k=-1)) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(draws(logits, top_p=0.5)) == {0}
    assert set(draws(logits, top_p=0.51)) == {0, 1}
    assert set(draws(logits, top_p=0.81)) == {0, 1, 2}
    assert set(draws(logits, top_p=1.0)) == {0, 1, 2, 3}


def test_top_p_counts_among_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # The first of the two tokens has 4/7 = 0.571.
    assert set(draws(logits, top_k=2, top_p=0.56)) == {0}
    assert set(draws(logits, top_k=2, top_p=0.58)) == {0, 1}


def test_min_p_is_relative_to_the_most_probable() -> None:
    logits = torch.tensor([0.6, 0.31, 0.09]).log().tolist()
    assert set(draws(logits, min_p=0.5)) == {0, 1}
    assert set(draws(logits, min_p=0.6)) == {0}


def test_a_flat_top_p_row_keeps_the_lowest_ids() -> None:
    """All logits are equal, so they rank by id; the probabilities of ids 0 to 57 reach 0.9."""
    assert set(draws([0.0] * 64, count=4000, top_p=0.9)) == set(range(58))


def kept_by_definition(logits: torch.Tensor, **params: Any) -> list[int]:
    """The ids that top-k, top-p and min-p keep of a row, by a stable sort in float64."""
    sampling = SamplingParams(**params)
    ranks = logits.double().div(sampling.temperature).argsort(descending=True, stable=True)
    if sampling.top_k > 0:
        ranks = ranks[: sampling.top_k]
    probs = logits.double().div(sampling.temperature)[ranks].softmax(0)
    keep = probs.cumsum(0) - probs < sampling.top_p
    keep &= probs >= sampling.min_p * probs[0]
    return sorted(ranks[keep].tolist())


@pytest.mark.parametrize(
    "params",
    one_of(
        2,
        [
            {"top_k": 70, "top_p": 0.55},
            {"top_k": 5},
            {"top_k": 40, "min_p": 0.4},
            {"top_p": 0.1},
            {"top_p": 0.15, "temperature": 0.6},
            {"min_p": 0.3},
            {"top_p": 0.3, "min_p": 0.3},
        ],
    ),
)
@pytest.mark.parametrize("vocab", [pytest.param(640, marks=pytest.mark.slow), 999])
def test_what_is_drawn_is_what_the_definition_keeps(params: dict[str, Any], vocab: int) -> None:
    """Logits are multiples of 1/4, so many are equal, within a block and across blocks."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator).mul(4).round().div(4)
    kept = kept_by_definition(logits, **params)
    assert 3 <= len(kept) <= 90
    counts = draws(logits.tolist(), count=2000, **params)
    assert sorted(counts) == kept
    weights = logits[kept].div(params.get("temperature", 1.0)).softmax(0).mul(2000).tolist()
    chi2 = sum((counts[i] - n) ** 2 / n for i, n in zip(kept, weights, strict=True))
    free = len(kept) - 1
    assert chi2 < free + 3.1 * math.sqrt(2 * free) + 3  # p is about 0.001


def test_bias_and_penalties() -> None:
    base = torch.tensor([[1.0, 2.0, 0.5, -1.0, 3.0, 0.0]])

    def adjusted(**fields: Any) -> list[float]:
        rows = base.clone()
        sampler.adjust(rows, [sequence(**fields)])
        return [round(v, 5) for v in rows[0].tolist()]

    assert adjusted(logit_bias={0: 100, 5: -2.5}) == [101.0, 2.0, 0.5, -1.0, 3.0, -2.5]
    # The prompt is 3, 1, 4. Only the repetition penalty applies to it.
    assert adjusted(repetition_penalty=2.0) == [1.0, 1.0, 0.5, -2.0, 1.5, 0.0]
    assert adjusted(presence_penalty=1.0) == [1.0, 2.0, 0.5, -1.0, 3.0, 0.0]
    assert adjusted(presence_penalty=1.0, output=(5, 5, 1)) == [1.0, 1.0, 0.5, -1.0, 3.0, -1.0]
    assert adjusted(frequency_penalty=0.5, output=(5, 5, 1)) == [1.0, 1.5, 0.5, -1.0, 3.0, -1.0]
    assert adjusted(repetition_penalty=2.0, output=(0,))[0] == 0.5
    inf = -math.inf
    assert adjusted(min_tokens=2, eos=(4,), output=(0,)) == [1.0, 2.0, 0.5, -1.0, inf, 0.0]
    assert adjusted(min_tokens=2, eos=(4,), output=(0, 0)) == [1.0, 2.0, 0.5, -1.0, 3.0, 0.0]


def test_penalties_change_what_is_chosen_but_not_the_logprobs() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0]])
    (result,) = sample(logits.clone(), [sequence(temperature=0, logit_bias={2: -100}, logprobs=2)])
    assert result.token_id == 1
    assert result.logprobs is not None
    raw = logits.log_softmax(-1)[0]
    assert result.logprobs.logprob == pytest.approx(raw[1].item(), abs=1e-5)
    assert [token for token, _ in result.logprobs.top] == [2, 1]
    assert result.logprobs.top[0][1] == pytest.approx(raw[2].item(), abs=1e-5)
    (result,) = sample(logits.clone(), [sequence(temperature=0, logit_bias={0: 50}, logprobs=1)])
    assert result.token_id == 0
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(raw[0].item(), abs=1e-5)


def test_logprobs_of_the_token_alone_and_none() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    first, second = sample(logits, [sequence(temperature=0, logprobs=0), sequence(temperature=0)])
    assert first.logprobs is not None
    assert first.logprobs.top == ()
    assert second.logprobs is None


@pytest.mark.parametrize(("vocab", "threads"), [(3000, 1), (50_257, 2)])
def test_a_row_does_not_see_its_neighbours(vocab: int, threads: int) -> None:
    """A row has the same token and the same bits of log-probabilities in any batch and order.

    There are long rows because torch divides a sum over one long row between its threads.
    """
    generator = torch.Generator().manual_seed(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {},
        {"top_k": 3},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 5000, "top_p": 0.99},
        {"top_p": 0.95, "temperature": 1.7},
        {"top_p": 0.2, "logprobs": 0},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3, "top_p": 0.5, "logprobs": 20},
        {"frequency_penalty": 1.0, "output": (7, 7), "top_k": 64},
        {"logit_bias": {9: 5.0}, "temperature": 0.5},
        {"temperature": 0, "presence_penalty": 2.0, "output": (9, 7), "logprobs": 1},
    ]
    sequences = [sequence(seed, **kinds[seed % len(kinds)]) for seed in range(len(kinds))]
    logits = torch.randn(len(sequences), vocab, generator=generator).mul(3).bfloat16().float()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = sample(logits.clone(), sequences)
        alone = [sample(logits[i : i + 1].clone(), [s])[0] for i, s in enumerate(sequences)]
        order = torch.randperm(len(sequences), generator=generator).tolist()
        shuffled = sample(logits[order], [sequences[i] for i in order])
    finally:
        torch.set_num_threads(before)
    assert together == alone
    assert shuffled == [together[i] for i in order]
    assert len({s.token_id for s in together}) > len(kinds) // 2


@pytest.mark.parametrize("way", ["kernel"], indirect=True)
def test_the_kernel_draws_what_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.01, "temperature": 2.0},
        {"min_p": 0.05, "top_p": 0.7},
    ]
    sequences = [sequence(seed - 50, **kinds[seed % len(kinds)]) for seed in range(100)]
    logits = torch.randn(100, 20_001, generator=torch.Generator().manual_seed(5)).mul(2).bfloat16()
    ours = tokens(logits.float(), *sequences)
    monkeypatch.setattr(loader, "library", lambda: "not here")
    assert tokens(logits.float(), *sequences) == ours
    assert len(set(ours)) > 60


def test_the_best_logprobs_are_ranked_by_value_then_id() -> None:
    logits = torch.zeros(1, 200)
    logits[0, [150, 70, 3, 1]] = torch.tensor([1.0, 1.0, 2.0, -0.0])
    (result,) = sample(logits, [sequence(temperature=0, logprobs=6)])
    assert result.logprobs is not None
    assert [token for token, _ in result.logprobs.top] == [3, 70, 150, 0, 1, 2]


def test_the_draw_is_a_function_of_seed_and_position_only() -> None:
    logits = torch.zeros(1, 50)
    at = {n: tokens(logits, sequence(7, output=(0,) * n))[0] for n in range(30)}
    assert at == {n: tokens(logits, sequence(7, output=(0,) * n))[0] for n in range(30)}
    assert len(set(at.values())) > 15
    assert uniform(1, 2) != uniform(2, 1)
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.01)
    assert uniform(-(2**63), 0) >= 0


def test_extreme_logits_are_safe() -> None:
    logits = torch.full((3, 10), -1e30)
    logits[:, 4] = 1e30
    hot = sequence(temperature=2.0)
    cold = sequence(temperature=0.01, top_p=0.1)
    assert tokens(logits, hot, cold, sequence(min_p=1.0)) == [4, 4, 4]


LEAST = 5e-324
"""The smallest number above 0, which is 0 in float32."""
EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, MIN_TEMPERATURE, 2.0),
    "top_k": (0, 3),
    "top_p": (LEAST, 0.9, 1.0),
    "min_p": (0.0, LEAST, 1.0),
    "repetition_penalty": (LEAST, 1e-38, 1.0, 10.0),
    "presence_penalty": (-2.0, LEAST),
    "logit_bias": ((), ((1, 100.0), (3, LEAST))),
}  # fmt: skip
"""What requests may have at the ends of each range."""


@pytest.mark.parametrize("largest", [0.0, 1.0, 1e30, 3.4e38])
def test_numbers_at_the_ends_of_their_ranges_end_in_a_token(largest: float) -> None:
    wishes = [dict(zip(EXTREMES, values, strict=True)) for values in product(*EXTREMES.values())]
    sequences = [
        sequence(seed, output=(4, 4), **wish, min_tokens=1) for seed, wish in enumerate(wishes)
    ]
    row = torch.tensor([0.0, largest, -largest, largest / 2, -1.0, 0.0, -torch.inf, -0.0] * 10)
    results = sample(row.repeat(len(wishes), 1), sequences)
    assert [result.error for result in results] == [""] * len(wishes)
    assert all(row[result.token_id] > -torch.inf for result in results)


def test_a_penalty_near_0_is_its_limit() -> None:
    logits = torch.tensor([[2.0, 1.0, 9.0, -torch.inf, -1.0]])
    for penalty in (LEAST, 1e-45, 1e-38, 1e-30):
        near = [
            sequence(temperature=temperature, repetition_penalty=penalty, **params)
            for temperature in (0.0, 0.01, 1.0, 2.0)
            for params in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1})
        ]
        assert tokens(logits.repeat(len(near), 1), *near) == [1] * len(near)
