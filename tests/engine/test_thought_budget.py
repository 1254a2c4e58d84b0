"""Reasoning that has a budget, on the shipped model: the tokens do not depend on the company, on
preemption, on proposed tokens, or on where another engine goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from infer import LLM, Grammar, SamplingParams
from infer.engine.core import EngineCore
from infer.text.reasoning_tokens import ThoughtTokens
from infer.text.tools.formats import THOUGHTS
from infer.types import Request
from tests.support.isas import EXACT_DTYPE
from tests.support.lattice import PROMPTS, preempt_at_every_third_step

pytestmark = pytest.mark.usefixtures("kept_verdicts")

BUDGETS = (0, 1, 5, 20)
END = "\n</think>\n\n"
NUM_TOKENS = 36


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=512, dtype=EXACT_DTYPE) as llm:
        yield llm


def requests(llm: LLM) -> list[Request]:
    made = []
    end = tuple(llm.tokenizer.encode(END, add_special_tokens=False))
    for i, prompt in enumerate(PROMPTS[:6]):
        for budget in BUDGETS:
            grammar = Grammar.choice(["yes, it is", "no"]) if i % 3 == 2 else None
            sampling = SamplingParams(
                temperature=0.8 if i % 2 else 0, seed=i, max_tokens=NUM_TOKENS, grammar=grammar,
                thinking_token_budget=budget, ignore_eos=True,
            )  # fmt: skip
            request = llm.make_request(prompt, sampling, request_id=f"{i}, {budget}")
            ending = end if grammar is None else _only_mark(llm, end)
            marks = ("", "</think>")
            made.append(dataclasses.replace(request, thoughts=marks, thought_end=ending))
    return made


def _only_mark(llm: LLM, end: tuple[int, ...]) -> tuple[int, ...]:
    text = END[: END.index(">") + 1]
    return tuple(llm.tokenizer.encode(text, add_special_tokens=False))


def answers(core: EngineCore, asked: list[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    for request in asked:
        core.add(request)
    for output in core.outputs_until_complete():
        if output.token_id is not None:
            found[output.request_id].append(output.token_id)
    return found


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[int]]:
    return {
        name: tokens
        for request in requests(llm)
        for name, tokens in answers(llm.core, [request]).items()
    }


def test_reasoning_ends_in_time(llm: LLM, alone: dict[str, list[int]]) -> None:
    for request in requests(llm):
        budget = request.sampling.thinking_token_budget
        assert budget is not None
        tokens = alone[request.request_id]
        _, found, answer = llm.tokenizer.decode(tokens).partition("</think>")
        assert found
        counted = ThoughtTokens(llm.tokenizer, THOUGHTS[0], inside=True)
        counted.push(tokens)
        assert counted.count == budget
        if request.sampling.grammar is not None:
            assert answer in ("yes, it is", "no")


def test_company_preemption_and_another_engine_change_nothing(
    llm: LLM, alone: dict[str, list[int]]
) -> None:
    assert answers(llm.core, requests(llm)) == alone
    for cut in (1, 4, 9, 23):
        resumed = [
            dataclasses.replace(
                request,
                request_id=request.request_id + f", {cut}",
                output_token_ids=tuple(alone[request.request_id][:cut]),
                num_crashes=1,
            )
            for request in requests(llm)
            if len(alone[request.request_id]) > cut
        ]
        found = answers(llm.core, resumed)
        for request in resumed:
            name = request.request_id.removesuffix(f", {cut}")
            whole = alone[name]
            assert [*request.output_token_ids, *found[request.request_id]][-len(whole) :] == whole


@pytest.mark.parametrize("speculation", [None, '{"method": "ngram", "num_speculative_tokens": 6}'])
def test_preemption_and_proposals_change_nothing(
    alone: dict[str, list[int]], speculation: str | None
) -> None:
    with LLM(max_seq_len=512, dtype=EXACT_DTYPE, speculative_config=speculation) as llm:
        preempt_at_every_third_step(llm.core)
        assert answers(llm.core, requests(llm)) == alone
