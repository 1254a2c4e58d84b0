"""A slow grammar delays only its own request, whose tokens stay the same."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infer import LLM, Grammar, SamplingParams
from infer.runner import grammar_masks
from infer.text.grammars.compiler import CACHE_BYTES, CompiledGrammars, Compiler, Constraint
from infer.types.step_output import StepOutput
from tests.support.waits import until

SLOW = Grammar.regex("[a-z]{4,12}( [a-z]{2,9}){2}")
QUICK = Grammar.choice(["yes", "no"])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=256) as llm:
        yield llm


def sampling(grammar: Grammar | None, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(grammar=grammar, seed=1, max_tokens=max_tokens, ignore_eos=True)


def steps_of(llm: LLM, grammars: dict[str, Grammar | None]) -> dict[str, list[tuple[int, Any]]]:
    """(step, token) for each request."""
    for name, grammar in grammars.items():
        prompt = "Once upon a time there was a little fox who lived in a wood. " * 3
        request = llm.make_request(prompt, sampling(grammar), request_id=name)
        llm.core.add(request)
    found: dict[str, list[tuple[int, Any]]] = {name: [] for name in grammars}
    step = 0
    while llm.core.has_work:
        step += 1
        for output in llm.core.step():
            assert output.error is None, output
            found[output.request_id].append((step, output.token_id))
    return found


def tokens(found: list[tuple[int, Any]]) -> list[Any]:
    return [token for _, token in found]


def test_who_is_being_compiled_waits_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {name: steps_of(llm, {name: grammar}) for name, grammar in
             (("slow", SLOW), ("quick", QUICK), ("free", None))}  # fmt: skip
    real = Compiler.constraint

    def slowly(self: Compiler, grammar: Grammar, num_bytes: int = 0) -> Constraint:
        if grammar == SLOW:
            time.sleep(0.6)
        return real(self, grammar, num_bytes)

    monkeypatch.setattr(Compiler, "constraint", slowly)
    found = steps_of(llm, {"quick": QUICK, "slow": SLOW, "free": None})
    for name in found:
        assert tokens(found[name]) == tokens(alone[name][name])
    # The request without a grammar was not delayed: it had tokens before the slow one's first.
    first = found["slow"][0][0]
    assert sum(step < first for step, _ in found["free"]) >= 5


def test_others_wait_once_for_a_first_mask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each step that begins while the grammar is being compiled."""
    real = Compiler.constraint

    def slowly(self: Compiler, grammar: Grammar, num_bytes: int = 0) -> Constraint:
        time.sleep(1.0)
        return real(self, grammar, num_bytes)

    monkeypatch.setattr(Compiler, "constraint", slowly)
    monkeypatch.setattr(grammar_masks, "OTHERS_S", 0.25)
    found = steps_of(llm, {"slow": SLOW, "free": None})
    first = found["slow"][0][0]
    assert sum(step < first for step, _ in found["free"]) >= 10


@pytest.mark.parametrize("when", [1, 3])
def test_who_has_a_slow_mask_waits_alone(
    llm: LLM, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {
        name: steps_of(llm, {name: grammar}) for name, grammar in (("slow", SLOW), ("free", None))
    }
    real, count = Constraint.forbidden, 0

    def slowly(self: Constraint) -> Any:
        nonlocal count
        count += 1
        if count == when:
            ends_s = time.thread_time() + 0.06
            while time.thread_time() < ends_s:
                time.sleep(0.001)
                sum(range(10_000))
        return real(self)

    monkeypatch.setattr(Constraint, "forbidden", slowly)
    found = steps_of(llm, {"slow": SLOW, "free": None})
    for name in found:
        assert tokens(found[name]) == tokens(alone[name][name])
    slow = [step for step, _ in found["slow"]]
    free = [step for step, _ in found["free"]]
    assert len(set(range(free[0], slow[-1] + 1)) - set(slow)) >= 1  # it missed at least a step
    assert free == list(range(free[0], free[0] + len(free)))  # and the other one none


def test_everybody_late_is_no_loss(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that compute nothing because all requests wait do not count as an engine's failure."""
    alone = steps_of(llm, {"a": SLOW})
    real, step, num_steps = Compiler.constraint, llm.core.step, 0

    def slowly(self: Compiler, grammar: Grammar, num_bytes: int = 0) -> Constraint:
        until(lambda: num_steps >= 5)
        return real(self, grammar, num_bytes)

    def counted() -> list[StepOutput]:
        nonlocal num_steps
        num_steps += 1
        return step()

    monkeypatch.setattr(Compiler, "constraint", slowly)
    monkeypatch.setattr(llm.core, "step", counted)
    found = steps_of(llm, {"a": SLOW})
    assert tokens(found["a"]) == tokens(alone["a"])
    assert found["a"][0][0] >= 5


def test_a_tenants_grammars_keep_no_other_tenant_waiting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled one by one in one thread, and those of others in another."""
    real, may_end, compiled = Compiler.constraint, threading.Event(), []

    def slowly(self: Compiler, grammar: Grammar, num_bytes: int = 0) -> Constraint:
        compiled.append(grammar)
        if grammar != QUICK:
            assert may_end.wait(60)
        return real(self, grammar, num_bytes)

    monkeypatch.setattr(Compiler, "constraint", slowly)
    slow = {f"a{i}": Grammar.choice([f"x{i}", "y"]) for i in range(4)}
    for name, grammar in [*slow.items(), ("b", QUICK)]:
        request = llm.make_request("Once", sampling(grammar, 2), request_id=name)
        llm.core.add(dataclasses.replace(request, tenant=name[0]))
    ended: list[str] = []
    while llm.core.has_work:
        for output in llm.core.step():
            assert output.error is None, output
            ended += [output.request_id] * (output.finish_reason is not None)
        if ended == ["b"]:
            assert compiled == [slow["a0"], QUICK]
            may_end.set()
    assert ended[0] == "b"
    assert set(ended) == {*slow, "b"}


def test_a_grammar_is_freed_in_the_thread_that_has_compiled_it(monkeypatch: Any) -> None:
    """In another thread its many parts would be freed one by one beside the next compilation."""
    freed: list[int] = []
    compiled_in: list[int] = []

    class Matcher:
        def __init__(self) -> None:
            compiled_in.append(threading.get_ident())

        def deep_copy(self) -> Any:
            return self

        def compute_bitmask(self) -> bytes:
            return b"\xff" * 4096

        def is_error(self) -> bool:
            return False

        def consume_token(self, token: int) -> bool:
            return True

        def is_stopped(self) -> bool:
            return True

        def __del__(self) -> None:
            freed.append(threading.get_ident())

    monkeypatch.setattr(Compiler, "_compile", lambda self, grammar: Matcher())
    with LLM(max_seq_len=256) as llm:
        for i in range(6):
            request = llm.make_request("Once", sampling(Grammar.choice([f"{i}"])))
            llm.core.add(dataclasses.replace(request, grammar_bytes=CACHE_BYTES // 2))
            del request
            while llm.core.has_work:
                llm.core.step()
        steps_of(llm, {"free": None})
        while len(freed) < 4:  # two are kept
            time.sleep(0.001)
        assert freed == compiled_in[:4]


def test_compiled_grammars_are_kept_by_their_bytes() -> None:
    made: list[Grammar] = []

    def compile_one(grammar: Grammar) -> Any:
        made.append(grammar)
        if grammar.text == "bad":
            raise ValueError("on purpose")
        return object()

    kept = CompiledGrammars(compile_one, 1 << 20)
    each = [Grammar.regex(f"{i}") for i in range(6)]
    for grammar in each[:4]:
        kept.compiled(grammar, 1 << 18)
    kept.compiled(each[0], 1 << 18)
    assert (len(kept), kept.num_bytes, len(made)) == (4, 1 << 20, 4)
    kept.compiled(each[4], 1 << 18)
    kept.compiled(each[0], 1 << 18)  # used recently, so the second one was evicted
    assert made == each[:5]
    kept.compiled(each[1], 1 << 18)
    assert made == [*each[:5], each[1]]
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            kept.compiled(Grammar.regex("bad"), 1 << 18)
    assert len(made) == 8  # a failure is not kept
    kept.compiled(each[5], 2 << 20)  # larger than the whole cache
    assert (len(kept), kept.num_bytes) == (0, 0)


@pytest.mark.parametrize("opening", ["", "Once"])
def test_a_grammar_begins_behind_thoughts(llm: LLM, opening: str) -> None:
    """Any marks will do: here a sentence of the model's text stands for the thoughts."""
    input_processor, core = llm._input_processor, llm.core
    for seed in range(4):
        params = SamplingParams(grammar=Grammar.choice(["yes!", "no!"]), seed=seed, max_tokens=150)
        names = ("alone", "cut")
        request = input_processor.make_request(
            "One", params, request_id="alone", thoughts=(opening, ".")
        )
        core.add(request)
        outputs = core.outputs_until_complete()
        ids = [output.token_id for output in outputs if output.token_id is not None]
        text = llm.tokenizer.decode(ids)
        thoughts, _, answer = text.rpartition(".")
        assert answer in ("yes!", "no!"), text
        assert opening or thoughts
        # Another engine that continues the request gives the same tokens.
        cut = len(ids) // 2
        rest = dataclasses.replace(
            request, request_id=names[1], output_token_ids=tuple(ids[:cut]), num_crashes=1
        )
        core.add(rest)
        assert [output.token_id for output in core.outputs_until_complete()] == ids[cut:]
