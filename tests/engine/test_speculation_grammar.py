"""Speculation under grammars, on the shipped model: the tokens of plain decoding, and no proposal
that a grammar forbids.

Right proposals are taken from the answers of plain decoding. In others a token is replaced at
random, by one that the grammar mostly forbids; the step must cut these before it computes them.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infer import LLM, FinishReason, Grammar, SamplingParams
from infer.engine.core import EngineCore
from infer.runner import grammar_masks
from infer.schedule.ngram_index import NgramIndex
from infer.schedule.sequence import Plan
from infer.text.grammars.compiler import Compiler, Constraint, Vocabulary
from infer.text.grammars.grammar_thoughts import BehindThoughts
from infer.types import Request
from tests.support.eager_drafts import propose_eagerly
from tests.support.isas import EXACT_DTYPE
from tests.support.lattice import preempt_at_every_third_step

CONFIG = '{"method": "ngram", "num_speculative_tokens": 6}'
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "likes": {"type": "array", "items": {"enum": ["cake", "tea"]}, "maxItems": 3},
    },
    "required": ["name", "likes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": Grammar.json(PERSON),
    "regex": Grammar.regex(r"[A-Z][a-z]{2,8}( [a-z]{2,8}){2,6}\."),
    "choice": Grammar.choice(["the cat sat on the mat", "the cat sat on the hill", "no"]),
    "list": Grammar.grammar('root ::= "[" item ("," item)* "]"\nitem ::= "yes" | "no"'),
    "thoughts": Grammar.choice(["yes, it is so", "no, it is not"]),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "seed": 2, "logprobs": 2},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "logprobs": 0},
}


def requests(llm: LLM) -> list[Request]:
    made = []
    for kind, grammar in GRAMMARS.items():
        for name, way in WAYS.items():
            sampling = SamplingParams(grammar=grammar, max_tokens=60, **way)
            made.append(llm.make_request("Once upon", sampling, request_id=f"{kind}, {name}"))
            if kind == "thoughts":
                made[-1] = dataclasses.replace(made[-1], thoughts=("", "."), max_tokens=150)
    return made


Answer = tuple[list[Any], list[Any], FinishReason | None]


def answers(core: EngineCore, asked: list[Request]) -> dict[str, Answer]:
    """Tokens, log-probabilities and the reason of the end, by request."""
    for request in asked:
        core.add(request)
    found: dict[str, Answer] = {request.request_id: ([], [], None) for request in asked}
    for output in core.outputs_until_complete():
        tokens, logprobs, _ = found[output.request_id]
        if output.token_id is not None:
            tokens.append(output.token_id)
            logprobs.append(output.logprobs)
        found[output.request_id] = (tokens, logprobs, output.finish_reason)
    return found


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, Answer]]:
    with LLM(max_seq_len=256, dtype=EXACT_DTYPE) as llm:
        yield answers(llm.core, requests(llm))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=256, dtype=EXACT_DTYPE, speculative_config=CONFIG) as llm:
        yield llm


def propose_from(
    known: dict[str, Answer], llm: LLM, seed: int
) -> Callable[[NgramIndex, list[int], int], tuple[int, ...]]:
    r = random.Random(seed)
    texts = [
        [*request.prompt_token_ids, *known[request.request_id][0]] for request in requests(llm)
    ]

    def propose(index: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        fitting = [text for text in texts if text[: len(tokens)] == tokens]
        right = r.choice(fitting or [tokens])[len(tokens) : len(tokens) + count]
        right += [r.randrange(2000) for _ in range(count - len(right))]
        if r.randrange(2):
            right[r.randrange(count)] = r.randrange(2000)
        return tuple(right)

    return propose


class Watched:
    """Checks each step: proposals are allowed by a grammar that has seen the answer and no more."""

    def __init__(self, llm: LLM) -> None:
        self._compiler = Compiler(Vocabulary.of(llm.tokenizer, 2048))
        self._execute = llm.core.runner.execute
        self.num_proposed = 0
        self.num_at = Counter[int]()
        self.problems: list[str] = []

    def _fresh(self, request: Request) -> Constraint:
        grammar = request.sampling.grammar
        assert grammar is not None
        constraint = self._compiler.constraint(grammar)
        if request.thoughts is None:
            return constraint
        return BehindThoughts(constraint, self._compiler.token_bytes(), *request.thoughts)

    def execute(self, plan: Plan) -> Any:
        for chunk in plan:
            if chunk.proposed:
                sequence = chunk.sequence
                constraint = self._fresh(sequence.request)
                constraint.follow(sequence.tokens[sequence.num_prompt :])
                for place, token in enumerate(chunk.proposed, 1):
                    if constraint.forbidden()[token]:
                        self.problems.append("a forbidden token is computed")
                        break
                    self.num_proposed += 1
                    self.num_at[place] += 1
                    if constraint.take(token) and place < len(chunk.proposed):
                        self.problems.append("a token behind the end is computed")
                        break
        return self._execute(plan)


@pytest.fixture
def watched(
    llm: LLM, plain: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watched]:
    monkeypatch.setattr(NgramIndex, "propose", propose_from(plain, llm, 3))
    propose_eagerly(monkeypatch)
    watched = Watched(llm)
    monkeypatch.setattr(llm.core.runner, "execute", watched.execute)
    yield watched
    assert not watched.problems


def equal(found: dict[str, Answer], plain: dict[str, Answer], llm: LLM) -> None:
    bits = str(llm.core.runner.caches[0].dtype) == "torch.bfloat16"  # type: ignore[attr-defined]
    for name in plain:
        assert found[name][0] == plain[name][0], name
        assert found[name][2] == plain[name][2], name
        if bits:
            assert found[name][1] == plain[name][1], name


def test_the_answers_of_plain_decoding(
    llm: LLM, plain: dict[str, Answer], watched: Watched
) -> None:
    before = llm.stats()["num_accepted_tokens"]
    equal(answers(llm.core, requests(llm)), plain, llm)
    accepted = llm.stats()["num_accepted_tokens"] - before
    assert accepted > 100
    assert watched.num_proposed > accepted  # allowed ones that were not sampled
    assert watched.num_at[6] > 5  # masks for every place of a step


def test_preempted_in_between(
    plain: dict[str, Answer], llm: LLM, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    monkeypatch.setattr(llm.core, "step", llm.core.step)  # undone behind the test
    preempt_at_every_third_step(llm.core)
    equal(answers(llm.core, requests(llm)), plain, llm)
    assert llm.stats()["num_preemptions"] >= 4
    assert watched.num_at[4] > 5


def test_another_engine_goes_on(plain: dict[str, Answer], llm: LLM, watched: Watched) -> None:
    cut = [
        dataclasses.replace(
            request, output_token_ids=tuple(plain[request.request_id][0][:5]), num_crashes=1
        )
        for request in requests(llm)
        if len(plain[request.request_id][0]) > 5
    ]
    found = answers(llm.core, cut)
    for name, (tokens, *_) in found.items():
        assert tokens == plain[name][0][5:], name
    assert watched.num_proposed > 50


def test_a_failed_step_is_computed_again(
    plain: dict[str, Answer], llm: LLM, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    """The grammar has followed tokens of a step that was lost after it was sampled."""
    execute, count = llm.core.runner.execute, 0

    def fails(plan: Plan) -> Any:
        nonlocal count
        results = execute(plan)
        count += 1
        if count % 4 == 0 and len(plan) > 1:
            raise RuntimeError("on purpose")
        return results

    monkeypatch.setattr(llm.core.runner, "execute", fails)
    asked = [each for each in requests(llm) if "thoughts" not in each.request_id]
    found = answers(llm.core, asked)
    equal(found, {name: plain[name] for name in found}, llm)


def test_nothing_is_proposed_while_a_mask_is_late(
    plain: dict[str, Answer], llm: LLM, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    monkeypatch.setattr(grammar_masks, "MASKS_S", 0.0)
    monkeypatch.setattr(grammar_masks, "OTHERS_S", 0.0)
    asked = [each for each in requests(llm) if "thoughts" not in each.request_id]
    found = answers(llm.core, asked)
    equal(found, {name: plain[name] for name in found}, llm)


@pytest.mark.parametrize("opening", ["", "<t>"])
def test_what_thoughts_allow_is_counted_without_a_trace(llm: LLM, opening: str) -> None:
    compiler = Compiler(Vocabulary.of(llm.tokenizer, 2048))
    answer = compiler.constraint(Grammar.choice(["yes!", "no!"]))
    constraint = BehindThoughts(answer, compiler.token_bytes(), opening, ".")
    for text, at_most in ((f"{opening}A cat.yes!", 99), (f"{opening}A cat.maybe", 99)):
        tokens = llm.tokenizer.encode(text, add_special_tokens=False)
        before = constraint.forbidden().tolist()
        count = constraint.num_allowed(tokens)
        assert constraint.forbidden().tolist() == before
        fresh = BehindThoughts(
            compiler.constraint(Grammar.choice(["yes!", "no!"])),
            compiler.token_bytes(),
            opening,
            ".",
        )
        expected = 0
        for token in tokens[:at_most]:
            if fresh.forbidden()[token]:
                break
            expected += 1
            if fresh.take(token):
                break
        assert count == expected
        assert (count == len(tokens)) == text.endswith("yes!")


# Faults planted on purpose.


def shows_proposals_to_the_grammar(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Constraint, "copy", lambda self: self)
    patch.setattr(Constraint, "follow", lambda self, tokens: None)


def one_mask_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        grammar_masks, "_masks_behind", lambda trial, first, proposed: [first] * len(proposed)
    )


def masks_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    real = grammar_masks._masks_behind
    patch.setattr(
        grammar_masks,
        "_masks_behind",
        lambda trial, first, proposed: [first, *real(trial, first, proposed)[:-1]],
    )


def cuts_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grammar_masks.Restrictions, "allowed", lambda self, sequence, proposed: proposed)


def does_not_see_the_end(patch: pytest.MonkeyPatch) -> None:
    def taken(constraint: Constraint, result: Any, num_masks: int) -> Any:
        constraint.take(result.token_id)
        return result

    patch.setattr(grammar_masks, "_taken", taken)


FAULTS = [
    shows_proposals_to_the_grammar,
    one_mask_for_all,
    masks_of_the_row_before,
    cuts_nothing,
    does_not_see_the_end,
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None],
    plain: dict[str, Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with LLM(max_seq_len=256, dtype=EXACT_DTYPE, speculative_config=CONFIG) as llm:
        monkeypatch.setattr(NgramIndex, "propose", propose_from(plain, llm, 3))
        propose_eagerly(monkeypatch)
        watched = Watched(llm)
        monkeypatch.setattr(llm.core.runner, "execute", watched.execute)
        found = answers(llm.core, requests(llm))
        same = all(found[name][0] == plain[name][0] for name in plain)
        ends = all(found[name][2] == plain[name][2] for name in plain)
        assert watched.problems or not (same and ends)
