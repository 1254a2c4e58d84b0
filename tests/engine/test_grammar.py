"""Structured output on the shipped model: the text fits its grammar, alone and in a batch, after a
preemption and after a crash; a grammar that fails affects no other request."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infer import LLM, EngineConfig, FinishReason, Grammar, SamplingParams
from infer.errors import RequestError
from infer.replicas import launch
from infer.runner import grammar_masks
from infer.schedule.sequence import NONE_LEFT
from infer.text import answer_parser
from infer.text.grammars.compiler import Compiler, Constraint, Vocabulary
from infer.types import RequestOutput
from tests.support.cases import timed
from tests.support.isas import EXACT_DTYPE

pytestmark = pytest.mark.usefixtures("kept_verdicts")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["cake", "tea"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
SENTENCE = r"[A-Z][a-z]{2,8} (and|or) [a-z]{2,8}\."
WAIT = {"type": "object", "properties": {"s": {"enum": [1, 2]}}, "required": ["s"]}
WORDS = ["cat", "caterpillar", "日本"]
LIST = 'root ::= "[" item ("," item)* "]"\nitem ::= "yes" | "no"'
GRAMMARS = [Grammar.json(PERSON), Grammar.regex(SENTENCE), Grammar.choice(WORDS)]
PROMPTS = ["Once upon a time", "One day", "The cat", "7 + 5 ="]


def fits(grammar: Grammar, text: str) -> bool:
    if grammar.kind == "json":
        value = json.loads(text)
        assert list(value) == ["name", "age", "likes"]
        assert len(value["name"]) <= 12
        return 0 <= value["age"] <= 99 and set(value["likes"]) <= {"cake", "tea"}
    if grammar.kind == "regex":
        return re.fullmatch(SENTENCE, text) is not None
    return text in WORDS


def sampling(grammar: Grammar | None, **changes: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seed": 1, "max_tokens": 150, "grammar": grammar, **changes}
    return SamplingParams(**values)


def crowd() -> tuple[list[str], list[SamplingParams]]:
    """Prompts with every grammar, greedy and sampled, among others without a grammar."""
    each = [
        sampling(grammar, temperature=temperature, seed=seed, max_tokens=150 if grammar else 60)
        for seed in range(2)
        for temperature in (0.0, 1.0)
        for grammar in (*GRAMMARS, Grammar.json(), None)
    ]
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(each))], each


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=256, dtype=EXACT_DTYPE) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    return [llm.generate(prompt, params)[0] for prompt, params in zip(*crowd(), strict=True)]


def same(one: list[RequestOutput], other: list[RequestOutput]) -> bool:
    def told(outputs: list[RequestOutput]) -> list[Any]:
        return [(output.token_ids, output.text, output.finish_reason) for output in outputs]

    return told(one) == told(other)


def test_what_comes_out_fits(alone: list[RequestOutput]) -> None:
    for output, params in zip(alone, crowd()[1], strict=True):
        if isinstance(params.grammar, Grammar) and params.grammar != Grammar.json():
            ended = output.finish_reason
            assert ended is FinishReason.COMPLETE or (output.text, ended) == ("cat", "eos")
            assert fits(params.grammar, output.text)
        elif params.grammar and output.finish_reason is FinishReason.COMPLETE:
            assert isinstance(json.loads(output.text), dict)


def test_a_context_free_grammar(llm: LLM) -> None:
    [output] = llm.generate("Say", sampling(Grammar.grammar(LIST), temperature=0, max_tokens=60))
    assert re.match(r"\[(yes|no)(,(yes|no))*", output.text)
    [output] = llm.generate("Say", sampling(Grammar.grammar('start: "a" | "b" start'), seed=3))
    assert re.fullmatch("b*a", output.text)


def test_company_changes_nothing(llm: LLM, alone: list[RequestOutput]) -> None:
    prompts, params = crowd()
    assert same(llm.generate(prompts, params), alone)


def test_preemption_changes_nothing(alone: list[RequestOutput]) -> None:
    prompts, params = crowd()
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 7,
        "max_batch_size": 16,
        "dtype": EXACT_DTYPE,
    }
    with LLM(max_seq_len=256, **settings) as tight:
        core = tight.core
        requests = map(tight.make_request, prompts, params)
        for request in requests:
            core.add(request)
        tokens: dict[str, list[int]] = {}
        step = 0
        while core.has_work:
            step += 1
            if step % 3 == 0 and core.scheduler.running:
                core.scheduler.preempt(core.scheduler.running[-1])
            for output in core.step(flush=True):
                if output.token_id is not None:
                    tokens.setdefault(output.request_id, []).append(output.token_id)
        assert core.scheduler.stats.num_preemptions > 25
        assert list(map(tuple, tokens.values()))  # in any order; compared as a multiset
        assert sorted(map(tuple, tokens.values())) == sorted(o.token_ids for o in alone)


def test_a_request_that_is_cut_anywhere_goes_on(llm: LLM) -> None:
    import dataclasses

    request = llm.make_request(PROMPTS[0], sampling(GRAMMARS[0]))
    llm.core.add(request)
    outputs = llm.core.outputs_until_complete()
    ids = [output.token_id for output in outputs if output.token_id is not None]
    for cut in range(1, len(ids)):
        rest = dataclasses.replace(
            request, request_id=f"c{cut}", output_token_ids=tuple(ids[:cut]), num_crashes=1
        )
        llm.core.add(rest)
    everything = llm.core.outputs_until_complete()
    for cut in range(1, len(ids)):
        outputs = [output for output in everything if output.request_id == f"c{cut}"]
        assert [output.token_id for output in outputs] == ids[cut:]
        assert outputs[-1].finish_reason is FinishReason.COMPLETE


def test_a_step_that_is_executed_again_changes_nothing(
    llm: LLM, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails after its tokens were sampled, so the constraints have seen them."""
    runner = llm.core.runner
    real, count = runner.execute, 0

    def execute(plan: Any) -> Any:
        nonlocal count
        results = real(plan)
        count += 1
        if len(plan) > 1 and count % 3 == 0:
            raise RuntimeError("a fault on purpose")
        return results

    monkeypatch.setattr(runner, "execute", execute)
    prompts, params = crowd()
    assert same(llm.generate(prompts, params), alone)
    assert count > 100


def test_it_ends_where_nothing_may_follow_and_with_length_where_it_is_cut(llm: LLM) -> None:
    long = sampling(Grammar.regex("[a-z]{40}"), max_tokens=3)
    [output] = llm.generate("a", long)
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 3)
    for ignore in (False, True):
        exact = sampling(Grammar.regex("yes"), ignore_eos=ignore, max_tokens=9)
        [output] = llm.generate("a", exact)
        assert (output.text, output.finish_reason) == ("yes", FinishReason.COMPLETE)
    open_end = sampling(
        Grammar.regex("y+"), logit_bias=dict.fromkeys(llm.tokenizer.eos_token_ids, 100)
    )
    [output] = llm.generate("a", open_end)
    assert re.fullmatch("y+", output.text)  # not before the first
    assert output.finish_reason is FinishReason.EOS


def test_a_minimum_length_holds_within_a_grammar(llm: LLM) -> None:
    params = sampling(Grammar.regex("(yes|no)( (yes|no))*"), min_tokens=12)
    [output] = llm.generate("Is it?", params)
    assert len(output.token_ids) >= 12
    assert set(output.text.split()) <= {"yes", "no"}


def test_what_has_nothing_in_common_fails_alone(llm: LLM) -> None:
    space = llm.tokenizer.encode(" ", add_special_tokens=False)
    bad = llm.make_request(
        "a", sampling(Grammar.choice(["yes"]), allowed_token_ids=space), request_id="bad"
    )
    good = llm.make_request("a", sampling(Grammar.choice(["yes"])), request_id="good")
    for request in (bad, good):
        llm.core.add(request)
    ends = {o.request_id: o for o in llm.core.outputs_until_complete() if o.finish_reason}
    assert ends["bad"].error is not None
    assert ends["bad"].error.message == NONE_LEFT
    assert ends["good"].finish_reason is FinishReason.COMPLETE


@pytest.mark.parametrize("where", ["forbidden", "follow"])
def test_a_grammar_that_fails_fails_alone(
    llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_calls = getattr(Constraint, where), 0

    def fails(self: Constraint, *args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise ValueError("on purpose")
        return real(self, *args)

    monkeypatch.setattr(Constraint, where, fails)
    requests = [
        llm.make_request("a", sampling(GRAMMARS[0], seed=i), request_id=str(i)) for i in range(2)
    ]
    for request in requests:
        llm.core.add(request)
    ends = {o.request_id: o for o in llm.core.outputs_until_complete() if o.finish_reason}
    reasons = sorted(end.finish_reason for end in ends.values() if end.finish_reason)
    assert reasons == [FinishReason.COMPLETE, FinishReason.ERROR]
    assert {end.error.message for end in ends.values() if end.error} == {grammar_masks.FAILED}


def test_allowed_and_bad(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the cat sat", add_special_tokens=False)
    [output] = llm.generate("a", sampling(None, allowed_token_ids=ids, max_tokens=20))
    assert set(output.token_ids) <= set(ids)
    free = sampling(None, temperature=0, max_tokens=60)
    words = re.findall(r"[a-z]{3,}", llm.generate(PROMPTS[0], free)[0].text)
    each = [free.replace(bad_words=[word]) for word in dict.fromkeys(words)]
    for output, params in zip(llm.generate([PROMPTS[0]] * len(each), each), each, strict=True):
        assert params.bad_words[0] not in re.findall(r"[A-Za-z]+", output.text)


@pytest.mark.parametrize("way", [answer_parser.BARE, answer_parser.HERMES])
def test_a_forced_call_is_a_call(llm: LLM, way: answer_parser.ToolFormat) -> None:
    tools = [
        {"function": {"name": 'say "it"', "parameters": PERSON}},
        {"function": {"name": "wait", "parameters": {"$ref": "#/$defs/a", "$defs": {"a": WAIT}}}},
    ]
    for parallel in (False, True):
        grammar = answer_parser.forced_calls(way, tools, parallel=parallel)
        seeds = [sampling(grammar, seed=i, max_tokens=250 - 20) for i in range(8)]
        for output in llm.generate(["a"] * 8, seeds):
            parser = answer_parser.AnswerParser(way, thinks=False)
            parts = [parser.push(output.text), parser.push("", end=True)]
            found = [call for part in parts for call in part.calls]
            assert {call.name for call in found} <= {'say "it"', "wait"}
            if output.finish_reason is not FinishReason.LENGTH:
                assert found
                assert parallel or len(found) == 1
                assert not parts[0].content + parts[1].content


@timed(1)
def test_hostile_grammars_do_not_hold_a_step_up(llm: LLM, most_s: float) -> None:
    """Forced text is not enumerated: with a real vocabulary that once took seconds."""
    compiler = Compiler(Vocabulary.of(llm.tokenizer, 2048))
    for text in ("(a{1000}){1000}", "x((a{100}){100}){100}", r"(\w{1,500}\s){1,500}"):
        started = time.perf_counter()
        constraint = compiler.constraint(Grammar.regex(text))
        for _ in range(20):
            allowed = (~constraint.forbidden()).nonzero()[0]
            constraint.take(int(allowed[0]))
        assert time.perf_counter() - started < most_s


def test_over_the_process_boundary(alone: list[RequestOutput]) -> None:
    async def main() -> list[RequestOutput]:
        small = EngineConfig(max_seq_len=256, dtype=EXACT_DTYPE, kv_cache_memory_bytes=32 << 20)
        async with launch.launch(small) as engine:
            with pytest.raises(RequestError, match="no token is left"):
                await engine.generate(
                    engine.make_request(
                        "a", sampling(Grammar.choice(["yes"]), allowed_token_ids=[5])
                    )
                )
            prompts, params = crowd()
            requests = map(engine.make_request, prompts[half:], params[half:])
            return list(await asyncio.gather(*map(engine.generate, requests)))

    half = len(alone) // 2  # those of the second seed: every grammar, greedy and sampled
    assert same(asyncio.run(main()), alone[half:])
