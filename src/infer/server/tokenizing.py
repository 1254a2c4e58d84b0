"""The endpoints that ask the tokenizer and no engine, in vLLM's formats.

`/tokenize`, `/detokenize` and `/tokenizer_info` are what load generators and evaluation harnesses
use in the place of a tokenizer of their own; so, other than in a prompt, control tokens written in
a text are control tokens (`parse_special_tokens: false` shows what `/v1/completions` makes of it).
`render` shows the prompt a chat would become. Bodies are read within the same limits, and long
ones worked on beside the event loop, as everywhere. Errors are raised, never rendered, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from infer.errors import UnprocessableError
from infer.server import intake, validation
from infer.server.body import computed, read_object
from infer.server.tool_wire import RenderBody, TokenizeChatBody
from infer.server.wire import Wire

if TYPE_CHECKING:
    from infer.engine.async_llm import AsyncLLM

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizeBody(Wire):
    """`POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    parse_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Wire):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class TokenizerEndpoints:
    """See the module's docstring."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await read_object(http)
        wire: TokenizeBody | TokenizeChatBody
        if body.get("messages") is not None:
            wire = validation.read(TokenizeChatBody, body)
        else:
            wire = validation.read(TokenizeBody, body)
        intake.check_model(self._engine, wire.model)
        return JSONResponse(await computed(http, self._tokenized, wire))

    async def detokenize(self, http: HttpRequest) -> Response:
        wire = validation.read(DetokenizeBody, await read_object(http))
        intake.check_model(self._engine, wire.model)
        return JSONResponse({"prompt": await computed(http, self._text, wire.tokens)})

    async def tokenizer_info(self, _: HttpRequest) -> Response:
        tokenizer = self._engine.tokenizer
        template = tokenizer.chat_template
        return JSONResponse(
            {
                "tokenizer_class": tokenizer.tokenizer_class or "PreTrainedTokenizerFast",
                **dict.fromkeys(_NAMES),
                **tokenizer.named_tokens,
                "chat_template": template.source if template else None,
            }
        )

    async def render(self, http: HttpRequest) -> Response:
        wire = validation.read(RenderBody, await read_object(http))
        intake.check_model(self._engine, wire.model)
        prompt, ids = await computed(http, intake.rendered_chat, self._engine, wire)
        return JSONResponse(
            {
                "prompt": prompt,
                "token_ids": ids,
                "count": len(ids),
                "max_model_len": self._engine.max_seq_len,
            }
        )

    def _tokenized(self, wire: TokenizeBody | TokenizeChatBody) -> dict[str, Any]:
        engine = self._engine
        if isinstance(wire, TokenizeChatBody):
            ids = engine.render_chat(intake.plain_messages(wire), **wire.template_arguments)
        else:
            ids = engine.tokenizer.encode(
                wire.prompt,
                add_special_tokens=wire.add_special_tokens,
                parse_special_tokens=wire.parse_special_tokens,
            )
        pieces = map(engine.tokenizer.token_piece, ids)
        return {
            "count": len(ids),
            "max_model_len": engine.max_seq_len,
            "tokens": ids,
            "token_strs": list(pieces) if wire.return_token_strs else None,
        }

    def _text(self, ids: Sequence[int]) -> str:
        size = self._engine.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise UnprocessableError(
                    f"token id {token_id} is outside the vocabulary (0 to {size - 1})",
                    param="tokens",
                )
        return self._engine.tokenizer.decode(ids, skip_special_tokens=False)
