"""Routing over real schedulers and caches, and routing that is broken on purpose.

Each check of this page fails with at least one of the broken routers at its end.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

import infer.replicas.routing as routing
from infer.replicas.fleet import Fleet
from infer.replicas.router import ReplicaLoad, Router
from infer.replicas.routing import KnownReplica, PageView, PrefixRouter, Routing, make_router
from infer.schedule.index_changes import chain
from infer.types import Request, SamplingParams
from infer.types.page_changes import PageChanges
from infer.types.step_events import ForeignLoad, StepEvents
from tests.support.fleet_replicas import Caller, HashReplica, steady_clock
from tests.support.routed_engines import COSTS_S, RoutedEngine, RoutedEngines

PAGE = 4
TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 24, 8
LONG_TURN_TOKENS = 192
NUM_CONVERSATIONS, NUM_HELD = 50, 17
"""Three engines whose caches hold so many each have room for all."""
CONVERSATION_PAGES = TURNS * (TURN_TOKENS + ANSWER_TOKENS) // PAGE


LLAMA_1B_S = (48e-3, 8e-3, 20e-3)
"""What steps cost with Llama 1B's shape in int8 within AVX2 on two cores: see docs/log.md."""


def engines(
    router: Router,
    num: int = 3,
    *,
    num_pages: int = 400,
    costs_s: tuple[float, float, float] = COSTS_S,
) -> RoutedEngines:
    return RoutedEngines(
        num,
        router,
        costs_s=costs_s,
        num_pages=num_pages + 1,
        page_size=PAGE,
        max_seq_len=1300,
        max_batch_size=16,
        max_num_batched_tokens=256,
    )


def ask(name: str, prompt: list[int], *, max_tokens: int = 2, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0)
    return Request(name, tuple(prompt), sampling, 0, max_tokens, **fields)


def is_right_about_caches(router: PrefixRouter) -> bool:
    """Whether what a router expects to be cached is what the engine finds: for prompts with common
    beginnings, in three scopes and behind public tokens, in caches that are too small for them."""
    world, dice = engines(router, num_pages=30), random.Random(5)
    beginnings = [[dice.randrange(200) for _ in range(40)] for _ in range(4)]
    expected, found = Counter[str](), Counter[str]()
    for number in range(150):
        prompt = dice.choice(beginnings)[: dice.randrange(1, 41)]
        prompt = [*prompt, *(dice.randrange(200) for _ in range(dice.randrange(1, 9)))]
        scope = dice.choice(["a", "b", "c"])
        public = dice.choice([0, 0, 8, 10])
        request = ask(f"r{number}", prompt, cache_scope=scope, num_public=public)
        known = {id(each): router.num_cached(request, each.load) for each in world.engines}
        engine = world.add(request)
        before = engine.core.stats().counters.num_cached_tokens
        world.run()
        expected[request.request_id] = known[id(engine)]
        found[request.request_id] = engine.core.stats().counters.num_cached_tokens - before
    assert found.total(), "nothing was cached"
    return expected == found


def converse(world: RoutedEngines, *, clients: int = 8, turn_tokens: int = TURN_TOKENS) -> float:
    """Conversations whose turns come in random order; returns the cached share."""
    dice, busy = random.Random(1), dict[str, int]()
    said: dict[int, list[int]] = {number: [] for number in range(NUM_CONVERSATIONS)}
    order = [number for number in said for _ in range(TURNS)]
    dice.shuffle(order)

    def send() -> None:
        place = next((i for i, n in enumerate(order) if n not in busy.values()), None)
        if place is None:
            return
        number = order.pop(place)
        said[number] += [dice.randrange(200) for _ in range(turn_tokens)]
        name = f"r{len(order)}"
        busy[name] = number
        world.add(ask(name, said[number], max_tokens=ANSWER_TOKENS))

    def end(output: Any) -> None:
        said[busy.pop(output.request_id)] += [1] * ANSWER_TOKENS
        world.at(world.now_s, send)

    world.on_end = end
    for _ in range(clients):
        world.at(0.0, send)
    world.run()
    assert not order
    return world.cached_share()


@cache
def share_of_one(clients: int) -> float:
    """The cached share of one engine that has the caches of three."""
    pages = NUM_HELD * CONVERSATION_PAGES
    return converse(engines(make_router("least"), 1, num_pages=3 * pages), clients=clients)


def conversations_stay(router: Router, *, clients: int = 8) -> float:
    """The cached share of three engines, as a fraction of that of one engine with all of it."""
    world = engines(router, num_pages=NUM_HELD * CONVERSATION_PAGES)
    return converse(world, clients=clients) / share_of_one(clients)


def largest_share(router: Router, *, clients: int = 12) -> float:
    """The most requests that an engine gets, divided by the mean, where most begin alike."""
    world, dice, left = engines(router, num_pages=2000), random.Random(2), list(range(240))
    prefix = [dice.randrange(200) for _ in range(256)]

    def send() -> None:
        if left:
            begin = prefix if dice.random() < 0.9 else [dice.randrange(200) for _ in range(256)]
            own = [dice.randrange(200) for _ in range(16)]
            world.add(ask(f"r{left.pop()}", begin + own, max_tokens=dice.randrange(8, 40)))

    world.add(ask("first", prefix))
    world.run()
    world.on_end = lambda output: world.at(world.now_s, send)
    for _ in range(clients):
        world.at(world.now_s, send)
    world.run()
    return 3 * max(each.num_requests for each in world.engines) / 240


def long_prompts_are_avoided(router: Router) -> bool:
    """Whether short prompts go where no long one is being computed, though streams run there."""
    world = engines(router, 2)
    others: list[RoutedEngine] = []
    streams = [world.add(ask(f"s{i}", [i] * 8, max_tokens=100)) for i in range(4)]
    busy = world.add(ask("long", [*range(200)] * 2))
    world.at(0.02, lambda: others.extend(world.add(ask(f"r{i}", [9, i] * 4)) for i in range(3)))
    world.run()
    assert {id(each) for each in streams} == {id(each) for each in world.engines}
    return all(each is not busy for each in others)


def choices_share_a_prompt(router: Router) -> bool:
    """Whether the choices of one request, which come at once, compute their prompt once."""
    world = engines(router)
    chosen = {id(world.add(ask(f"c{i}", [*range(100)]))) for i in range(3)}
    world.run()
    return len(chosen) == 1


def losses_are_noticed(router: PrefixRouter) -> bool:
    """Whether a router that has missed reports asks for all pages, and knows them afterwards."""
    world = engines(router, 1)
    (engine,) = world.engines
    reported, is_lost = router.reported, False

    def losing(replica: ReplicaLoad, outputs: Any, step_events: StepEvents | None) -> None:
        if not is_lost:
            reported(replica, outputs, step_events)

    router.reported = losing  # type: ignore[method-assign]
    for number in range(40):
        is_lost = number in (1, 2)
        world.add(ask(f"r{number}", [number, *range(39)]))
        world.run()
    again = [ask(f"again {number}", [number, *range(39)]) for number in range(40)]
    return all(router.num_cached(request, engine.load) == 36 for request in again)


@cache
def is_healthy(check: Callable[[PrefixRouter], bool]) -> bool:
    """Whether a check holds for the router as it is."""
    return check(PrefixRouter())


def test_what_is_expected_in_a_cache_is_found_there() -> None:
    assert is_healthy(is_right_about_caches)


@pytest.mark.parametrize("clients", [1, 4, 8])
def test_conversations_stay_where_their_pages_are(clients: int) -> None:
    assert conversations_stay(PrefixRouter(), clients=clients) >= 0.90


@pytest.mark.parametrize("clients", [1, 8])
def test_first_tokens_come_sooner_than_by_turns(clients: int) -> None:
    pages = NUM_HELD * TURNS * (LONG_TURN_TOKENS + ANSWER_TOKENS) // PAGE
    medians = []
    for router in (PrefixRouter(), make_router("round-robin")):
        world = engines(router, num_pages=pages, costs_s=LLAMA_1B_S)
        converse(world, clients=clients, turn_tokens=LONG_TURN_TOKENS)
        medians.append(statistics.median(world.first_token_s.values()))
    assert medians[0] <= 0.6 * medians[1], medians


def test_taking_one_after_the_other_loses_most_of_the_cache() -> None:
    assert conversations_stay(make_router("round-robin")) <= 0.45


@pytest.mark.parametrize("clients", [6, 12, 40])
def test_a_prefix_of_nearly_all_requests_is_shared_by_engines(clients: int) -> None:
    assert largest_share(PrefixRouter(), clients=clients) <= 1.5


def test_a_long_prompt_keeps_others_away() -> None:
    assert long_prompts_are_avoided(PrefixRouter())


def test_choices_of_one_request_go_to_one_engine() -> None:
    assert choices_share_a_prompt(PrefixRouter())


def test_lost_reports_are_noticed_and_made_good() -> None:
    assert losses_are_noticed(PrefixRouter())


def test_requests_that_left_without_an_output_are_no_load() -> None:
    world = engines(router := PrefixRouter(), 2)
    first = world.add(ask("gone", [*range(200)] * 2))
    other = world.add(ask("stays", [*range(100)]))
    assert other is not first
    first.core.abort("gone")
    first.load.remove("gone")
    router.dropped(first.load, "gone")
    assert world.add(ask("next", [7] * 50)) is first
    router.forget(first.load)
    world.run()


def test_a_choice_costs_the_same_however_much_there_is_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt is hashed once and not for each engine, and no other request is looked at."""
    world, seen = engines(PrefixRouter(), 5), Counter[str]()
    for i in range(40):
        world.add(ask(f"r{i}", [i] * 20))

    def counted(*arguments: Any) -> list[bytes]:
        seen["chain"] += 1
        return chain(*arguments)

    def looked_at(load: ReplicaLoad, request_id: str, expected: int = 0) -> int:
        seen["looked at"] += 1
        return expected

    monkeypatch.setattr(routing, "chain", counted)
    monkeypatch.setattr(ReplicaLoad, "num_left", looked_at)
    world.router.choose(ask("last", [7] * 20), [each.load for each in world.engines])
    assert seen == {"chain": 1}


def test_the_sum_of_what_is_left_follows_every_step() -> None:
    """Chunks, preemptions and ends change it as looking at each request would."""
    router = PrefixRouter()
    world, dice = engines(router, 3, num_pages=40), random.Random(2)
    num_checked = 0

    def check() -> None:
        nonlocal num_checked
        for engine in world.engines:
            known = router.known.get(engine.load)
            if known is not None:
                sent = known.sent.items()
                left = [engine.load.num_left(name, each.num_tokens) for name, each in sent]
                assert known.num_left == sum(left)
                num_checked += bool(left) and sum(left) != sum(e.num_tokens for _, e in sent)

    world.on_end = lambda output: check()
    for i in range(120):
        prompt = [dice.randrange(3)] * dice.randrange(1, 140)
        world.at(i * 0.01, partial(world.add, ask(f"r{i}", prompt)))
    world.run()
    check()
    assert num_checked > 3, "no request was ever in the midst of its prompt"


def test_what_an_engine_does_for_others_counts() -> None:
    world = engines(router := PrefixRouter(), 2)
    busy, idle = world.engines
    load = ForeignLoad(num_waiting=3, num_running=4, num_prompt_tokens=900)
    router.reported(busy.load, [], StepEvents(1, 0.0, 0.1, 4, foreign_load=load))
    assert {id(world.add(ask(f"r{i}", [i] * 20))) for i in range(4)} == {id(idle)}


def test_a_request_that_waits_for_a_seat_would_rather_have_one() -> None:
    world = engines(PrefixRouter(), 2)
    full, free = world.engines
    known = ask("known", [*range(100)])
    full.core.add(known)
    for i in range(16):
        full.load.add(ask(f"s{i}", [i]))
    full.load.stepped(StepEvents(1, 0.0, 0.1, 16))
    assert world.add(ask("r", [*range(100)])) is free


@pytest.mark.parametrize("name", ["prefix", "least", "round-robin"])
def test_every_router_serves(name: Routing) -> None:
    world, ended = engines(make_router(name)), []
    world.on_end = lambda output: ended.append(output.request_id)
    for i in range(9):
        world.add(ask(f"r{i}", [*range(10 * i + 1)]))
    world.run()
    assert sorted(ended) == [f"r{i}" for i in range(9)]


def test_a_stale_view_attracts_nobody() -> None:
    view = PageView()
    (page,) = chain([1, 2, 3], 2, "")
    view.apply(PageChanges(digest=page, entered=page, is_reset=True))
    assert view.pages == {page}
    assert not view.is_stale
    view.apply(PageChanges(digest=bytes(16)))  # a page has left, and nobody has heard it
    assert not view.pages
    assert view.is_stale


def test_old_pages_count_until_the_new_ones_are_complete() -> None:
    view = PageView()
    one, two = chain([1, 2, 3, 4, 5], 2, "")
    both = bytes(a ^ b for a, b in zip(one, two, strict=True))
    view.apply(PageChanges(digest=both, entered=one + two, is_reset=True))
    view.apply(PageChanges(digest=both, entered=one, is_reset=True, is_complete=False))
    assert view.pages == {one, two}
    view.apply(PageChanges(digest=one))
    assert view.pages == {one}
    assert not view.is_stale


def test_a_fleet_tells_its_router_which_pages_its_replicas_have() -> None:
    """Four conversations, two engines: each second turn goes where the first one was computed."""
    replicas = [HashReplica(f"m{i}", max_batch_size=8, clock=steady_clock()) for i in range(2)]
    caller = Caller()
    fleet = Fleet(replicas, router=PrefixRouter(), watch_s=3600)
    fleet.start(caller.deliver, caller.died)
    prompts = [[i, *range(30)] for i in range(4)]
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            fleet.add(ask(f"{turn} {i}", prompt + [9] * turn))
        for _ in range(50):
            for replica in replicas:
                replica.step()
    counters = [replica.core.stats().counters for replica in replicas if replica.core is not None]
    assert all(each.num_submitted == 4 for each in counters)
    assert all(each.num_cached_tokens == 2 * 28 for each in counters)
    assert len(caller.ends) == 8
    fleet.stop()


def conversations_have_a_place(router: PrefixRouter) -> bool:
    """Whether a router that knows no pages takes a conversation where another router would, whose
    engines have other histories, and spreads several."""

    def places(router: PrefixRouter, num_before: int) -> list[str]:
        world, found = engines(router), []
        for number in range(24 + num_before):
            name = f"c{number - num_before}" if number >= num_before else ""
            fresh = [1000 + number] * 40
            engine = world.add(ask(f"r{number}", fresh, conversation=name))
            found += [engine.load.name] * bool(name)
            world.run()
        return found

    found = places(router, 0)
    return len(set(found)) == 3 and found == places(PrefixRouter(), 2)


def test_pages_and_load_come_before_a_conversation() -> None:
    """Where it would go without pages is no reason not to go where they are, or to wait."""
    for number in range(12):
        world, prompt = engines(PrefixRouter()), list(range(100))
        first = world.add(ask("first", prompt))
        world.run()
        name = f"c{number}"
        assert world.add(ask("second", prompt, conversation=name)) is first
        used = {world.add(ask(f"{i}", [i + 1] * 40, conversation=name)).load.name for i in (1, 2)}
        assert len(used | {first.load.name}) == 3


# Routers that are broken on purpose.


def _without_scopes(patch: pytest.MonkeyPatch) -> None:
    def everybody(tokens: Any, size: int, scope: str, public: int, most: int) -> list[bytes]:
        return chain(tokens, size, "a", public, most)

    patch.setattr(routing, "chain", everybody)


def _without_public_tokens(patch: pytest.MonkeyPatch) -> None:
    def private(tokens: Any, size: int, scope: str, public: int, most: int) -> list[bytes]:
        return chain(tokens, size, scope, 0, most)

    patch.setattr(routing, "chain", private)


def _without_evictions(patch: pytest.MonkeyPatch) -> None:
    def apply(view: PageView, changes: PageChanges) -> None:
        view.is_stale = False
        view.pages |= {changes.entered[i : i + 16] for i in range(0, len(changes.entered), 16)}

    patch.setattr(PageView, "apply", apply)


def _without_digest(patch: pytest.MonkeyPatch) -> None:
    apply = PageView.apply

    def trusting(view: PageView, changes: PageChanges) -> None:
        is_stale = view.is_stale
        apply(view, changes)
        view.is_stale = is_stale and view.is_stale

    patch.setattr(PageView, "apply", trusting)


def _without_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageView, "apply", lambda view, changes: setattr(view, "is_stale", False))


def _without_load(patch: pytest.MonkeyPatch) -> None:
    send = KnownReplica.send

    def forgetful(known: Any, request_id: str, sent: Any) -> None:
        sent.num_tokens = 0
        send(known, request_id, sent)

    patch.setattr(KnownReplica, "send", forgetful)


def _without_a_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixRouter.__init__, "__kwdefaults__", {"max_share": 100.0})


def _without_conversations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(routing, "_rank", lambda conversation, replica: b"")


def _without_promises(patch: pytest.MonkeyPatch) -> None:
    send = KnownReplica.send

    def literal(known: Any, request_id: str, sent: Any) -> None:
        sent.pages = ()
        send(known, request_id, sent)

    patch.setattr(KnownReplica, "send", literal)


@pytest.mark.parametrize(
    ("breaks", "check"),
    [
        (_without_scopes, is_right_about_caches),
        (_without_public_tokens, is_right_about_caches),
        (_without_evictions, is_right_about_caches),
        (_without_digest, losses_are_noticed),
        (_without_pages, lambda router: conversations_stay(router) >= 0.90),
        (_without_load, long_prompts_are_avoided),
        (_without_a_share, lambda router: largest_share(router) <= 1.5),
        (_without_conversations, conversations_have_a_place),
        (_without_promises, choices_share_a_prompt),
    ],
)
def test_a_broken_router_is_noticed(
    breaks: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[PrefixRouter], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_healthy(check)
    breaks(monkeypatch)
    assert not check(PrefixRouter())
