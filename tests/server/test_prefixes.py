"""Public prefixes: keys with that right share whole pages of the operator's own texts, and no other
token is shared between keys."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.errors import ConfigError
from infer.schedule.sequence import Plan
from infer.server.generation import CONVERSATIONS
from infer.types import Request, SamplingParams
from tests.support.doubles import make_hash_llm, small_tokenizer
from tests.support.hash_engine import HashRunner, solo
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    App,
    chat_body,
    completion_body,
    serving,
    with_app,
)
from tests.support.tenants import cached, make

PAGE = 4  # tokens per page of the hash model
TEXT = "You are the keeper of the north library."
BEGIN = small_tokenizer().encode(TEXT)
OWNERS = {"a": True, "b": True, "c": False, "d": False}
"""Key → whether it shares public prefixes."""


@pytest.fixture
def setup(tmp_path: Path) -> dict[str, Any]:
    """Keys that share, and keys that do not."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "library.txt").write_text(TEXT, encoding="utf-8")
    file = tmp_path / "keys.json"
    keys = {name: make(file, name, public_prefixes=shares) for name, shares in OWNERS.items()}
    public = str(tmp_path / "texts")
    return {"keys": keys, "how": {"api_keys": str(file), "public_prefixes": public}}


def pages_of(*sequences: list[int]) -> int:
    """Number of tokens in the whole pages that are common to the beginnings of all sequences."""
    places = zip(*sequences, strict=False)
    return len([*takewhile(lambda tokens: len({*tokens}) == 1, places)]) // PAGE * PAGE


PROMPTS = st.tuples(
    st.integers(0, len(BEGIN)) | st.just(len(BEGIN)), st.lists(st.integers(1, 2), max_size=20)
).map(lambda drawn: [*BEGIN[: drawn[0]], *drawn[1]] or [1])


@given(st.lists(st.tuples(st.sampled_from("abcd"), PROMPTS), min_size=2, max_size=12))
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_exactly_whole_pages_of_the_public_prefix_cross(
    setup: dict[str, Any], asked: list[tuple[str, list[int]]]
) -> None:
    async def main() -> None:
        before: list[tuple[str, list[int]]] = []
        async with serving(make_hash_llm(num_pages=2000), **setup["how"]) as app:
            for owner, prompt in asked:
                body = completion_body(prompt=prompt, max_tokens=2, ignore_eos=True, temperature=0)
                reply = await app.post(COMPLETIONS, body, headers=setup["keys"][owner])
                found = [pages_of(prompt, other) for name, other in before if name == owner]
                if OWNERS[owner]:
                    theirs = [other for name, other in before if OWNERS[name]]
                    found += [pages_of(prompt, other, BEGIN) for other in theirs]
                most = (len(prompt) - 1) // PAGE * PAGE  # one token is left to compute
                assert cached(reply) == min(max(found, default=0), most), (owner, prompt)
                request = Request("x", tuple(prompt), SamplingParams(temperature=0), 0, 2)
                answer = solo(request, 262)
                text = small_tokenizer().decode(answer)
                assert reply.json()["choices"][0]["text"] == text
                before.append((owner, [*prompt, answer[0]]))  # the last one is not computed
            await app.idle()

    asyncio.run(main())


def test_a_system_message(setup: dict[str, Any]) -> None:
    """A public system message, as the chat template writes it, before any question."""

    async def use(app: App) -> None:
        async def ask(name: str, words: str, **changes: Any) -> int:
            told = {"role": "system", "content": TEXT}
            messages = [told, {"role": "user", "content": words}]
            body = {"messages": messages, "max_tokens": 2, **changes}
            return cached(await app.post(CHAT, body, headers=setup["keys"][name]))

        assert await ask("a", "Where are the maps?") == 0
        shared = await ask("b", "Is anybody here?")
        assert len(BEGIN) // PAGE * PAGE <= shared < len(BEGIN) + 20
        assert await ask("b", "Where are the maps?") == shared  # nothing of a's own question
        assert await ask("c", "Where are the maps?") == 0
        assert await ask("a", "?", prompt_logprobs=0) == 0  # cached pages have no scores

    with_app(make_hash_llm(), use, **setup["how"])


def test_a_folder_without_texts(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"no NAME\.txt"):
            App(make_hash_llm(), public_prefixes=str(folder))
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        App(make_hash_llm(), public_prefixes=str(tmp_path))


def test_what_a_client_calls_its_conversation_reaches_the_engine_and_changes_nothing(
    tmp_path: Path,
) -> None:
    """By a field or a header, within the key; whatever else it is, it is refused as before."""
    named = dict[str, str]()

    class Noting(HashRunner):
        def execute(self, plan: Plan) -> Any:
            requests = [chunk.sequence.request for chunk in plan]
            named.update((each.request_id, each.conversation) for each in requests)
            return super().execute(plan)

    file = tmp_path / "keys.json"
    keys = [make(file, name) for name in ("one", "other")]

    async def main() -> None:
        engine = make_hash_llm(runner=Noting)
        async with serving(engine, api_keys=str(file)) as app:

            async def conversation(headers: dict[str, str], **fields: Any) -> tuple[str, str]:
                reply = await app.post(CHAT, chat_body(seed=1, **fields), headers=headers)
                assert reply.status == 200, reply.body
                message = reply.json()["choices"][0]["message"]
                return named.popitem()[1], message["content"]

            none, text = await conversation(keys[0])
            assert none == ""
            asked = [(keys[0], {"prompt_cache_key": "mine"})]
            asked += [({**keys[0], header: "mine"}, {}) for header in CONVERSATIONS]
            found = [await conversation(headers, **fields) for headers, fields in asked]
            assert {said for _, said in found} == {text}
            assert len({name for name, _ in found}) == 1
            names = {found[0][0], "", (await conversation(keys[1], prompt_cache_key="mine"))[0]}
            names.add((await conversation(keys[0], prompt_cache_key="m" * 100_000))[0])
            assert len(names) == 4
            assert max(map(len, names)) == 16
            refused = await app.post(CHAT, chat_body(prompt_cache_key=5), headers=keys[0])
            assert refused.status == 400

    asyncio.run(main())
