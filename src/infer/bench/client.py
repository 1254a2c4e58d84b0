"""Any OpenAI-compatible server as a target of the driver: `infer bench serve`.

Each request is a stream from /completions on a connection of its own. The reader takes server-sent
events as servers send them: with comments, with no space after `data:`, cut anywhere, with several
tokens in one event, with usage in the last event or in each. The server counts the tokens
(`usage`); where it does not, the pieces of its answer are counted. An answer is complete only with
a finish reason or `[DONE]`. Needs no torch and no tokenizer.

HTTP is spoken by h11 over an asyncio stream and not by an HTTP client, because the client must not
limit what is measured. At 256 streams of 50 tokens a second this module takes 65 µs of CPU time for
a token (80 % of a core) and sees the gaps that the server makes. httpx2 2.16 fills the core there:
time to first token grows from 0.1 to 0.3 s, and gaps of 20 ms are seen as 23 to 28 ms. With short
requests it reaches half the rate, 620 instead of 1,200 a second.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from infer.bench.drive import Failure, Piece, Prompt, Usage
from infer.bench.workloads import Draw
from infer.errors import ConfigError

PROMPTS = ("auto", "ids", "text")
_PROBE_LEN = 64
_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from"
    " or had an they which one you were all her she there would their we him been has when who will"
    " no more if out so up said what its about than into them can only other time new some"
)
_WORDS = tuple(_TEXT.split())


class EventReader:
    """Finds the events in the bytes of a stream. The data of an event is one line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        lines_of_data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        return [line for line in lines_of_data if line]


class ServerTarget:
    """A server as a target; `connect` must be called first."""

    def __init__(
        self, base_url: str, *, model: str | None, api_key: str | None, ignore_eos: bool = True
    ) -> None:
        """`base_url` is what OpenAI's clients take; /v1 is added where it has no version.

        Raises `ConfigError` for anything that is not an http or https URL.
        """
        url = urlsplit(base_url.rstrip("/"))
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError("base_url", f"must be like http://host:port/v1, not {base_url!r}")
        self.base_url = base_url
        self.model = model
        self.prompts = "token ids"
        self._tokens_per_word: float | None = None
        self._host, self._netloc = url.hostname, url.netloc.rpartition("@")[2]
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._path = url.path if re.search(r"/v\d+$", url.path) else url.path + "/v1"
        self._key = api_key
        self._ignore_eos = ignore_eos

    async def connect(self, prompts: str = "auto") -> None:
        """Finds out the model's name and the form of prompts.

        Prompts are token ids where the server takes them, else text with a measured number of
        tokens in a word. Raises `Failure` where the server does not answer.
        """
        if prompts not in PROMPTS:
            raise ConfigError("prompts", f"must be one of {', '.join(PROMPTS)}; not {prompts!r}")
        if self.model is None:
            answer = await self._whole("GET", "/models")
            try:
                self.model = str(json.loads(answer)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                message = "the server does not say what models it has; give --model"
                raise ConfigError("model", message) from None
        ids = Draw(run=-2).ids(_PROBE_LEN)  # as in no measured run
        if prompts != "text":
            try:
                usage = await self._probe(ids)
            except Failure as failure:
                if prompts == "ids" or not failure.kind.startswith("http_4"):
                    raise
            else:
                if prompts == "ids" or usage is None or usage.prompt_tokens <= _PROBE_LEN + 2:
                    return
        self._tokens_per_word = 1.0
        usage = await self._probe(self.prompt(ids))
        how = "a token a word (the server does not count)"
        if usage is not None and usage.prompt_tokens:
            self._tokens_per_word = usage.prompt_tokens / _PROBE_LEN
            how = f"{self._tokens_per_word:.2f} tokens a word (measured)"
        self.prompts = f"text, {how}"

    async def _probe(self, prompt: Prompt) -> Usage | None:
        usage = None
        async with aclosing(self.send(prompt, 1)) as pieces:
            async for piece in pieces:
                usage = piece.usage or usage
        return usage

    def prompt(self, planned: Prompt) -> Prompt:
        """The prompt itself, or words for its token ids; prompts that begin alike still do."""
        per_word = self._tokens_per_word
        if per_word is None or isinstance(planned, str):
            return planned
        count = max(1, round(len(planned) / per_word))
        chosen = (planned[min(int(i * per_word), len(planned) - 1)] for i in range(count))
        return "".join(f" {_WORDS[token % len(_WORDS)]}" for token in chosen)

    async def send(
        self, prompt: Prompt, output_len: int, temperature: float = 0.0
    ) -> AsyncGenerator[Piece, None]:
        """The answer, in one piece for each event."""
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": output_len,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        reader, ended = EventReader(), False
        async with aclosing(self._exchange("POST", "/completions", body)) as answer:
            async for data in answer:
                for line in reader.feed(data):
                    if line == b"[DONE]":
                        ended = True
                        continue
                    piece, is_last = _read_event(line, isinstance(prompt, str))
                    ended = ended or is_last
                    yield piece
        if not ended:
            raise Failure("cut_off", "the stream ended before the answer did")

    async def _whole(self, method: str, path: str) -> bytes:
        return b"".join([data async for data in self._exchange(method, path)])

    async def _exchange(
        self, method: str, path: str, body: Any = None
    ) -> AsyncGenerator[bytes, None]:
        """The body of an answer as it comes. Raises `Failure` unless its status is 200."""
        sent = b"" if body is None else json.dumps(body).encode()
        headers = [("host", self._netloc), ("connection", "close"), ("accept", "*/*")]
        headers += [("content-length", str(len(sent))), ("content-type", "application/json")]
        if self._key:
            headers.append(("authorization", f"Bearer {self._key}"))
        link = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target=self._path + path, headers=headers)
        out = (link.send(request) or b"") + (link.send(h11.Data(data=sent)) or b"")
        writer, status, refusal = None, 0, b""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            writer.write(out + (link.send(h11.EndOfMessage()) or b""))
            while not isinstance(event := link.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    link.receive_data(await reader.read(1 << 16))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refusal += event.data
                elif isinstance(event, h11.ConnectionClosed):
                    raise Failure("connection", "the server closed the connection")
        except (OSError, h11.RemoteProtocolError) as error:
            raise Failure("connection", f"{self._netloc}: {error}") from None
        finally:
            if writer is not None:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        if status != 200:
            raise Failure(f"http_{status}", _refusal(refusal))


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    """The fields of an event that are read. Servers add others and leave out some of these."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _read_event(line: bytes, as_text: bool) -> tuple[Piece, bool]:
    """One event of an answer, and whether the answer ends with it."""
    try:
        event = _decode_event(line)
    except msgspec.DecodeError:
        shown = line[:80].decode(errors="replace")
        raise Failure("bad_stream", f"this is no event of a completion: {shown}") from None
    if event.error:
        raise Failure("error_event", _refusal(line))
    choice = event.choices[0] if event.choices else _Choice()
    counted, usage = event.usage, None
    if counted is not None and counted != _Usage():
        details = counted.prompt_tokens_details or _PromptDetails()
        cached_tokens = details.cached_tokens or 0
        usage = Usage(counted.prompt_tokens, counted.completion_tokens, cached_tokens)
    # A server that holds text back sends a token without text. An end without text is no token.
    has_ended = choice.finish_reason is not None
    is_token = bool(choice.text) or (choice.text is not None and not has_ended)
    answer = choice.text if choice.text and as_text else ()
    return Piece(int(is_token), answer, usage), has_ended


def _refusal(body: bytes) -> str:
    """The message in the body of an error, or the beginning of the body."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace").strip() or "no reason given"
