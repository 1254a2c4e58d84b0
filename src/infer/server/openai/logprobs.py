"""Log-probabilities of one choice as OpenAI's two kinds of objects.

Completions: four parallel lists, where `text_offset` is the place of the token in the choice's
text. Chat: one object per token with its bytes. A token that is not UTF-8 on its own is shown as
`bytes:\\xe2\\x82`. Streamed pieces put together equal the object of a plain answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from infer.text.tokenizer import Tokenizer
from infer.types import TokenLogprobs

FLOOR = -9999.0
"""stands for "impossible": JSON has no infinity"""


class ChoiceLogprobs:
    """Lives as long as the choice: a token's place depends on all tokens before it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._invisible = tokenizer.special_token_ids if skip_special else ()
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def completion(
        self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a completion, for these further tokens; None: the very first."""
        labels = [self._label(token_id) for token_id in ids]
        tops: list[dict[str, float] | None] = []
        for label, entry in zip(labels, entries, strict=True):
            if entry is None:
                tops.append(None)
                continue
            top = {label: _number(entry.logprob)}
            for token_id, logprob in entry.top:  # best first: of two same labels the better stays
                top.setdefault(self._label(token_id), _number(logprob))
            tops.append(top)
        return {
            "tokens": labels,
            "token_logprobs": [entry and _number(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": [self._place(token_id) for token_id in ids],
        }

    def chat(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat answer, for these further tokens."""
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
        """`prompt_logprobs` as vLLM has them: by token id, the `num_top` best and the prompt's own;
        the first token has none. One position at a time: all together are very many objects."""
        yield None
        for token_id, entry in zip(ids[1:], entries, strict=True):
            one = {token_id: entry.logprob, **dict(entry.top[:num_top])}
            yield {
                str(i): {"logprob": _number(logprob), "decoded_token": self._label(i)}
                for i, logprob in one.items()
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

    def _place(self, token_id: int) -> int:
        """Characters that are complete before this token; then the token is counted in."""
        place = self._offset
        if token_id not in self._invisible:
            data = self._tokenizer.token_bytes(token_id)
            if data is None:
                self._offset += len(self._tokenizer.token_text(token_id))
            else:
                self._offset += len(self._characters.decode(data))
        return place


def _number(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # NaN too: it is not greater
