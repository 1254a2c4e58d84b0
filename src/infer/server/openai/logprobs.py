"""Log-probabilities of a choice in OpenAI's two formats

Completions have four parallel lists, of which `text_offset` has the position of each token in the
choice's text, in characters. Chats have one object per token, with its bytes. A token that is not
valid UTF-8 by itself is shown as `bytes:\\xe2\\x82`. The pieces of a stream, concatenated, equal
the object of a plain answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from infer.text.tokenizer import Tokenizer
from infer.types import TokenLogprobs

FLOOR = -9999.0
"""Smallest log-probability that is shown, also for -inf, which JSON does not have."""


class ChoiceLogprobs:
    """Formats the log-probabilities of one choice. It keeps state between calls, because a token's
    position depends on all tokens before it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._invisible = tokenizer.special_token_ids if skip_special else ()
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def completion(
        self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a completion, for the next tokens. The entry of a prompt's first
        token is None."""
        labels = [self._label(token_id) for token_id in ids]
        tops: list[dict[str, float] | None] = []
        for label, entry in zip(labels, entries, strict=True):
            if entry is None:
                tops.append(None)
                continue
            top = {label: _number(entry.logprob)}
            for token_id, logprob in entry.top:  # best first, so the better of equal labels is kept
                top.setdefault(self._label(token_id), _number(logprob))
            tops.append(top)
        return {
            "tokens": labels,
            "token_logprobs": [entry and _number(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": [self._next_offset(token_id) for token_id in ids],
        }

    def chat(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat answer, for the next tokens."""
        content = [
            {
                **self._token(token_id, entry.logprob),
                "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in entry.top],
            }
            for token_id, entry in zip(ids, entries, strict=True)
            if entry is not None
        ]
        return {"content": content, "refusal": None}

    def prompt(
        self, ids: Sequence[int], entries: Iterable[TokenLogprobs], num_top: int
    ) -> Iterator[dict[str, Any] | None]:
        """`prompt_logprobs` in vLLM's format: one object by token id per token, None for the first.

        `entries` has one element less than `ids`; of each the `num_top` best are shown. Yields one
        position at a time, because all together are very many objects.
        """
        yield None
        for token_id, entry in zip(ids[1:], entries, strict=True):
            logprob_of = {token_id: entry.logprob, **dict(entry.top[:num_top])}
            yield {
                str(i): {"logprob": _number(logprob), "decoded_token": self._label(i)}
                for i, logprob in logprob_of.items()
            }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": self._label(token_id),
            "logprob": _number(logprob),
            "bytes": None if data is None else list(data),
        }

    def _label(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if data is None:
            return self._tokenizer.token_text(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _next_offset(self, token_id: int) -> int:
        """Number of complete characters before a token, which is then counted too."""
        offset = self._offset
        if token_id not in self._invisible:
            data = self._tokenizer.token_bytes(token_id)
            if data is None:
                self._offset += len(self._tokenizer.token_text(token_id))
            else:
                self._offset += len(self._characters.decode(data))
        return offset


def _number(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # FLOOR for NaN too, since it is not greater
