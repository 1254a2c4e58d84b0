"""Two messages of rules at the beginning, for a model whose template takes one: every way in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.engine.llm import LLM
from infer.text.tokenizer import Tokenizer
from infer.text.untrusted.workers import run_steps
from infer.types import SamplingParams
from tests.support.doubles import make_hash_llm
from tests.support.hash_engine import small_text_files
from tests.support.serving import CHAT, App, chat_body, with_app

SOURCE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
PROMPT = "<system>Be kind.\n\nBe short.<user>Hello<assistant>"
ROLES = ("system", "developer")
QUESTION = {"role": "user", "content": "Hello"}


def rules(second: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be kind."},
        {"role": second, "content": [{"type": "text", "text": "Be short."}]},
    ]


@pytest.mark.parametrize("second", ROLES)
def test_over_http(second: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(replace(small_text_files(), templates={"default": SOURCE}))
    messages = [*rules(second), QUESTION]

    async def use(app: App) -> None:
        body = chat_body(messages=messages)
        replies = [await app.post(CHAT, {**body, "stream": stream}) for stream in (False, True)]
        assert [reply.status for reply in replies] == [200, 200]
        assert replies[0].json()["usage"]["prompt_tokens"] == len(PROMPT)
        shown = await app.post(f"{CHAT}/render", body)
        assert (shown.status, shown.json()["prompt"]) == (200, PROMPT)
        counted = await app.post("/tokenize", {"messages": messages})
        assert counted.json()["count"] == len(PROMPT)

        session = (await app.post("/v1/sessions", {"messages": rules(second)})).json()["id"]
        asked = {**body, "messages": [QUESTION], "session_id": session}
        shown = await app.post(f"{CHAT}/render", asked)
        assert (shown.status, shown.json()["prompt"]) == (200, PROMPT)
        answered = await app.post(CHAT, asked)
        assert (answered.status, answered.json()["usage"]["prompt_tokens"]) == (200, len(PROMPT))
        kept = (await app.get(f"/v1/sessions/{session}")).json()["messages"]
        assert [message["role"] for message in kept] == ["system", second, "user", "assistant"]

    with_app(make_hash_llm(tokenizer=tokenizer), use, sessions=f"sqlite:///{tmp_path}/s.db")


@pytest.mark.parametrize("second", ROLES)
def test_in_process(second: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(SOURCE, encoding="utf-8")
    messages = [*rules(second), QUESTION]
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(chat_template=str(tmp_path / "t.jinja"), max_seq_len=128) as llm:
        [output] = llm.chat(messages, params)
        assert llm.tokenizer.decode(output.prompt_token_ids) == PROMPT
        pieces = "".join(piece.text for piece in llm.stream(messages, params))
        assert pieces == output.text


def test_an_async_caller() -> None:
    tokenizer = Tokenizer(replace(small_text_files(), templates={"default": SOURCE}))

    async def main() -> None:
        async with make_hash_llm(tokenizer=tokenizer) as llm:
            ids = run_steps(llm.render_chat([*rules("developer"), QUESTION]))
            assert tokenizer.decode(ids) == PROMPT

    asyncio.run(main())
