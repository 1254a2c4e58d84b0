"""Scores of prompts (echo, log-probabilities, token ids) as evaluation harnesses request them, on
the shipped model; deadlines; and routes that do not exist."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from infer import LLM, SamplingParams
from tests.support.demo_answers import (
    demo,
)
from tests.support.doubles import make_hash_llm
from tests.support.isas import EXACT_DTYPE
from tests.support.serving import BODIES, CHAT, COMPLETIONS, App, ask, check_refused, with_app

TEXT = "Once upon a time there was a little girl named Lily."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=256) as llm:
        yield llm


@pytest.fixture
def exact() -> Iterator[LLM]:
    with LLM(max_seq_len=256, dtype=EXACT_DTYPE) as llm:
        yield llm


def test_scores_of_a_prompt_are_those_of_its_generation(exact: LLM) -> None:
    """Cold and warm, whole and in chunks, before and after a preemption."""
    greedy = SamplingParams(temperature=0, max_tokens=30, logprobs=3)
    [made] = exact.generate(TEXT, greedy)
    whole = [*made.prompt_token_ids, *made.token_ids]
    looked = SamplingParams(max_tokens=1, prompt_logprobs=3)
    [first] = exact.generate(whole, looked)
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(whole) - 1
    own = first.prompt_logprobs[len(made.prompt_token_ids) - 1 :]
    assert made.logprobs is not None
    for one, other in zip(own, made.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
    [again] = exact.generate(whole, looked)
    assert (again.prompt_logprobs, again.num_cached) == (first.prompt_logprobs, 0)
    with LLM(max_seq_len=256, max_num_batched_tokens=7, dtype=EXACT_DTYPE) as small:
        core, request = small.core, small.make_request(whole, looked)
        core.add(request)
        for _ in range(3):
            core.step(flush=True)
        core.scheduler.preempt(core.scheduler.running[0])
        [output] = core.outputs_until_complete()
    assert output.prompt_logprobs == first.prompt_logprobs


def test_a_prompt_does_not_keep_its_scores_to_itself(llm: LLM) -> None:
    """Its pages are not found by later requests, but those of other requests are."""
    llm.generate(TEXT * 2, SamplingParams(max_tokens=1, prompt_logprobs=0))
    [cold] = llm.generate(TEXT * 2, SamplingParams(max_tokens=1))
    [warm] = llm.generate(TEXT * 2, SamplingParams(max_tokens=1))
    assert cold.num_cached < warm.num_cached


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_as_evaluation_harnesses_ask_for_it(llm: LLM, max_tokens: int) -> None:
    ids = llm.tokenizer.encode(TEXT)
    body = {"prompt": [ids], "max_tokens": max_tokens, "logprobs": 2, "echo": True, "seed": 1234}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    plain, events = demo(COMPLETIONS, body, streamed)
    [choice] = plain["choices"]
    [scored] = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=2))
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert (choice["text"] == TEXT) is (max_tokens == 0)
    assert {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(
        [entry.logprob for entry in scored.prompt_logprobs or ()], abs=1e-4
    )
    for token, top, offset in zip(
        logprobs["tokens"][1:], logprobs["top_logprobs"][1:], logprobs["text_offset"][1:],
        strict=True,
    ):  # fmt: skip
        assert token in top
        assert 2 <= len(top) <= 3
        assert choice["text"][offset:].startswith(token)
    assert plain["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    parts = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in logprobs.items():
        assert [v for part in parts if part["logprobs"] for v in part["logprobs"][name]] == values
    assert events[-1]["usage"] == plain["usage"]


def test_echo_alone() -> None:
    plain, events = demo(
        COMPLETIONS,
        {"prompt": [TEXT, "One day"], "max_tokens": 0, "echo": True},
        {"prompt": TEXT, "max_tokens": 2, "echo": True, "stream": True},
    )
    assert [choice["text"] for choice in plain["choices"]] == [TEXT, "One day"]
    assert "".join(event["choices"][0]["text"] for event in events).startswith(TEXT)


def test_prompt_logprobs_and_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    fields = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 3}
    [plain] = demo(COMPLETIONS, {"prompt": TEXT, **fields})
    [choice] = plain["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for token_id, entries in zip(ids[1:], rest, strict=True):
        assert set(entries[str(token_id)]) == {"logprob", "decoded_token"}
        assert len(entries) <= 2
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) == 3
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "return_token_ids": True, "max_tokens": 5}
    chat, looked, events = demo(
        CHAT, body, {**body, "prompt_logprobs": 1, "n": 2}, {**body, "stream": True}
    )
    [choice] = chat["choices"]
    choices = [event["choices"][0] for event in events]
    assert [i for part in choices for i in part.get("token_ids", ())] == choice["token_ids"]
    # The prompt is common to all choices, so it is in the response and in the first chunk.
    assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in (*events[1:], *choices, choice))
    assert looked["prompt_token_ids"] == chat["prompt_token_ids"]
    assert len(looked["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert looked["prompt_logprobs"][0] is None
    assert not any({"prompt_logprobs", "prompt_token_ids"} & {*each} for each in looked["choices"])


@pytest.mark.parametrize("path", BODIES)
def test_a_timeout(path: str) -> None:
    async def use(app: App) -> None:
        late = BODIES[path](max_tokens=400, ignore_eos=True, timeout=0.05)
        reply = await app.post(path, late)
        assert (reply.status, reply.error()["code"]) == (504, "deadline_exceeded")
        await app.idle()
        stream = await app.post(path, {**late, "stream": True})
        assert stream.status == 200
        *_, last = stream.body.decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        await app.idle()
        assert (await app.post(path, BODIES[path](timeout=30))).status == 200

    with_app(make_hash_llm(step_s=0.005), use)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/moderations"])
def test_what_is_not_there(path: str) -> None:
    reply = ask(make_hash_llm(), path, {"input": "x"})
    check_refused(reply, 404, None, "not_found", f"has no {path[4:]}: it completes texts and chats")
