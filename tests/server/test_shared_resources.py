"""What callers share: each resource has a row with the limit of a key that covers it.

The resources are found in the source (`shared_makers`), so a new one without a row fails. Each row
with a limit is flooded (`floods`): two other keys get theirs, which is counted and not timed.
"""

from __future__ import annotations

import ast
import asyncio
from importlib import import_module
from pathlib import Path

import pytest

from infer.server.http.error_responses import HttpError
from infer.server.sessions.database_threads import NUM_THREADS, DatabaseThreads
from infer.server.sessions.store import SessionStore
from infer.server.tenancy.key_places import KeyPlaces
from infer.server.viewers import MAX_VIEWERS, TURN_S, EngineViewers
from tests.support.cases import over
from tests.support.doubles import make_hash_llm
from tests.support.floods import FLOODS, FULL, Flood
from tests.support.serving import App, with_app
from tests.support.shared_makers import MAKERS, REFUSALS, holders, sites
from tests.support.shared_resources import (
    LIMITED,
    SHARED_RESOURCES,
    UNLIMITED,
    KeyLimit,
    SharedResource,
)

WAIT_S = 60
"""Seconds after which something has not happened."""
NAMES = [row.name for row in LIMITED]


def test_each_shared_resource_has_a_row() -> None:
    rows = [site for row in SHARED_RESOURCES for site in row.made_at]
    assert len(rows) == len(set(rows))
    found = sites(MAKERS | holders())
    assert found - set(rows) == set(), "a row of shared_resources.py must say which limit covers it"
    assert set(rows) - found == set(), "there is no such maker any more"


def test_each_refusal_for_want_of_room_has_a_row() -> None:
    rows = [site for row in SHARED_RESOURCES for site in row.refused_at]
    assert len(rows) == len(set(rows))
    assert sites(REFUSALS) == set(rows)


@over(
    ("source", "site"),
    [
        ("class A:\n    def __init__(self):\n        self._x = Lock()", "A._x:Lock"),
        ("class A:\n    def f(self):\n        y = queue.Queue[int]()", "A.f.y:Queue"),
        ("def f():\n    return g(Thread(target=f))", "f:Thread"),
        ("def f():\n    a = Thread()\n    a = Thread()", "f.a:Thread#2"),
        ("class A:\n    x: Q = field(default_factory=lambda: Queue(3))", "A.x:Queue"),
        ("class A:\n    def f(self):\n        self._a, b = Lock(), 1", "A.f:Lock"),
        ("def f():\n    raise HttpError(429, 'x')", "f:HttpError"),
        ("def f():\n    raise HttpError(status, 'x')", "f:HttpError"),
        ("async def f():\n    with (x := FairThreads(2)):\n        pass", "f.x:FairThreads"),
    ],
)
def test_what_is_shared_is_found(source: str, site: str) -> None:
    names = MAKERS | REFUSALS | holders()
    assert f"x.py:{site}" in sites(names, {"x.py": ast.parse(source)})
    assert sites(names, {"x.py": ast.parse("def f():\n    raise HttpError(404, 'x')")}) == set()


def value_of(limit: KeyLimit) -> object:
    module, _, names = limit.where.partition(":")
    value: object = import_module(f"infer.{module}")
    for name in names.split("."):
        value = getattr(value, name)
    return value


def test_each_limit_is_what_the_row_says() -> None:
    for row in LIMITED:
        assert row.limits, row.name
        for limit in row.limits:
            value = value_of(limit)
            assert value == limit.value or (limit.value is None and callable(value)), limit
    assert not any(row.limits or row.status for row in UNLIMITED)
    assert all(row.why.endswith(".") for row in SHARED_RESOURCES)
    names = [row.name for row in SHARED_RESOURCES]
    assert len(names) == len(set(names))


def test_each_limit_has_a_flood() -> None:
    assert list(FLOODS) == NAMES


async def flood_with(flood: Flood, keys: list[str]) -> tuple[list[str], list[int]]:
    """Who was served while b and c waited, in order, and the statuses of the flooders' refusals:
    each of `keys` takes what it gets, then b and c want one."""
    served: list[str] = []
    refused: list[int] = []

    async def use(key: str) -> None:
        status = await flood.use(key)
        if status not in FULL:
            served.append(key)
        else:
            assert key not in "bc", f"{key} was refused: {status}"
            refused.append(status)

    flooding = [asyncio.ensure_future(use(key)) for _ in range(flood.num_uses) for key in keys]
    while len(refused) < len(keys) * (flood.num_uses - flood.num_allowed):
        await asyncio.sleep(0.001)
    num_before = len(served)
    others = [asyncio.ensure_future(use(key)) for key in "bc"]
    if flood.turns or (len(keys) > 1 and flood.has_turns):
        for _ in range(100):
            await asyncio.sleep(0)  # until they wait, too
        flood.release()
    await asyncio.gather(*others)
    order = served[num_before:]
    while order[-1] not in "bc":
        order.pop()
    flood.release()
    await asyncio.gather(*flooding)
    return order, refused


@pytest.mark.parametrize("row", LIMITED, ids=NAMES)
def test_others_are_served_while_one_key_floods(row: SharedResource, tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(WAIT_S), FLOODS[row.name](tmp_path) as flood:
            order, refused = await flood_with(flood, ["a"])
            assert sorted(set(order) - {"a"}) == ["b", "c"]
            assert order.count("a") <= flood.turns
            assert refused == [row.status] * (flood.num_uses - flood.num_allowed)
            if flood.check is not None:
                await flood.check()

    asyncio.run(main())


@pytest.mark.parametrize("name", NAMES)
def test_no_number_of_keys_keeps_all_from_another(name: str, tmp_path: Path) -> None:
    """All flooders together have all that there is; who has none is not refused."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), FLOODS[name](tmp_path) as flood:
            if flood.num_keys:
                keys = [f"a{number}" for number in range(flood.num_keys)]
                order, _ = await flood_with(flood, keys)
                assert {"b", "c"} <= set(order)

    asyncio.run(main())


def test_eight_keys_do_not_keep_all_viewers_places() -> None:
    """Each has one; a further key gets the place of who has watched for longest, in its turn."""
    engine, now_s = make_hash_llm(), [0.0]

    async def use(app: App) -> None:
        viewers = EngineViewers(engine, app.app.state.traces, lambda: now_s[0])

        def refused(key: str) -> HttpError:
            with pytest.raises(HttpError) as found:
                viewers.join(key, key)
            return found.value

        first = [viewers.join(str(number), str(number)) for number in range(MAX_VIEWERS)]
        now_s[0] = TURN_S - 3.0
        assert (refused("b").status, refused("b").retry_after_s) == (503, 3)
        assert refused("3").status == 503  # it has one
        now_s[0] = TURN_S
        watching = [viewers.join("b", "b"), viewers.join("c", "c")]
        for viewer in first[:2]:
            data = await viewer.take()
            assert data is not None
            assert b'{"reason":"replaced"}' in data
        now_s[0] += TURN_S - 1.0
        watching += [viewers.join("0", "0"), viewers.join("1", "1")]  # in the places of 2 and 3
        now_s[0] += 1.0
        assert viewers.num_viewers == MAX_VIEWERS
        for viewer in (*first, *watching):
            viewers.leave(viewer)

    with_app(engine, use)


def test_a_key_always_has_one_place() -> None:
    places = KeyPlaces("things", 2, 3)
    for owner in ("a", "a", "b", "c", "d"):
        assert places.has_room(owner)
        places.acquire(owner)
    assert not places.has_room("b")
    assert not places.has_room("")
    with pytest.raises(HttpError, match="this key may have 2 things") as refused:
        places.has_room("a")
    assert refused.value.status == 429
    with pytest.raises(HttpError, match="this key may have 1 things"):
        places.has_room("b", 1)
    for owner in ("a", "a", "b", "c", "d"):
        places.release(owner)
    assert places.num_of("a") == 0
    assert places.has_room("")


def test_a_key_that_writes_all_the_time_keeps_nobody_from_sqlite(tmp_path: Path) -> None:
    """SQLite itself lets who waits look again after ever longer pauses: hundreds of others' turns
    later, or never."""
    store = SessionStore(f"sqlite:///{tmp_path}/s.db")
    num_written, has_ended = 0, False

    async def flood(threads: DatabaseThreads) -> None:
        nonlocal num_written
        while not has_ended:
            await threads.call("a", store.rename, "a", name, "x")
            num_written += 1

    async def use() -> list[int]:
        nonlocal has_ended
        threads, waited = DatabaseThreads(), []
        flooding = [asyncio.ensure_future(flood(threads)) for _ in range(16)]
        try:
            for number in range(200):
                before = num_written
                if number % 2:
                    await threads.call("b", store.all, "b")
                else:
                    await threads.call("b", store.create, "b")
                waited.append(num_written - before)
        finally:
            has_ended = True
            await asyncio.gather(*flooding)
            threads.close()
        return waited

    name = store.create("a")["id"]
    try:
        waited = sorted(asyncio.run(use()))
        assert waited[-10] <= 3 * NUM_THREADS
        assert waited[-1] < 20 * NUM_THREADS, (
            "a thread that has lost its core makes others wait, too"
        )
    finally:
        store.close()
