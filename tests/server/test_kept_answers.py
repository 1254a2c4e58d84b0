"""Answers that outlive their connection: read again from any event on, by their key only"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.server.app import create_app, layers
from infer.server.http.error_responses import HttpError
from infer.server.kept_answers import GONE, MAX_READERS, MAX_TAKEN_BYTES, REPLACED, KeptAnswers
from infer.server.loaded_models import LoadedModels
from infer.server.multi_model import ModelRouter
from infer.server.settings import ServerSettings
from infer.types.server_limits import ServerLimits
from tests.support.doubles import make_hash_llm
from tests.support.serving import CHAT, COMPLETIONS, App, chat_body, completion_body, with_app
from tests.support.several_fronts import SharedByFronts, with_several_fronts
from tests.support.tenants import make
from tests.support.virtual_time import run_in_virtual_time

KEEP = {"x-keep-answer": "true"}
PATHS = {
    COMPLETIONS: completion_body(stream=True, max_tokens=40, ignore_eos=True),
    CHAT: chat_body(stream=True, max_tokens=40, ignore_eos=True),
    "/v1/responses": {"input": "Hello", "stream": True, "max_output_tokens": 40, "temperature": 0},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": 40,
        "temperature": 0,
    },
}


def numbered(data: bytes) -> dict[int, bytes]:
    """The events of a stream by their numbers; what has none is left out."""
    found: dict[int, bytes] = {}
    for block in data.split(b"\n\n")[:-1]:
        head, newline, rest = block.partition(b"\n")
        if head.startswith(b"id: "):
            assert newline
            number = int(head.removeprefix(b"id: "))
            assert number not in found
            found[number] = rest
    return found


def events_at(name: str, after: int | None = None) -> str:
    return f"/v1/requests/{name}/events" + ("" if after is None else f"?after={after}")


@pytest.mark.parametrize("path", PATHS)
def test_every_event_has_a_number_and_can_be_read_again(path: str) -> None:
    async def use(app: App) -> None:
        plain = await app.post(path, PATHS[path])
        assert b"id: " not in plain.body
        whole = await app.post(path, PATHS[path], headers={**KEEP, "x-request-id": "mine"})
        events = numbered(whole.body)
        assert list(events) == list(range(1, len(events) + 1))
        for after in range(len(events)):
            again = await app.get(events_at("mine", after))
            assert again.status == 200
            assert again.headers["content-type"] == "text/event-stream; charset=utf-8"
            rest = {number: event for number, event in events.items() if number > after}
            assert numbered(again.body) == rest
        by_header = await app.send("GET", events_at("mine"), headers={"last-event-id": "3"})
        assert min(numbered(by_header.body)) == 4

    with_app(make_hash_llm(), use)


class Cut:
    """A client that leaves once it has read so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.leave = asyncio.Event()
        self.data = b""
        """What it has read; the rest is lost."""
        self._left = num_bytes

    def __call__(self, data: bytes) -> None:
        self.data += b"" if self.leave.is_set() else data[: self._left]
        self._left -= len(data)
        if self._left <= 0:
            self.leave.set()

    @property
    def how(self) -> dict[str, Any]:
        return {"leave": self.leave, "on_write": self}


async def resumed(app: App, name: str, begun: bytes, dice: random.Random) -> dict[int, bytes]:
    """All events of an answer: what a cut stream has brought, and what further cut readers get."""
    found = numbered(begun)
    while True:
        cut = Cut(dice.randint(1, 4000))
        last = max(found, default=0)
        more = await app.send("GET", events_at(name, last), **cut.how)
        assert more.status == 200
        new = numbered(cut.data)
        assert not new.keys() & found.keys()
        found |= new
        if not cut.leave.is_set():
            return found


@pytest.mark.parametrize("path", PATHS)
def test_cuts_at_random_leave_no_gap(path: str) -> None:
    """With and without a seat at the time of the cut: the request goes on, and no event is lost."""

    async def use(app: App) -> None:
        whole = await app.post(path, PATHS[path], headers=KEEP)
        dice, expected = random.Random(1), list(numbered(whole.body).values())
        for i in range(12):
            cut, name = Cut(dice.randint(1, len(whole.body))), f"mine-{i}"
            headers = {**KEEP, "x-request-id": name}
            asking = asyncio.ensure_future(app.post(path, PATHS[path], headers=headers, **cut.how))
            left = asyncio.ensure_future(cut.leave.wait())
            await asyncio.wait((left, asking), return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            found = await resumed(app, name, cut.data, dice)
            await asking
            assert list(found) == list(range(1, len(found) + 1))
            assert text_of(found.values()) == text_of(expected)

    with_app(make_hash_llm(step_s=0.001), use)


def text_of(events: Any) -> str:
    """What events say of the answer, joined: neighbours may have been written as one."""
    texts = list[str]()
    for event in events:
        line = event.partition(b"data: ")[2]
        fields = {} if line == b"[DONE]" else json.loads(line)
        for choice in fields.get("choices", ()):
            texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        delta = fields.get("delta") if "output_index" not in fields or "logprobs" in fields else ""
        texts.append(delta if isinstance(delta, str) else (delta or {}).get("text", ""))
    return "".join(texts)


LONG = completion_body(stream=True, max_tokens=400, ignore_eos=True)


async def begun(app: App, name: str, body: dict[str, Any] = LONG, **headers: str) -> Any:
    """A kept answer whose client has left after its first event, and the task of its request."""
    cut = Cut(1)
    how = {"headers": {**KEEP, **headers, "x-request-id": name}, **cut.how}
    asking = asyncio.ensure_future(app.post(COMPLETIONS, body, **how))
    await cut.leave.wait()
    return asking


def test_a_request_goes_on_without_its_client_until_it_is_cancelled() -> None:
    async def use(app: App) -> None:
        asking = await begun(app, "mine")
        shown = (await app.get("/v1/requests/mine")).json()
        assert shown["state"] == "running"
        before = app.engine.stats()["num_steps"]
        while app.engine.stats()["num_steps"] < before + 10:
            await asyncio.sleep(0.001)
        assert app.engine.num_open == 1
        reading = asyncio.ensure_future(app.get(events_at("mine")))
        await asyncio.sleep(0)
        assert (await app.post("/v1/requests/mine/cancel", {})).json()["cancelled"] is True
        events = numbered((await reading).body)
        error = json.loads(events[max(events)].partition(b"data: ")[2])["error"]
        assert error["code"] == "request_cancelled"
        await asking
        assert (await app.get("/v1/requests/mine")).json()["outcome"] == "request_cancelled"
        assert numbered((await app.get(events_at("mine"))).body) == events

    with_app(make_hash_llm(step_s=0.002, num_pages=2048), use)


def test_without_the_header_a_client_that_leaves_ends_its_request() -> None:
    async def use(app: App) -> None:
        for wish in ({}, {"x-keep-answer": "false"}):
            cut = Cut(1)
            headers = {**wish, "x-request-id": f"mine-{len(wish)}"}
            await app.post(COMPLETIONS, LONG, headers=headers, **cut.how)
            assert app.engine.num_open == 0
            refused = await app.get(events_at(headers["x-request-id"]))
            assert (refused.status, refused.error()["code"]) == (404, "answer_not_kept")

    with_app(make_hash_llm(step_s=0.002, num_pages=2048), use)


def test_a_server_that_keeps_none_streams_as_always() -> None:
    async def use(app: App) -> None:
        plain = await app.post(COMPLETIONS, PATHS[COMPLETIONS], headers=KEEP)
        assert plain.status == 200
        assert not numbered(plain.body)

    with_app(make_hash_llm(), use, keep_answers_s=0)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-keep-answer": "yes"}, LONG),
        ({"x-keep-answer": ""}, LONG),
        ({"x-keep-answer": "true" * 1000}, LONG),
        (KEEP, {**LONG, "stream": False}),
    ],
)
def test_wrong_wishes_are_refused(headers: dict[str, str], body: dict[str, Any]) -> None:
    async def use(app: App) -> None:
        refused = await app.post(COMPLETIONS, body, headers=headers)
        assert refused.status == 400
        assert "X-Keep-Answer" in refused.error()["message"]
        assert app.engine.stats()["num_submitted"] == 0

    with_app(make_hash_llm(), use)


WRONG = ["-1", "1.5", "x", "", "١", "1e3", "9" * 16, "9" * 4000, "null", "0x1", " 1", "%00", "%2B1"]


def test_numbers_that_are_none_are_refused() -> None:
    async def use(app: App) -> None:
        await app.post(COMPLETIONS, PATHS[COMPLETIONS], headers={**KEEP, "x-request-id": "mine"})
        for wrong in WRONG:
            for reply in (
                await app.get(f"/v1/requests/mine/events?after={wrong}"),
                await app.send("HEAD", f"/v1/requests/mine/events?after={wrong}"),
            ):
                assert reply.status == 400, wrong
                assert reply.error()["param"] == "after"
        by_header = await app.send("GET", events_at("mine"), headers={"last-event-id": "-1"})
        assert by_header.status == 400
        beyond = await app.get(events_at("mine", 100_000))
        assert (beyond.status, beyond.error()["code"]) == (400, "event_unknown")
        assert "so far" in beyond.error()["message"]
        for unknown in ("x", "cmpl-" + 32 * "0", "%2e%2e", "a" * 5000):
            refused = await app.get(events_at(unknown))
            assert (refused.status, refused.error()["code"]) == (404, "request_not_found")

    with_app(make_hash_llm(), use)


def test_another_keys_answer_is_not_found(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob, admin = make(file, "alice"), make(file, "bob"), make(file, "admin", admin=True)

    async def use(app: App) -> None:
        made = await app.post(COMPLETIONS, PATHS[COMPLETIONS], headers={**KEEP, **alice})
        name = made.headers["x-request-id"]
        for path in (events_at(name), events_at(f"cmpl-{name}", 3)):
            refused = await app.get(path, **bob)
            assert (refused.status, refused.error()["code"]) == (404, "request_not_found")
            assert (await app.get(path)).status == 401
            assert (await app.get(path, **alice)).status == 200
            assert (await app.get(path, **admin)).status == 200

    with_app(make_hash_llm(), use, api_keys=str(file))


def test_a_key_at_its_limit_may_still_read_on(tmp_path: Path) -> None:
    """The request that goes on is the one that it may have open; reading it is none."""
    file = tmp_path / "keys.json"
    key = make(file, "alice", max_concurrent=1, requests_per_minute=1)

    async def use(app: App) -> None:
        asking = await begun(app, "mine", PATHS[COMPLETIONS], **key)
        for _ in range(3):
            assert (await app.get(events_at("mine", 1), **key)).status == 200
        await asking

    with_app(make_hash_llm(step_s=0.002), use, api_keys=str(file))


def test_who_has_read_all_and_asks_for_more_lets_it_go() -> None:
    async def use(app: App) -> None:
        whole = await app.post(
            COMPLETIONS, PATHS[COMPLETIONS], headers={**KEEP, "x-request-id": "mine"}
        )
        last = max(numbered(whole.body))
        for _ in range(2):
            assert (await app.send("HEAD", events_at("mine", last))).status == 200
        end = await app.get(events_at("mine", last))
        assert (end.status, end.body) == (200, b"")
        gone = await app.get(events_at("mine", last))
        assert (gone.status, gone.error()["code"]) == (404, "answer_not_kept")

    with_app(make_hash_llm(), use)


def test_ten_thousand_resumes_leave_a_few_readers() -> None:
    """Each further reader takes the place of the one that came first, which is told."""

    async def use(app: App) -> None:
        kept = app.app.state.served.kept
        asking = await begun(app, "mine")
        context_id = (await app.get("/v1/requests/mine")).json()["id"].removeprefix("cmpl-")
        answer = kept.get(context_id)
        last = answer.last
        reading = [asyncio.ensure_future(app.get(events_at("mine", last))) for _ in range(300)]
        await asyncio.sleep(0.05)
        assert answer.num_readers <= MAX_READERS
        await app.send("DELETE", "/v1/requests/mine")
        replies = await asyncio.gather(*reading)
        assert {reply.status for reply in replies} == {200}
        ends = [REPLACED in reply.body for reply in replies]
        assert sum(ends) >= len(ends) - MAX_READERS
        assert not ends[-1]
        assert answer.num_readers == 0
        await asking

        for _ in range(10_000):  # the same on the parts: nothing of it stays
            answer.read(0)
        assert answer.num_readers == MAX_READERS

    with_app(make_hash_llm(step_s=0.002, num_pages=2048), use)


# ---- what is kept is bounded

SMALL = ServerLimits(max_kept_bytes=100_000, max_kept_bytes_of_key=30_000)


async def filled(kept: KeptAnswers, name: str, owner: str, num_events: int, size: int = 100) -> Any:
    answer = kept.begin(name, owner)
    for _ in range(num_events):
        await answer.put(b"x" * size + b"\n\n")
    return answer


def test_the_oldest_of_a_key_that_have_ended_go_first() -> None:
    async def main() -> None:
        kept = KeptAnswers(300, SMALL)
        for i in range(1000):
            (await filled(kept, f"a{i}", "a", 10)).end()
            assert kept.num_bytes <= SMALL.max_kept_bytes_of_key
        other = await filled(kept, "b", "b", 10)
        names = [name for name in (f"a{i}" for i in range(1000)) if is_kept(kept, name)]
        assert names == [f"a{i}" for i in range(1000 - len(names), 1000)]
        assert len(names) > 3
        assert (await other.read(0).take()).count(b"id: ") == 10
        kept.close()

    run_in_virtual_time(main())


def is_kept(kept: KeptAnswers, name: str) -> bool:
    with suppress(HttpError):
        kept.get(name)
        return True
    return False


def test_a_long_answer_loses_its_beginning_and_says_so() -> None:
    async def main() -> None:
        kept = KeptAnswers(300, SMALL)
        answer = await filled(kept, "a", "a", 5)
        slow, quick = answer.read(0), answer.read(0)
        for number in range(6, 5000):
            await answer.put(b"x" * 100)
            data = await quick.take()
            assert b"id: %d\n" % number in data
            assert kept.num_bytes <= SMALL.max_kept_bytes_of_key
        assert await slow.take() == GONE
        assert await slow.take() is None
        with pytest.raises(HttpError, match="the first event of this answer that is kept is") as no:
            answer.read(0)
        assert (no.value.status, no.value.code) == (410, "events_gone")
        assert (await answer.read(answer.last - 3).take()).count(b"id: ") == 3
        answer.end()
        assert await quick.take() is None
        kept.close()

    run_in_virtual_time(main())


def test_all_keys_together_have_a_limit() -> None:
    """The key with most loses first; without keys there is no other limit."""

    async def main() -> None:
        kept = KeptAnswers(300, SMALL)
        small = await filled(kept, "small", "small", 10)
        for i in range(20):
            await filled(kept, f"x{i}", f"key{i}", 200)
            assert kept.num_bytes <= SMALL.max_kept_bytes
        small.end()
        assert (await small.read(0).take()).count(b"id: ") == 10
        for i in range(20):
            (await filled(kept, f"y{i}", "", 200)).end()
            assert kept.num_bytes <= SMALL.max_kept_bytes
        huge = await filled(kept, "huge", "", 1, size=500_000)
        assert kept.num_bytes <= SMALL.max_kept_bytes
        huge.end()
        kept.close()

    run_in_virtual_time(main())


def test_an_answer_is_kept_for_some_time_after_its_end() -> None:
    async def main() -> None:
        kept = KeptAnswers(30, SMALL)
        answer = await filled(kept, "a", "a", 3)
        await asyncio.sleep(1000)
        answer.end()
        answer.end()
        await asyncio.sleep(29)
        assert is_kept(kept, "a")
        await asyncio.sleep(2)
        assert not is_kept(kept, "a")
        assert kept.num_bytes == 0

    run_in_virtual_time(main())


def test_a_reader_takes_a_bounded_part_at_once() -> None:
    async def main() -> None:
        kept = KeptAnswers(300)
        answer = await filled(kept, "a", "a", 5000, 500)
        answer.end()
        reader, pieces = answer.read(0), list[bytes]()
        while (data := await reader.take()) is not None:
            pieces.append(data)
            assert len(data) <= 2 * MAX_TAKEN_BYTES
        assert list(numbered(b"".join(pieces))) == list(range(1, 5001))
        kept.close()

    run_in_virtual_time(main())


def test_what_only_says_that_it_lives_is_not_kept() -> None:
    async def main() -> None:
        kept = KeptAnswers(300)
        answer = await filled(kept, "a", "a", 1)
        reader = answer.read(1)
        for i in range(3):
            await answer.mention(b": %d\n\n" % i)
        assert await reader.take() == b": 2\n\n"  # the latest
        await answer.put(b"data: x\n\n")
        assert await reader.take() == b"id: 2\ndata: x\n\n"
        assert answer.last == 2
        answer.end()
        assert await reader.take() is None
        kept.close()

    run_in_virtual_time(main())


# ---- other servers


def test_any_front_reads_the_answer_of_another(tmp_path: Path) -> None:
    """While it is written and afterwards; another key's is not found there, either."""
    file = tmp_path / "keys.json"
    alice, bob = make(file, "alice"), make(file, "bob")

    async def use(shared: SharedByFronts, fronts: Any, apps: list[App]) -> None:
        calm = await apps[0].post(COMPLETIONS, PATHS[COMPLETIONS], headers=alice)
        asking = await begun(apps[0], "mine", PATHS[COMPLETIONS], **alice)
        name = (await apps[1].get("/v1/requests/mine", **alice)).json()["id"]
        for by in ("mine", name):
            reply = await apps[1].get(events_at(by, 1), **alice)
            events = numbered(reply.body)
            assert list(events) == list(range(2, max(events) + 1))
            first = await apps[0].get(events_at(by), **alice)
            assert text_of(numbered(first.body).values()) == text_of(calm_events(calm.body))
        await asking
        refused = await apps[1].get(events_at(name), **bob)
        assert (refused.status, refused.error()["code"]) == (404, "request_not_found")
        beyond = await apps[1].get(events_at(name, 1000), **alice)
        assert (beyond.status, beyond.error()["code"]) == (400, "event_unknown")
        plain = await apps[0].post(COMPLETIONS, PATHS[COMPLETIONS], headers=alice)
        none = await apps[1].get(events_at(plain.headers["x-request-id"]), **alice)
        assert (none.status, none.error()["code"]) == (404, "answer_not_kept")

    with_several_fronts(use, lambda: make_hash_llm(step_s=0.005), 2, api_keys=str(file))


def calm_events(data: bytes) -> list[bytes]:
    return data.split(b"\n\n")[:-1]


def test_each_model_keeps_its_answers() -> None:
    make_app = partial(create_app, settings=ServerSettings(), is_inner=True)
    router = ModelRouter(LoadedModels(dict.fromkeys("ab", make_hash_llm), make_app))

    async def main() -> None:
        app = App.__new__(App)
        app.app = router.make_app(layers(ServerSettings(), (router.seen,)))
        router.load_all()
        async with app.app.router.lifespan_context(app.app):
            for model in "ab":
                body = {**PATHS[COMPLETIONS], "model": model}
                whole = await app.post(
                    COMPLETIONS, body, headers={**KEEP, "x-request-id": f"mine-{model}"}
                )
                again = await app.get(events_at(f"mine-{model}"))
                assert numbered(again.body) == numbered(whole.body) != {}

    asyncio.run(main())
