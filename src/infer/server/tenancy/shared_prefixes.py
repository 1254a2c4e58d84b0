"""`PublicPrefixes`: texts of the operator whose cached pages several keys may share"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import ConfigError, LoadError, RequestError
from infer.files import MAX_CONFIG_BYTES, read_text
from infer.server.tenancy.keys import Key
from infer.text.untrusted.workers import run_steps
from infer.types import Request


class PublicPrefixes:
    """The response time reveals whether a prompt's pages were cached, so keys share no pages, with
    one exception. Keys with the right `public_prefixes` share pages that hold only the beginning of
    a text of the operator (and what the chat template puts around it). By measuring these a client
    learns only that one of these keys has used that text."""

    def __init__(self, folder: str | None, engine: AsyncLLM) -> None:
        """`folder` has one text per file NAME.txt. Raises `ConfigError` if there is none or one
        cannot be read."""
        self._beginnings: list[list[int]] = []
        try:
            texts = (
                [read_text(path, MAX_CONFIG_BYTES) for path in Path(folder).glob("*.txt")]
                if folder
                else []
            )
        except (OSError, ValueError, LoadError) as error:
            raise ConfigError("public_prefixes", f"cannot be read ({error})") from None
        if folder and not texts:
            raise ConfigError("public_prefixes", f"there is no NAME.txt in {folder}")
        for text in texts:
            self._beginnings.append(engine.tokenizer.encode(text))
            with suppress(RequestError):  # not every model has a chat template or system messages
                system = {"role": "system", "content": text}
                chats = [[system, {"role": "user", "content": words}] for words in "ab"]
                first, other = (run_steps(engine.render_chat(chat)) for chat in chats)
                self._beginnings.append(first[: _num_shared(first, other)])

    def owned(self, requests: Sequence[Request], key: Key, conversation: str = "") -> list[Request]:
        """The requests with the key's tenant, cache scope and number of public tokens.
        `conversation`: what the key's client calls theirs, if it does.

        Choices of one prompt must be adjacent and share the tuple of its tokens.
        """
        requests_with_prefix: list[Request] = []
        name = _hashed(key, conversation)
        prompt: tuple[int, ...] = ()
        num_public = 0
        for request in requests:
            if request.prompt_token_ids is not prompt:
                prompt, num_public = request.prompt_token_ids, 0
                # A request with a scope of its own shares nothing.
                if key.limits.public_prefixes and not request.cache_scope:
                    shared = (_num_shared(prompt, beginning) for beginning in self._beginnings)
                    num_public = max(shared, default=0)
            scope = key.cache_scope + request.cache_scope
            owned = replace(
                request, tenant=key.id, cache_scope=scope, conversation=name, num_public=num_public
            )
            requests_with_prefix.append(owned)
        return requests_with_prefix


def _hashed(key: Key, conversation: str) -> str:
    """The name of a conversation of a key, short and like none of another key; "" for none."""
    if not conversation:
        return ""
    whole = f"{key.id}/{conversation}".encode("utf-8", "surrogatepass")
    return blake2b(whole, digest_size=8).hexdigest()


def _num_shared(first: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix, in tokens."""
    pairs = zip(first, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other)))
