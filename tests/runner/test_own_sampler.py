"""A sampler of the user's: what it returns is checked, and the engine outlives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from infer import LLM, SamplingParams
from infer.errors import ConfigError
from infer.runner.own_sampler import find_sampler
from infer.runner.sampler import sample
from infer.schedule.sequence import Sampled

Results = list[Sampled]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["Once upon a time", "The fox"]


def with_token(token: Any) -> Callable[[Results], Results]:
    """The last row has another token."""
    return lambda results: [*results[:-1], Sampled(token)]


WRONG_TOKENS: dict[str, Any] = {
    "large": 10**9,
    "the next one": 2048,
    "negative": -5,
    "larger than 64 bits": 2**70,
    "no integer": 1.0,
    "none": None,
    "text": "a",
    "several": torch.tensor([1, 2]),
}
WRONG_RESULTS: dict[str, Callable[[Results], object]] = {
    "nothing": lambda results: None,
    "too few": lambda results: results[:-1],
    "too many": lambda results: [*results, *results],
    "numbers": lambda results: [result.token_id for result in results],
    "one": lambda results: results[0],
    "an error": lambda results: {}["oops"],  # type: ignore[index]
}
change: Callable[[Results], object] | None = None


def changed(logits: torch.Tensor, sequences: Sequence[Any], forbidden: Any) -> object:
    """The engine's own, changed."""
    results = sample(logits, sequences, forbidden)
    return change(results) if change and len(results) > 1 else results


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sampler=f"{__name__}:changed") as llm:
        yield llm


@pytest.fixture(scope="module")
def calm(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("token", WRONG_TOKENS)
def test_a_row_without_a_token_of_the_model_fails_alone(
    llm: LLM, calm: list[tuple[int, ...]], token: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(globals(), "change", with_token(WRONG_TOKENS[token]))
    first, last = [llm.make_request(prompt, GREEDY) for prompt in PROMPTS]
    ends = ended(llm, first, last)
    assert ends[first.request_id] == (list(calm[0]), "")
    assert "which is none of 2048 token ids" in ends[last.request_id][1]
    monkeypatch.setitem(globals(), "change", None)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == calm


@pytest.mark.parametrize("results", WRONG_RESULTS)
def test_a_step_without_results_is_halved_until_it_has_some(
    llm: LLM, calm: list[tuple[int, ...]], results: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(globals(), "change", WRONG_RESULTS[results])
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == calm


def test_integers_of_libraries_are_tokens(
    llm: LLM, calm: list[tuple[int, ...]], monkeypatch: Any
) -> None:
    for kind in (np.int64, torch.tensor):
        monkeypatch.setitem(
            globals(),
            "change",
            lambda results, kind=kind: [Sampled(kind(result.token_id)) for result in results],
        )
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == calm


def ended(llm: LLM, *requests: Any) -> dict[str, tuple[list[int], str]]:
    """Tokens and error of each request."""
    ends: dict[str, tuple[list[int], str]] = {r.request_id: ([], "") for r in requests}
    for request in requests:
        llm.core.add(request)
    while llm.core.has_work:
        for output in llm.core.step(flush=True):
            tokens, error = ends[output.request_id]
            if output.token_id is not None:
                tokens.append(output.token_id)
            ends[output.request_id] = (tokens, output.error.message if output.error else error)
    return ends


def test_the_default_is_not_wrapped() -> None:
    assert find_sampler("default") is sample
    with pytest.raises(ConfigError, match="sampler"):
        find_sampler("no.such:function")
