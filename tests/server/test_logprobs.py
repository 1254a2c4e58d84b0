"""Log-probabilities: OpenAI's two formats, streamed = plain, incomplete characters, floors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from infer.server.openai.logprobs import ChoiceLogprobs
from infer.types import TokenLogprobs
from tests.support.doubles import small_tokenizer
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    Reply,
    ask,
    chat_body,
    completion_body,
    scripted,
    spelled,
)

A, B, C = spelled("ABC")


def test_of_a_completion() -> None:
    body = completion_body(logprobs=2, max_tokens=2)
    [choice] = ask(scripted([A, B]), COMPLETIONS, body).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["A", "B"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"A": -0.25, "B": -1.25}, {"B": -0.25, "C": -1.25}],
        "text_offset": [0, 1],
    }


def test_of_a_completion_with_the_sampled_token_only() -> None:
    [choice] = ask(scripted([A, B]), COMPLETIONS, completion_body(logprobs=0, max_tokens=1)).json()[
        "choices"
    ]
    assert choice["logprobs"]["top_logprobs"] == [{"A": -0.25}]


def test_of_a_chat() -> None:
    body = chat_body(logprobs=True, top_logprobs=2, max_tokens=1)
    [choice] = ask(scripted([A]), CHAT, body).json()["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "A",
                "logprob": -0.25,
                "bytes": [65],
                "top_logprobs": [
                    {"token": "A", "logprob": -0.25, "bytes": [65]},
                    {"token": "B", "logprob": -1.25, "bytes": [66]},
                ],
            }
        ],
        "refusal": None,
    }
    [choice] = ask(scripted([A]), CHAT, chat_body(logprobs=True, max_tokens=1)).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_pieces_of_a_character_and_special_tokens() -> None:
    script = [*spelled("é"), 258, *spelled("!")]
    body = completion_body(logprobs=0, max_tokens=4)
    [choice] = ask(scripted(script), COMPLETIONS, body).json()["choices"]
    assert choice["text"] == "é!"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<|system|>", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1]
    body = completion_body(logprobs=0, max_tokens=4, skip_special_tokens=False)
    [choice] = ask(scripted(script), COMPLETIONS, body).json()["choices"]
    assert choice["text"] == "é<|system|>!"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 11]
    body = chat_body(logprobs=True, max_tokens=2)
    [choice] = ask(scripted(script), CHAT, body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é"


def joined(path: str, reply: Reply) -> Any:
    together: dict[str, list[Any]] = {}
    for chunk in reply.events():
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    together.setdefault(name, []).extend(values)
    return together


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("step_s", [0.0, 0.003])
def test_streamed_ones_put_together_are_the_plain_ones(path: str, step_s: float) -> None:
    """Also while text is held back, for a stop string or for a character of four tokens."""
    script = spelled("a😀 st!")
    wanted = {"logprobs": 3} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 3}
    body = BODIES[path](max_tokens=len(script), stop="stop", **wanted)
    [choice] = ask(scripted(script), path, body).json()["choices"]
    reply = ask(scripted(script, step_s=step_s), path, {**body, "stream": True})
    plain = {name: values for name, values in choice["logprobs"].items() if values is not None}
    assert joined(path, reply) == plain
    assert len(next(iter(plain.values()))) == len(script)


@pytest.mark.parametrize("path", BODIES)
def test_none_unless_asked(path: str) -> None:
    [choice] = ask(scripted([A]), path, BODIES[path]()).json()["choices"]
    assert choice["logprobs"] is None


def test_numbers_that_json_does_not_have() -> None:
    writer = ChoiceLogprobs(small_tokenizer(), skip_special=True)
    entry = TokenLogprobs(-math.inf, ((B, math.nan), (C, -1e5), (A, -1.0)))
    assert writer.completion([A], [entry]) == {
        "tokens": ["A"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"A": -9999.0, "B": -9999.0, "C": -9999.0}],
        "text_offset": [0],
    }
