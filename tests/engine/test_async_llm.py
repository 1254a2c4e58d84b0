"""`AsyncLLM` over the hash runner: entering and leaving streams, ends, failures, slow readers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from infer import FinishReason, SamplingParams
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.mailbox import MailboxLimits, OpenRequest
from infer.errors import EngineDeadError, EngineError, OverloadedError
from infer.types import Request
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import core_of, make_hash_llm, small_tokenizer
from tests.support.hash_engine import solo
from tests.support.waits import until_async

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def run(body: Callable[[AsyncLLM], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with make_hash_llm(**settings) as llm:
            return await body(llm)

    return asyncio.run(main())


def idle(llm: AsyncLLM) -> bool:
    stats = llm.stats()
    return (
        stats["num_running"] == stats["num_waiting"] == stats["num_preempted"] == 0
        and stats["num_free_pages"] == stats["num_pages"]
    )


def all_have_ended(llm: AsyncLLM) -> bool:
    return all(each.finish_reason for each in llm.snapshot().values())


def test_many_at_once_each_get_their_own() -> None:
    async def body(llm: AsyncLLM) -> None:
        requests = [llm.make_request([i + 1, 7], GREEDY) for i in range(30)]
        outputs = await asyncio.gather(*[llm.generate(request) for request in requests])
        for request, output in zip(requests, outputs, strict=True):
            assert list(output.token_ids) == solo(request, VOCAB_SIZE)
        await until_async(lambda: idle(llm))

    run(body)


def test_a_stop_string_ends_the_request_in_the_core_too() -> None:
    async def body(llm: AsyncLLM) -> None:
        plain = await llm.generate(llm.make_request("abc", GREEDY))
        stop = next(char for char in plain.text if char.isascii() and char.isprintable())
        params = GREEDY.replace(max_tokens=400, stop=stop)
        async with llm.stream(llm.make_request("abc", params)) as pieces:
            text = ""
            async for piece in pieces:
                text += piece.text
            assert piece.finish_reason is FinishReason.STOP
            assert text == plain.text[: plain.text.index(stop)]
            # The stream is still open, so the stop string frees the pages, not leaving it.
            await until_async(lambda: idle(llm))
            assert llm.stats()["num_finished_stop"] == 1

    run(body, step_s=0.002)


@pytest.mark.parametrize("how", ["leave", "cancel"])
def test_leaving_aborts(how: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = GREEDY.replace(max_tokens=400)
        if how == "leave":
            async with llm.stream(llm.make_request("abc", params)) as pieces:
                async for _ in pieces:
                    break
        else:
            task = asyncio.create_task(llm.generate(llm.make_request("abc", params)))
            await until_async(lambda: llm.stats()["num_running"] == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_async(lambda: idle(llm))
        assert llm.stats()["num_open"] == 0

    run(body, step_s=0.002)


def test_a_full_engine_refuses_at_once_and_takes_others_later() -> None:
    async def body(llm: AsyncLLM) -> None:
        params = GREEDY.replace(max_tokens=400)
        async with llm.stream(llm.make_request("a", params)):
            async with llm.stream(llm.make_request("b", params)):
                with pytest.raises(OverloadedError, match="busy"):
                    await llm.generate(llm.make_request("c", params))
            await llm.generate(llm.make_request("c", GREEDY))

    run(body, max_batch_size=1, max_waiting_requests=1, step_s=0.001)


def test_a_reserved_place_is_handed_over_and_never_free_in_between() -> None:
    async def body(llm: AsyncLLM) -> None:
        requests = [llm.make_request(text, GREEDY) for text in "abcd"]
        with llm.reserved(2) as places:
            one = places.enter(requests[0])
            assert (llm.num_open, llm.num_reserved) == (1, 1)
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="2 requests"):
                await llm.generate(requests[1])
            with pytest.raises(ValueError, match="already running"):
                places.enter(requests[0])
            other = places.enter(requests[1])
            assert (llm.num_open, llm.num_reserved) == (2, 0)
            with pytest.raises(ValueError, match="no place of this reservation is left"):
                places.enter(requests[2])
        outputs = await asyncio.gather(one.output(), other.output())
        assert [list(each.token_ids) for each in outputs] == [
            solo(request, VOCAB_SIZE) for request in requests[:2]
        ]
        one.close()  # has no effect, because `output` has closed it
        with llm.reserved(2) as places:
            places.enter(requests[2]).close()
        assert (llm.num_open, llm.num_reserved) == (0, 0), "what was not handed over is given back"
        with pytest.raises(ValueError, match="no place"):
            places.enter(requests[3])
        with llm.reserved(1) as places:
            llm.drain()
            with pytest.raises(EngineDeadError, match="shutting down"):
                places.enter(requests[3])
            assert llm.num_reserved == 1
        assert llm.num_reserved == 0

    run(body, max_batch_size=1, max_waiting_requests=1)


def test_a_slow_reader_finds_one_merged_piece_or_one_a_token() -> None:
    async def body(llm: AsyncLLM, merge: bool) -> None:
        request = llm.make_request("abc", GREEDY)
        async with llm.stream(request, merge=merge) as pieces:
            await until_async(lambda: idle(llm))
            await asyncio.sleep(0.2)  # until the last step's message has reached this loop
            got = [piece async for piece in pieces]
        assert [len(piece.token_ids) for piece in got] == ([20] if merge else [1] * 20)
        tokens = [token for piece in got for token in piece.token_ids]
        assert tokens == solo(request, VOCAB_SIZE)
        text = "".join(piece.text for piece in got)
        assert text == small_tokenizer().decode(tokens)

    run(lambda llm: body(llm, True))
    run(lambda llm: body(llm, False))


def one(llm: AsyncLLM) -> OpenRequest:
    """The only open request."""
    (found,) = llm.snapshot().values()
    return found


LONG = GREEDY.replace(max_tokens=3000)
ROOM: dict[str, Any] = {"max_seq_len": 4096, "num_pages": 2000}


def test_a_reader_far_behind_gets_everything_while_it_takes_little_room_when_merged() -> None:
    """With one piece per token it would be three times the size of a mailbox."""

    async def body(llm: AsyncLLM) -> None:
        request = llm.make_request("abc", LONG)
        async with llm.stream(request) as pieces:
            await until_async(lambda: one(llm).finish_reason is not None)
            (piece,) = [piece async for piece in pieces]
        assert list(piece.token_ids) == solo(request, VOCAB_SIZE)

    run(body, **ROOM)


@pytest.mark.parametrize("merge", [True, False])
def test_a_reader_for_whom_too_much_gathers_is_cancelled(merge: bool) -> None:
    async def body(llm: AsyncLLM) -> None:
        request, other = (llm.make_request([i, 7], LONG.replace(logprobs=20)) for i in (1, 2))
        async with llm.stream(request, merge=merge) as pieces:
            output = await llm.generate(other)
            assert list(output.token_ids) == solo(other, VOCAB_SIZE)
            assert one(llm).num_unread_bytes < 2 * MailboxLimits.max_bytes
            assert one(llm).num_unread_tokens < 300
            taken = [piece async for piece in pieces]
        assert taken[-1].error is not None
        assert taken[-1].error.code == "client_stalled"
        tokens = [token for piece in taken for token in piece.token_ids]
        assert tokens == solo(request, VOCAB_SIZE)[: len(tokens)]
        assert len(tokens) > 50
        await until_async(lambda: idle(llm))
        stats = llm.stats()
        assert (stats["num_requests_finished"], stats["num_requests_cancelled"]) == (1, 1)

    run(body, **ROOM)


def waiting(llm: AsyncLLM) -> int:
    """Bytes that wait for all readers."""
    return sum(each.num_unread_bytes for each in llm.snapshot().values())


def unread(llm: AsyncLLM) -> list[Request]:
    """A request with 900 tokens with log-probabilities, one with a few, and a long one."""
    return [
        llm.make_request([i, 7], GREEDY.replace(max_tokens=count, logprobs=logprobs))
        for i, count, logprobs in ((1, 900, 5), (2, 30, 0), (3, 1500, 0))
    ]


def bytes_of_all() -> int:
    """Bytes that wait when the first two of `unread` have ended and nobody has read."""

    async def body(llm: AsyncLLM) -> int:
        first, second, _ = unread(llm)
        async with llm.stream(first), llm.stream(second):
            await until_async(lambda: all_have_ended(llm))
            return waiting(llm)

    found: int = run(body, **ROOM, mailbox_limits=MailboxLimits(max_bytes=10**9))
    return found


@pytest.mark.parametrize("has_ended", [False, True])
def test_when_all_mailboxes_hold_too_much_the_fullest_is_dropped(has_ended: bool) -> None:
    """Of the two that wait; a third request is read at once, and one comes later."""

    async def body(llm: AsyncLLM) -> None:
        wanted = unread(llm)
        async with llm.stream(wanted[0]) as full, llm.stream(wanted[1]) as behind:

            def first() -> OpenRequest:
                return llm.snapshot()[wanted[0].request_id]

            if has_ended:
                await until_async(
                    lambda: all(each.finish_reason for each in llm.snapshot().values())
                )
            else:
                await until_async(lambda: first().num_unread_bytes > 100_000)
            assert first().finish_reason is (FinishReason.LENGTH if has_ended else None)
            running = asyncio.create_task(llm.generate(wanted[2]))
            async with llm.stream(llm.make_request([4, 7], GREEDY)) as late:
                await until_async(lambda: waiting(llm) < 20_000)
                assert [p.error async for p in late if p.finish_reason] == [None]
            async with asyncio.timeout(60):
                (end,) = [piece async for piece in full]
            assert end.error is not None
            assert (end.error.code, end.token_ids) == ("client_stalled", ())
            (all_of_it,) = [piece async for piece in behind]
            assert list(all_of_it.token_ids) == solo(wanted[1], VOCAB_SIZE)
            assert list((await running).token_ids) == solo(wanted[2], VOCAB_SIZE)
        await until_async(lambda: idle(llm))
        stats = llm.stats()
        assert (stats["num_requests_finished"], stats["num_requests_cancelled"]) == (3, 1)

    in_all = bytes_of_all() + 100 if has_ended else 300_000
    run(body, **ROOM, mailbox_limits=MailboxLimits(max_bytes=10**9, max_bytes_in_all=in_all))


def test_a_reader_that_only_had_no_chance_to_read_is_not_cancelled() -> None:
    """The event loop is blocked for a while; then all messages are handled at once."""

    async def body(llm: AsyncLLM) -> None:
        request = llm.make_request("abc", LONG.replace(max_tokens=600, logprobs=20))
        running = asyncio.create_task(llm.generate(request))
        await asyncio.sleep(0)
        before = llm.stats()["num_steps"]
        while llm.stats()["num_running"] or llm.stats()["num_steps"] == before:
            time.sleep(0.01)
        assert list((await running).token_ids) == solo(request, VOCAB_SIZE)

    run(body, **ROOM)


def test_a_failing_step_is_done_again_and_nobody_notices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(llm: AsyncLLM) -> None:
        runner = core_of(llm).runner
        original, calls, asked = runner.execute, 0, threading.Event()

        def execute(plan: Any) -> Any:
            nonlocal calls
            assert asked.wait(60)
            calls += 1
            if calls == 3:  # with company: one that is alone in a step that fails is the cause
                assert len(plan) > 1
                raise RuntimeError("broken on purpose")
            return original(plan)

        async def all_asked() -> None:
            asked.set()

        runner.execute = execute  # type: ignore[method-assign]
        requests = [llm.make_request([i + 1], GREEDY) for i in range(3)]
        outcomes: list[Any] = await asyncio.gather(
            *[llm.generate(request) for request in requests], all_asked(), return_exceptions=True
        )
        for request, outcome in zip(requests, outcomes[:3], strict=True):
            assert not isinstance(outcome, BaseException), outcome
            assert list(outcome.token_ids) == solo(request, VOCAB_SIZE)
        await until_async(lambda: idle(llm))
        after = llm.make_request([9], GREEDY)
        assert list((await llm.generate(after)).token_ids) == solo(after, VOCAB_SIZE)

    run(body, max_batch_size=3)
    assert "broken on purpose" in caplog.text


def test_closing_ends_what_runs_with_an_error_and_refuses_the_rest() -> None:
    async def main() -> None:
        llm = make_hash_llm(step_s=0.005)
        await llm.start()
        request = llm.make_request("abc", GREEDY.replace(max_tokens=400))
        task = asyncio.create_task(llm.generate(request))
        await until_async(lambda: llm.stats()["num_running"] == 1)
        await llm.close()
        with pytest.raises(EngineError, match="shutting down"):
            await task
        with pytest.raises(EngineDeadError):
            await llm.generate(llm.make_request("abc", GREEDY))

    asyncio.run(main())
