"""Defaults of requests are the model's on every API, each model's its own; what is given wins, and
`/openapi.json` and `/v1/models` say what a default is and where it is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.config import EngineConfig
from infer.replicas.launch import launch
from infer.types.sampling import DEFAULTED, SamplingParams
from infer.types.sampling_defaults import SamplingDefaults
from tests.support.checkpoints import write_llama
from tests.support.doubles import make_hash_llm
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    App,
    chat_body,
    completion_body,
    with_app,
)
from tests.support.tenants import make

SEEDS = (1, 2, 3)
GREEDY = SamplingDefaults(source="generation_config.json", temperature=0.0)


async def choices(app: App, path: str, **changes: Any) -> list[str]:
    """The text of each choice; of streams, what their events have together."""
    reply = await app.post(path, {**BODIES[path](**changes)})
    assert reply.status == 200, reply.body
    if reply.headers["content-type"].startswith("application/json"):
        return [str(c.get("text", c.get("message"))) for c in reply.json()["choices"]]
    lines = [line for line in reply.body.decode().split("\n") if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    # Tokens that come together may share an event, so events are joined.
    parts = [part for event in events for part in (event.get("token"), *event.get("choices", ()))]
    return ["".join(_text(part) for part in parts if part)]


def _text(part: Any) -> str:
    """The text of a token or choice of a stream."""
    if isinstance(part, str):
        return part
    found = part.get("text", part.get("delta"))
    return found if isinstance(found, str) else str(found.get("content") or "")


WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "completion": (COMPLETIONS, {}, {}),
    "completion stream": (COMPLETIONS, {"stream": True}, {}),
    "chat": (CHAT, {}, {}),
    "chat stream": (CHAT, {"stream": True}, {}),
    "typed": (COMPLETIONS, {}, {"completions_api": "typed"}),
    "typed events": (COMPLETIONS, {"stream": True, "stream_format": "events"}, {}),
    "null is absent": (CHAT, {"top_k": None, "temperature": None}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_three_seeds_give_one_text(way: str) -> None:
    path, body, settings = WAYS[way]

    async def use(app: App) -> tuple[int, int]:
        each = [await choices(app, path, **body, seed=seed) for seed in SEEDS]
        chosen = [
            await choices(app, path, **{**body, "temperature": 1}, seed=seed) for seed in SEEDS
        ]
        return len({str(texts) for texts in each}), len({str(texts) for texts in chosen})

    assert with_app(make_hash_llm(defaults=GREEDY), use, **settings) == (1, 3)
    assert with_app(make_hash_llm(), use, **settings) == (3, 3)


def test_choices_and_sessions(tmp_path: Path) -> None:
    async def use(app: App) -> None:
        assert len(set(await choices(app, CHAT, n=5))) == 1
        assert len(set(await choices(app, CHAT, n=5, temperature=1))) == 5
        found = set()
        for seed in SEEDS:
            session = (await app.post("/v1/sessions", {})).json()["id"]
            found.add(str([await choices(app, CHAT, session_id=session, seed=seed) for _ in "ab"]))
        assert len(found) == 1

    engine = make_hash_llm(defaults=GREEDY)
    with_app(engine, use, sessions=f"sqlite:///{tmp_path / 's.db'}")


def sampled(path: str, body: dict[str, Any], defaults: SamplingDefaults, **settings: Any) -> Any:
    """The requests that a body becomes."""
    made: list[Any] = []

    async def use(app: App) -> None:
        real = app.engine.enter

        def enter(request: Any, **how: Any) -> Any:
            made.append(request)
            return real(request, **how)

        app.engine.enter = enter  # type: ignore[method-assign]
        reply = await app.post(path, body)
        assert reply.status == 200, reply.body

    with_app(make_hash_llm(defaults=defaults), use, **settings)
    return made[0]


def bodies() -> list[Any]:
    """Every API's body without a limit and a seed."""
    completion, chat = completion_body(), chat_body()
    for body in (completion, chat):
        del body["max_tokens"], body["seed"]
    typed = {"completions_api": "typed"}
    return [
        pytest.param(COMPLETIONS, completion, {}, 16, id="completion"),
        pytest.param(COMPLETIONS, completion, typed, 128, id="typed"),
        pytest.param(CHAT, chat, {}, None, id="chat"),
    ]


VALUES: dict[str, Any] = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2.0,
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "max_tokens": 50, "min_tokens": 7,
    "stop": ("a",),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "settings", "limit"), bodies())
def test_each_default_reaches_the_engine_and_each_given_field_wins(
    path: str, body: dict[str, Any], settings: dict[str, Any], limit: int | None
) -> None:
    assert VALUES.keys() == DEFAULTED
    defaults = SamplingDefaults(source="x", **VALUES)
    request = sampled(path, body, defaults, **settings)
    assert {name: getattr(request.sampling, name) for name in VALUES} == VALUES
    assert request.max_tokens == 50
    for name, value in VALUES.items():
        fixed = getattr(SamplingParams(), name)
        given = sampled(path, {**body, name: fixed}, defaults, **settings)
        assert getattr(given.sampling, name) == fixed
        absent = sampled(path, {**body, name: None}, defaults, **settings)
        assert getattr(absent.sampling, name) == value
    plain = sampled(path, body, SamplingDefaults(), **settings)
    assert plain.sampling.max_tokens == limit
    unlimited = sampled(path, {**body, "max_tokens": -1}, defaults, **settings)
    assert unlimited.max_tokens > 400  # the context, not the default


@pytest.mark.parametrize(("path", "body", "settings", "limit"), bodies())
def test_a_default_limit_never_refuses(
    path: str, body: dict[str, Any], settings: dict[str, Any], limit: int | None, tmp_path: Path
) -> None:
    """It is cut to the context's room and to a key's; what the client says is not."""
    defaults = SamplingDefaults(source="x", max_tokens=100_000, min_tokens=1)
    request = sampled(path, {**body, "ignore_eos": True}, defaults, **settings)
    assert request.max_tokens == 512 - len(request.prompt_token_ids)
    assert sampled(path, {**body, "min_tokens": 40}, defaults, **settings).max_tokens > 400
    few = SamplingDefaults(source="x", max_tokens=5)
    assert sampled(path, {**body, "min_tokens": 40}, few, **settings).max_tokens == 40

    async def use(app: App) -> int:
        key = make(tmp_path / "keys.json", "a", tokens_per_minute=20)
        reply = await app.post(path, body, headers={"content-type": "application/json", **key})
        return reply.status

    (tmp_path / "keys.json").write_text('{"keys": []}', encoding="utf-8")
    how = {**settings, "api_keys": str(tmp_path / "keys.json")}
    assert with_app(make_hash_llm(defaults=defaults), use, **how) == 200


def test_the_document_and_the_list_of_models_say_where_a_default_is_from() -> None:
    async def use(app: App) -> tuple[Any, Any]:
        return (await app.get("/openapi.json")).json(), (await app.get("/v1/models")).json()

    defaults = SamplingDefaults(source="generation_config.json", **VALUES)
    found, models = with_app(make_hash_llm(defaults=defaults), use)
    shown = models["data"][0]["sampling_defaults"]
    assert shown == {**VALUES, "stop": ["a"], "source": "generation_config.json"}
    for body in ("ChatBody", "CompletionBody"):
        fields = found["components"]["schemas"][body]["properties"]
        for name, value in VALUES.items():
            assert fields[name]["default"] == (list(value) if name == "stop" else value)
            assert "generation_config.json" in fields[name]["description"]
            assert all("default" not in kind for kind in fields[name]["anyOf"])
        assert "description" not in fields["seed"]
    plain, models = with_app(make_hash_llm(), use)
    assert models["data"][0]["sampling_defaults"] == {"source": None}
    fields = plain["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["temperature"]["anyOf"][0]["default"] == 1.0
    assert not any("description" in fields[name] for name in VALUES)


@pytest.mark.parametrize(
    ("settings", "values", "num_texts"),
    [
        ({}, {"top_k": 1}, 2),
        # That engines leave the file unread is tested in tests/engine/test_sampling_defaults.py.
        pytest.param({"generation_config": "none"}, {}, 6, marks=pytest.mark.slow),
    ],
)
def test_engines_in_processes_tell_the_server_their_defaults(
    settings: dict[str, Any], values: dict[str, Any], num_texts: int, tmp_path: Path
) -> None:
    """The process of the API reads no checkpoint: what it knows comes from the engine's process."""
    write_llama(tmp_path, num_hidden_layers=1, max_position_embeddings=128)
    config = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    config |= {"top_k": 1, "typical_p": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")

    async def use(app: App) -> int:
        ways = ((path, seed) for path in BODIES for seed in SEEDS)
        each = [await choices(app, path, seed=seed, model=None) for path, seed in ways]
        return len({str(texts) for texts in each})

    engine = launch(EngineConfig(model=str(tmp_path), dtype="float32", **settings))
    assert engine.sampling_defaults.values == values
    assert with_app(engine, use) == num_texts
