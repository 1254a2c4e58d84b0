"""`reuse_prefix: false`: a request that takes nothing from the prefix cache and leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.doubles import make_hash_llm
from tests.support.serving import BODIES, CHAT, COMPLETIONS, App, with_app

LONG = "One day the fox found a key under a stone, and did not know what it was for."


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_cache_is_left_alone_both_ways(path: str) -> None:
    body = BODIES[path](max_tokens=3)
    body |= {"prompt": LONG} if path == COMPLETIONS else {}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": LONG}]

    async def use(app: App) -> list[dict[str, Any]]:
        answers = []
        for reuse in (False, True, False, None, True):
            given = {} if reuse is None else {"reuse_prefix": reuse}
            reply = await app.post(path, {**body, **given, "temperature": 0})
            assert reply.status == 200
            answers.append(reply.json())
        return answers

    answers = with_app(make_hash_llm(), use)
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    # The second finds nothing of the first, the third takes nothing of the second.
    assert cached[:3] == [0, 0, 0]
    assert cached[3] == cached[4] > 16
    choices = [each["choices"] for each in answers]
    assert all(each == choices[0] for each in choices)


def test_the_prompts_of_one_body_do_not_share_either() -> None:
    async def use(app: App) -> int:
        body = {"prompt": [LONG, LONG], "max_tokens": 2, "reuse_prefix": False}
        usage = (await app.post(COMPLETIONS, body)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert with_app(make_hash_llm(max_batch_size=1), use) == 0
