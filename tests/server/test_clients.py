"""OpenAI's own client against a real socket, sync and async."""

# The client's typed dicts are not what these tests are about.
# mypy: disable-error-code="arg-type, call-overload, union-attr, list-item"

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.support.doubles import make_hash_llm
from tests.support.serving import live, scripted, spelled
from tests.support.waits import until

TEXT = "Grüße, 世界 😀!"
SCRIPT = spelled(TEXT)
NUM = len(SCRIPT)
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(scripted(SCRIPT)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model="hash-model", prompt="Hello", max_tokens=NUM, logprobs=2)
    assert done.choices[0].text == TEXT
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == NUM
    assert done.choices[0].logprobs is not None
    assert len(done.choices[0].logprobs.tokens or []) == NUM
    assert len(done._request_id or "") == 32


def test_completions_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="hash-model",
            prompt="Hello",
            max_tokens=NUM,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM


def test_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="hash-model",
        messages=MESSAGES,
        max_completion_tokens=NUM,
        logprobs=True,
        top_logprobs=2,
        n=2,
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    assert [choice.message.content for choice in done.choices] == [TEXT, TEXT]
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].logprobs is not None
    entries = done.choices[0].logprobs.content
    assert entries is not None
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == TEXT
    assert len(entries[0].top_logprobs) == 2


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="hash-model",
            messages=MESSAGES,
            max_tokens=NUM,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM


def test_chat_with_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="hash-model", messages=MESSAGES, max_tokens=NUM, stop="!"
    ) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == TEXT[:-1]
    assert "content.delta" in kinds


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["hash-model"]
    assert client.models.retrieve("hash-model").owned_by == "infer"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as wrong_model:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (wrong_model.value.code, wrong_model.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as empty:
        client.completions.create(model="hash-model", prompt="")
    assert empty.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="hash-model", messages=MESSAGES, tools=[{"type": "function"}]
        )
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(
            model="hash-model", messages=MESSAGES, stream=True, temperature=5
        )


def test_an_error_in_a_stream() -> None:
    class Broken:
        def execute(self, plan: object) -> None:
            raise RuntimeError

    with (
        live(scripted([], runner=Broken())) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(model="hash-model", prompt="x", stream=True) as stream,
        pytest.raises(openai.APIError, match="failed while computing"),
    ):
        list(stream)


def test_a_full_server_is_tried_again() -> None:
    """The client obeys Retry-After, and its second attempt succeeds."""
    engine = make_hash_llm(max_batch_size=1, max_waiting_requests=0, step_s=0.005)
    with live(engine) as url:

        async def main() -> None:
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=3
            ) as client:
                busy = {"model": "hash-model", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
                both = [client.completions.create(prompt=p, **busy) for p in ("a", "b")]
                assert all(done.choices[0].text for done in await asyncio.gather(*both))

        asyncio.run(main())


def test_async_client(url: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            assert [model.id async for model in client.models.list()] == ["hash-model"]
            plain = await client.completions.create(
                model="hash-model", prompt=["a", "b"], max_tokens=NUM
            )
            assert [choice.text for choice in plain.choices] == [TEXT, TEXT]
            chat = await client.chat.completions.create(
                model="hash-model", messages=MESSAGES, max_tokens=NUM
            )
            assert chat.choices[0].message.content == TEXT
            text = ""
            async for piece in await client.completions.create(
                model="hash-model", prompt="a", max_tokens=NUM, stream=True
            ):
                text += piece.choices[0].text
            assert text == TEXT
            text = ""
            async for chunk in await client.chat.completions.create(
                model="hash-model", messages=MESSAGES, max_tokens=NUM, stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == TEXT

    asyncio.run(main())


def test_leaving_a_stream(url: str) -> None:
    engine = make_hash_llm(step_s=0.02)
    with live(engine) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = client.chat.completions.create(
                model="hash-model",
                messages=MESSAGES,
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            stream.close()
            # The client reuses the connection only if the answer was read to its end.
            assert client.completions.create(model="hash-model", prompt="x").choices[0].text
        until(lambda: engine.stats()["num_finished_abort"] == 1)
