"""`PublicPrefixes`: texts of the operator's whose place in the prefix cache keys may share.

How fast an answer comes tells whether its prompt's pages were cached, so a key shares none with
others, with one exception: pages that hold nothing but the beginning of a text that the operator
has written (and what a chat template puts around it), among keys that were made for it. Whoever
measures them learns that one of these keys has used that text, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import ConfigError, RequestError
from infer.server.tenancy.keys import Key
from infer.types import Request


class PublicPrefixes:
    """See the module's docstring."""

    def __init__(self, folder: str | None, engine: AsyncLLM) -> None:
        """Raises `ConfigError` if there is no text in the folder."""
        self._beginnings: list[list[int]] = []
        try:
            texts = [path.read_text() for path in Path(folder).glob("*.txt")] if folder else []
        except (OSError, ValueError) as error:
            raise ConfigError("public_prefixes", f"cannot be read ({error})") from None
        if folder and not texts:
            raise ConfigError("public_prefixes", f"there is no NAME.txt in {folder}")
        for text in texts:
            self._beginnings.append(engine.tokenizer.encode(text))
            with suppress(RequestError):  # not every model chats, or knows system messages
                told = {"role": "system", "content": text}
                chats = [[told, {"role": "user", "content": words}] for words in "ab"]
                one, other = map(engine.render_chat, chats)
                self._beginnings.append(one[: _num_shared(one, other)])

    def owned(self, requests: Sequence[Request], key: Key) -> list[Request]:
        """The requests as the key's: its account, and its scope of the cache. Choices of one
        prompt come one after the other, and share the tuple of its tokens."""
        found: list[Request] = []
        prompt: tuple[int, ...] = ()
        num_public = 0
        for request in requests:
            if request.prompt_token_ids is not prompt:
                prompt, num_public = request.prompt_token_ids, 0
                # Unless it wants no cache.
                if key.limits.public_prefixes and not request.cache_scope:
                    shared = (_num_shared(prompt, each) for each in self._beginnings)
                    num_public = max(shared, default=0)
            scope = key.cache_scope + request.cache_scope
            found.append(replace(request, tenant=key.id, cache_scope=scope, num_public=num_public))
        return found


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
