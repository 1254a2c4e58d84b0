"""Values that whole families of clients send for "greedy", "none", "no limit" and whole numbers
mean that on every API; many choices stay within the limits of the queue and of a key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from infer.engine.client.input import InputProcessor
from infer.errors import RequestError, UnprocessableError
from infer.server.openai.schema_base import Wire, read
from infer.server.openai.typed_completions import TypedCompletionBody
from tests.support.doubles import make_hash_llm
from tests.support.serving import (
    BODIES,
    COMPLETIONS,
    JSON,
    App,
    ask,
    chat_body,
    completion_body,
    with_app,
)
from tests.support.tenants import make

NEEDED: dict[str, Any] = {
    "prompt": "x",
    "input": "x",
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [1],
    "title": "x",
    "role": "user",
    "type": "content",
    "content": "x",
    "text": "x",
}
"""A value of each field that some model needs."""
BESIDE: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}
"""What else a field needs."""


def wire_models(root: type[Wire] = Wire) -> Iterator[type[Wire]]:
    for model in root.__subclasses__():
        if model.__module__.startswith("infer."):
            yield model
        yield from wire_models(model)


MODELS = dict.fromkeys(wire_models())


def shapes(schema: Any, around: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The lists around each integer that a field may hold; () for the field itself."""
    if schema.get("type") == "integer":
        yield around
    if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
        yield from shapes(schema["items"], (*around, "list"))
    for kind in schema.get("anyOf", ()):
        yield from shapes(kind, around)


FIELDS = [
    (model, name, len(shape))
    for model in MODELS
    for name, field in model.model_json_schema(mode="validation")["properties"].items()
    if name in model.model_fields
    for shape in sorted(set(shapes(field)))
]
INTEGERS = [
    pytest.param(*field, id=f"{field[0].__name__}-{field[1]}-{field[2]}") for field in FIELDS
]


def in_lists(value: Any, depth: int) -> Any:
    return value if depth == 0 else [in_lists(value, depth - 1)]


def types_in(value: Any) -> set[type]:
    return set().union(*map(types_in, value)) if isinstance(value, (list, tuple)) else {type(value)}


@pytest.mark.parametrize(("model", "name", "depth"), INTEGERS)
def test_a_whole_number_is_an_integer_in_every_field(
    model: type[Wire], name: str, depth: int
) -> None:
    needed = {n: NEEDED[n] for n, field in model.model_fields.items() if field.is_required()}
    body = {**needed, **BESIDE.get(name, {})}
    found = getattr(read(model, {**body, name: in_lists(1.0, depth)}), name)
    assert found == getattr(read(model, {**body, name: in_lists(1, depth)}), name)
    assert types_in(found) == {int}
    for wrong in (1.5, 1e300, True, "1"):
        if (depth, wrong) == (1, "1") and name == "prompt":
            continue  # a list of texts
        with pytest.raises(RequestError):
            read(model, {**body, name: in_lists(wrong, depth)})


@pytest.mark.parametrize("model", [model for model in MODELS if model.ignored])
def test_a_whole_number_is_an_integer_in_every_field_without_effect(model: type[Wire]) -> None:
    needed = {n: NEEDED[n] for n, field in model.model_fields.items() if field.is_required()}
    for name, values in model.ignored.items():
        for value in values:
            if type(value) in (int, float):
                for same in (int(value), float(value)):
                    read(model, {**needed, name: same})
                with pytest.raises(RequestError):
                    read(model, {**needed, name: value + 0.5})


def test_the_list_of_integer_fields_is_made() -> None:
    names = {(model.__name__, name, depth) for model, name, depth in FIELDS}
    for model in ("ChatBody", "CompletionBody", "TypedCompletionBody"):
        assert {(model, name, 0) for name in ("max_tokens", "seed", "top_k", "priority")} <= names
    assert {("CompletionBody", "prompt", depth) for depth in (1, 2)} <= names
    assert {("ForkBody", "at", 0), ("ComparisonBody", "seats", 0), ("ChatBody", "n", 0)} <= names


def answers(path: str, *changes: dict[str, Any], **settings: Any) -> list[Any]:
    """The choices' texts and the usage for each body, all of one engine."""

    async def use(app: App) -> list[Any]:
        found = []
        for each in changes:
            reply = await app.post(path, BODIES[path](**each))
            assert reply.status == 200, (each, reply.body)
            answer = reply.json()
            texts = [c.get("text", c.get("message")) for c in answer["choices"]]
            found.append((texts, answer["usage"]["completion_tokens"]))
        return found

    return with_app(make_hash_llm(**settings), use)


GREEDY: tuple[dict[str, Any], ...] = (
    *({"top_p": 0}, {"top_p": -0.0}, {"top_p": 0.0, "temperature": 1.5}),
    *({"temperature": value} for value in (1e-6, 0.001, 0.00999, 5e-324)),
    {"temperature": 1e-9, "top_p": 0},
)


@pytest.mark.parametrize("path", BODIES)
def test_top_p_zero_and_tiny_temperatures_are_greedy(path: str) -> None:
    greedy, sampled, *others = answers(path, {"temperature": 0}, {}, *GREEDY)
    assert greedy != sampled
    assert others == [greedy] * len(GREEDY)


NOTHING: tuple[Any, ...] = ("", [""], ["", None, ""], [None], [], None)


@pytest.mark.parametrize("path", BODIES)
def test_an_empty_stop_string_stops_nothing(path: str) -> None:
    plain, *others = answers(path, {}, *({"stop": stop} for stop in NOTHING))
    assert others == [plain] * len(NOTHING)
    plain, *others = answers(path, {}, *({"bad_words": words} for words in NOTHING))
    assert others == [plain] * len(NOTHING)


@pytest.mark.parametrize("path", BODIES)
def test_there_are_sixteen_stop_strings(path: str) -> None:
    never = [f"no such text {i}" for i in range(16)]
    plain, stopped = answers(path, {}, {"stop": [*never[:15], "", None, *never[15:]]})
    assert stopped == plain


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [-1, -1.0, -2])
def test_a_limit_of_minus_one_is_none(path: str, value: float) -> None:
    body: dict[str, Any] = {"ignore_eos": True}
    [(_, limited), (_, open_ended)] = answers(
        path, {**body, "max_tokens": 20}, {**body, "max_tokens": value}, max_seq_len=64
    )
    assert limited == 20
    assert open_ended > 40
    if path == COMPLETIONS:
        return
    body |= {"max_tokens": None, "max_completion_tokens": value}
    assert answers(path, body, max_seq_len=64)[0][1] == open_ended


def test_no_limit_in_the_typed_api() -> None:
    body = read(TypedCompletionBody, {"prompt": "x", "max_tokens": -1})
    assert body.max_tokens is None
    assert body.is_open_ended
    assert not read(TypedCompletionBody, {"prompt": "x", "max_tokens": 5}).is_open_ended


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("seed", [-1, -1.0, -2, -(2**63)])
def test_a_negative_seed_is_a_random_one(path: str, seed: float) -> None:
    found = answers(path, *[{"seed": seed, "temperature": 1}] * 4)
    assert len({str(texts) for texts, _ in found}) == 4
    again = answers(path, *[{"seed": 7, "temperature": 1}] * 2)
    assert again[0] == again[1]


@pytest.mark.parametrize("named", [{}, {"name": None}, {"name": ""}])
def test_a_schema_needs_no_name(named: dict[str, Any]) -> None:
    def grammar(name: dict[str, Any]) -> Any:
        form = {"type": "json_schema", "json_schema": {**name, "schema": {"const": "a"}}}
        return read(TypedCompletionBody, {"prompt": "x", "response_format": form}).response_format

    assert grammar(named) == grammar({"name": "answer"})


@pytest.mark.parametrize("path", BODIES)
def test_many_choices_are_made_at_the_cost_of_one_prompt(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    real = InputProcessor.tokenize

    def tokenize(self: InputProcessor, prompt: Any) -> tuple[int, ...]:
        tokenized.append(len(prompt))
        return real(self, prompt)

    monkeypatch.setattr(InputProcessor, "tokenize", tokenize)
    body = {"n": 128, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    [(texts, num_tokens)] = answers(path, body)
    assert (len(texts), num_tokens) == (128, 512)
    assert len(tokenized) == 1
    assert len(set(map(str, texts))) > 100  # each has a seed of its own


def test_many_choices_need_as_many_places(tmp_path: Path) -> None:
    """A refused request leaves nothing behind: what fits is taken afterwards."""

    async def use(app: App) -> None:
        reply = await app.post(COMPLETIONS, completion_body(n=13))
        assert reply.status == 503
        assert reply.error()["code"] == "overloaded"
        assert (app.engine.num_open, app.engine.num_reserved) == (0, 0)
        assert (await app.post(COMPLETIONS, completion_body(n=12))).status == 200

    with_app(make_hash_llm(max_batch_size=4, max_waiting_requests=8), use)


def test_many_choices_count_for_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = make(file, "a", max_concurrent=20)

    async def use(app: App) -> None:
        headers = {**JSON, **key}
        reply = await app.post(COMPLETIONS, completion_body(n=128), headers=headers)
        assert (reply.status, reply.error()["code"]) == (400, "too_many_choices")
        reply = await app.post(COMPLETIONS, completion_body(n=20), headers=headers)
        assert reply.status == 200

    with_app(make_hash_llm(), use, api_keys=str(file))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER, CALLS = {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": ""}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no model": ({}, {"model": ""}),
    "no log-probabilities": ({}, {"logprobs": False, "top_logprobs": 0}),
    "a tool without a type": ({"tools": [TOOL]}, {"tools": [{**TOOL, "type": None}]}),
    "a call without a type": (
        {"messages": [USER, CALLS, RESULT]},
        {"messages": [USER, {**CALLS, "tool_calls": [{**CALL, "type": None}]}, RESULT]},
    ),
    "a result of nothing": (
        {"messages": [USER, CALLS, RESULT]},
        {"messages": [USER, CALLS, {**RESULT, "content": None}]},
    ),
    "Mistral's choice": (
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "any"},
    ),
    "the choice of a response": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "function": None}},
    ),
    "a schema beside its type": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA, "name": "n"}},
    ),
}
"""What a chat may say → the same, and as other clients write it."""


@pytest.mark.parametrize("name", SAME)
def test_what_other_clients_write_means_the_same(name: str) -> None:
    usual, other = (chat_body(temperature=0, **fields) for fields in SAME[name])
    (first, num_tokens), (second, num_others) = answers("/v1/chat/completions", usual, other)
    for message in (*first, *second):
        for call in message.get("tool_calls", ()):
            del call["id"]
    assert (first, num_tokens) == (second, num_others)


def test_a_schema_beside_its_type_is_strict_where_it_says_so() -> None:
    form = {"type": "json_schema", "schema": {"not": {}}, "strict": True}
    reply = ask(make_hash_llm(), "/v1/chat/completions", chat_body(response_format=form))
    assert (reply.status, reply.json()["error"]["param"]) == (400, "response_format.schema")


@pytest.mark.parametrize("given", [None, "", '{"a": 1', [1], 5])
def test_an_input_that_is_no_object_can_be_sent_back_in_messages(given: Any) -> None:
    """`/v1/messages`: a call that was cut, as clients keep it."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": given}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "cut"}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"max_tokens": 4, "messages": turns}
    assert ask(make_hash_llm(), "/v1/messages", body).status == 200


def test_lengths_are_said_of_lists_and_of_strings() -> None:
    class Sized(Wire):
        names: list[str] = Field(["a"], min_length=1, max_length=2)
        word: str = Field("a", min_length=1, max_length=3)

    for body, said in (
        ({"names": []}, "names must be a list of at least 1"),
        ({"names": ["a"] * 3}, "names must be a list of at most 2"),
        ({"word": ""}, "word must be a string of at least 1 characters"),
        ({"word": "four"}, "word must be a string of at most 3 characters"),
    ):
        with pytest.raises(UnprocessableError, match=said):
            read(Sized, body)
