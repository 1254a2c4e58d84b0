"""Rows that the kernel samples alone have the tokens that the sampler gives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from infer.kernels import loader
from infer.runner.plain_rows import DRAW_ROW, PlainSampling, as_results
from infer.runner.sampler import sample
from infer.schedule.sequence import NOT_FINITE, Sequence
from infer.types import Request, SamplingParams
from tests.support.cases import over

pytestmark = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))


def sequence(seed: int, num_output: int = 0, **params: Any) -> Sequence:
    made = Sequence.from_request(Request("r", (3, 1, 4), SamplingParams(**params), seed, 99), 0)
    made.tokens += [5] * num_output
    return made


def positions(sequences: list[Sequence]) -> np.ndarray:
    return np.array([len(each.tokens) for each in sequences], np.int64)


def test_the_record_is_that_of_the_interface() -> None:
    assert DRAW_ROW.itemsize == loader.records()["DrawRow"].size


@pytest.mark.parametrize("width", [16, 48, 512, 1040, 5008, 49152])
def test_tokens_are_those_of_the_sampler(width: int) -> None:
    dice, made = random.Random(width), torch.Generator().manual_seed(width)
    plain = PlainSampling()
    for _ in range(12):
        sequences = [
            sequence(
                dice.randrange(-(2**63), 2**63),
                dice.randrange(9),
                temperature=dice.choice([0, 0, 0.3, 1.0, 1.7]),
                top_p=dice.choice([1.0, 0.9, 0.2]),
                min_p=dice.choice([0.0, 0.05]),
            )
            for _ in range(dice.randrange(1, 20))
        ]
        logits = 4 * torch.randn((len(sequences), width), generator=made)
        logits[:, dice.randrange(width)] = -torch.inf
        if dice.random() < 0.5:
            logits = logits.round()  # many equals
        if dice.random() < 0.3:
            logits = logits.clamp(max=0) * 0.0 * torch.randn((1, 1), generator=made)
        rows = plain.rows(sequences, positions(sequences))
        assert rows is not None
        wanted = sample(logits.clone(), sequences)
        assert as_results(rows.sample(logits)) == wanted
        for each, result in zip(sequences, wanted, strict=True):
            each.tokens.append(result.token_id)
        again = plain.rows(list(sequences), positions(sequences))
        assert again is not None
        assert as_results(again.sample(logits)) == sample(logits.clone(), sequences)


@over("place", [0, 63, 64, 1023, 1024, 1100, 1103])
@over("bad", [torch.nan, -torch.nan, torch.inf])
@over("temperature", [0, 1])
def test_a_row_that_is_not_finite_has_an_error_and_the_others_none(
    place: int, bad: float, temperature: float
) -> None:
    logits = torch.randn((3, 1104), generator=torch.Generator().manual_seed(0))
    logits[1, place] = torch.tensor(bad).abs() if bad > 0 else bad
    if bad != bad:
        logits[1, place] = torch.tensor([0x7FC00000, -0x400000][place % 2], dtype=torch.int32).view(
            torch.float32
        )
    logits[2, 5:] = -torch.inf  # nothing wrong with that
    sequences = [sequence(i, temperature=temperature) for i in range(3)]
    rows = PlainSampling().rows(sequences, positions(sequences))
    assert rows is not None
    results = as_results(rows.sample(logits))
    assert results == sample(logits.clone(), sequences)
    assert [each.error for each in results] == ["", NOT_FINITE, ""]


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 4},
        {"logprobs": 1},
        {"logit_bias": {1: 2}},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3},
        {"allowed_token_ids": [1, 2]},
    ],
)
def test_a_row_that_needs_more_is_not_plain(params: dict[str, Any]) -> None:
    sequences = [sequence(0), sequence(1, **params)]
    assert PlainSampling().rows(sequences, positions(sequences)) is None


def test_rows_become_plain_and_sequences_change() -> None:
    plain, first = PlainSampling(), sequence(0, min_tokens=2)
    assert plain.rows([first], positions([first])) is None
    first.tokens += [1, 1]
    assert plain.rows([first], positions([first])) is not None
    second = sequence(1, logprobs=0)
    assert plain.rows([first, second], positions([first, second])) is None
    assert plain.rows([first], positions([first])) is not None
