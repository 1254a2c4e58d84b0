"""`Fleet` over replicas without processes: whatever dies, is silent or drains, no token is lost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from infer import SamplingParams
from infer.replicas.blame import MAX_FROM_OUTSIDE
from infer.replicas.fleet import RETURN_S, Fleet, fleet_limits
from infer.replicas.journal import RequestJournal
from infer.replicas.messages import Loss
from infer.replicas.router import ReplicaLoad
from infer.replicas.routing import Routing, make_router
from infer.schedule.sequence import Plan, Sampled
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.fingerprint import Fingerprint
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fleet_replicas import EQUAL, Caller, EngineDies, HashReplica, steady_clock
from tests.support.hash_engine import HashRunner, solo

SMALL: dict[str, Any] = {
    "num_pages": 60,
    "max_batch_size": 3,
    "max_num_batched_tokens": 16,
    "max_seq_len": 64,
}


def request(name: str, *prompt: int, seed: int | None = None, max_tokens: int = 8) -> Request:
    sampling = SamplingParams(temperature=0 if seed is None else 1)
    return Request(name, prompt or (1, 2, 3), sampling, seed or 0, max_tokens)


def started(*replicas: HashReplica, clock: Any = lambda: 0.0, **how: Any) -> tuple[Fleet, Caller]:
    caller, fleet = Caller(), Fleet(replicas, watch_s=3600, clock=clock, **how)
    fleet.start(caller.deliver, caller.died)
    return fleet, caller


def finish(fleet: Fleet, caller: Caller, wanted: Seq[Request]) -> None:
    """Run until all have ended; each has the tokens that it has alone."""
    for _ in range(2000):
        if all(each.request_id in caller.ends for each in wanted):
            break
        for replica in fleet.replicas.values():
            assert isinstance(replica, HashReplica)
            replica.step()
    for each in wanted:
        assert caller.tokens[each.request_id] == solo(each, VOCAB_SIZE), each.request_id
        assert caller.ends[each.request_id].error is None


def of(*names: str, **settings: Any) -> list[HashReplica]:
    return [HashReplica(name, **{**SMALL, **settings}) for name in names]


class Fleets(RuleBasedStateMachine):
    """Arrivals, steps, deaths, silence, late frames and drains in any order."""

    @initialize(count=st.integers(1, 3), routing=st.sampled_from(get_args(Routing)))
    def begin(self, count: int, routing: Routing) -> None:
        self.now_s = 0.0
        self.replicas = of(*(f"m{i}" for i in range(count)), clock=steady_clock())
        router = make_router(routing)
        self.fleet, self.caller = started(*self.replicas, clock=lambda: self.now_s, router=router)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.were_alone: set[str] = set()
        """Ids of requests that were alone when an engine died."""
        self.num_joined = count

    @rule(
        prompt=st.lists(st.integers(0, 5), min_size=1, max_size=12),
        seed=st.none() | st.integers(0, 9),
        max_tokens=st.integers(1, 10),
    )
    def arrive(self, prompt: list[int], seed: int | None, max_tokens: int) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = request(name, *prompt, seed=seed, max_tokens=max_tokens)
        self.fleet.add(self.requests[name])

    @rule(which=st.integers(0, 9), times=st.integers(1, 4))
    def step(self, which: int, times: int) -> None:
        for _ in range(times):
            self.replicas[which % len(self.replicas)].step()

    @rule(which=st.integers(0, 9), from_outside=st.booleans())
    def die(self, which: int, from_outside: bool) -> None:
        replica = self.replicas[which % len(self.replicas)]
        self._note_alone(replica)
        replica.die(from_outside=from_outside)

    @rule(which=st.integers(0, 9), name=st.integers(0, 30))
    def die_alone(self, which: int, name: int) -> None:
        """The engine dies while it computes one request, which it may have."""
        replica = self.replicas[which % len(self.replicas)]
        replica.isolated = f"r{name}"
        self._note_alone(replica)
        replica.die(from_outside=True)

    @rule(which=st.integers(0, 9))
    def revive(self, which: int) -> None:
        self.replicas[which % len(self.replicas)].revive()

    @rule(which=st.integers(0, 9))
    def cut(self, which: int) -> None:
        self.replicas[which % len(self.replicas)].cut()

    @rule()
    def check_health(self) -> None:
        for replica in self.replicas:
            if replica.is_cut:
                self._note_alone(replica)
        self.fleet.check_health()

    @rule(which=st.integers(0, 9))
    def heal(self, which: int) -> None:
        self.replicas[which % len(self.replicas)].heal()

    @rule(which=st.integers(0, 9))
    def deliver_late(self, which: int) -> None:
        replica = self.replicas[which % len(self.replicas)]
        if not replica.is_cut:
            replica.deliver()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        name = f"r{which}"
        self.fleet.abort(name)
        if name in self.requests and name not in self.caller.ends:
            self.aborted.add(name)

    @rule(which=st.integers(0, 9), timeout_s=st.sampled_from([0.0, 5.0]))
    def drain(self, which: int, timeout_s: float) -> None:
        replica = self.replicas[which % len(self.replicas)]
        if not replica.is_stopped:
            self.fleet.draining(replica, timeout_s)

    @rule(by_s=st.sampled_from([1.0, 6.0]))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s
        self.check_health()

    @precondition(lambda self: self.num_joined < 6)
    @rule()
    def join(self) -> None:
        self.num_joined += 1
        (replica,) = of(f"j{self.num_joined}", clock=steady_clock())
        self.replicas.append(replica)
        self.fleet.join(replica)

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        replica = self.replicas.pop(which % len(self.replicas))
        self.fleet.leave(replica.name)
        replica.deliver()  # it comes too late

    def _note_alone(self, replica: HashReplica) -> None:
        if replica.isolated is not None:
            self.were_alone.add(replica.isolated)

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        self.join()
        for replica in self.replicas:
            replica.revive()
            replica.heal()
            replica.deliver()
        wanted = [name for name in self.requests if name not in self.aborted]
        for _ in range(3000):
            if all(name in self.caller.ends for name in wanted):
                break
            for replica in self.replicas:
                replica.step()
        for name in wanted:
            end, alone = self.caller.ends.get(name), solo(self.requests[name], VOCAB_SIZE)
            assert end is not None, f"{name} does not end"
            if end.error is not None:
                assert name in self.were_alone, f"{name} fails, and was never alone: {end.error}"
                alone = alone[: len(self.caller.tokens[name])]
            assert self.caller.tokens[name] == alone, name
        for name in self.aborted:
            tokens = self.caller.tokens[name]
            assert tokens == solo(self.requests[name], VOCAB_SIZE)[: len(tokens)]
        self.fleet.stop()


Fleets.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestFleets = Fleets.TestCase
"""Whatever happens in whatever order."""


@pytest.fixture(autouse=True)
def _without_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infer")


def test_a_death_moves_streams_at_once_and_they_begin_alone() -> None:
    a, b = of("a", "b", max_batch_size=6)
    fleet, caller = started(a, b)
    wanted = [request(f"r{i}", i, 7, seed=i) for i in range(6)]
    for each in wanted:
        fleet.add(each)
    assert a.core is not None
    assert b.core is not None
    assert (a.core.scheduler.num_unfinished, b.core.scheduler.num_unfinished) == (3, 3)
    a.step()
    b.step()
    a.die(from_outside=True)
    assert b.core.scheduler.num_unfinished == 6
    moved = {each.request_id for each in b.core.scheduler.unfinished if each.request.num_crashes}
    assert len(moved) == 3
    finish(fleet, caller, wanted)
    assert {name for name, replicas in caller.replicas.items() if replicas == {"a", "b"}} == moved
    assert fleet.stats().counters.num_moved == 3
    assert fleet.is_alive
    fleet.stop()


def test_frames_of_an_old_assignment_are_ignored() -> None:
    a, b = of("a", "b")
    fleet, caller = started(a, b)
    wanted = [request("r", 1, 2), request("s", 3, 4)]
    for each in wanted:
        fleet.add(each)
    a.step()
    a.cut()
    for _ in range(3):
        a.step()  # it computes; nothing arrives
    assert len(caller.tokens["r"]) == 1
    fleet.check_health()
    b.step()
    b.step()
    b.cut()
    a.heal()  # frames of its first generation, then it begins another
    assert a.generation == 2
    fleet.check_health()  # and both go on there
    assert a.core is not None
    assert a.core.scheduler.num_unfinished == 2
    b.heal()
    finish(fleet, caller, wanted)
    fleet.stop()


def test_one_silent_replica_waits_until_another_is_ready() -> None:
    a, b = of("a", "b")
    fleet, caller = started(a, b)
    b.die(from_outside=True)
    fleet.add(request("r"))
    a.step()
    a.cut()
    fleet.check_health()
    assert (a.generation, a.is_abandoned) == (1, False), "there is nobody who could go on"
    b.revive()
    fleet.check_health()
    assert a.is_abandoned
    finish(fleet, caller, [request("r")])
    assert caller.replicas["r"] == {"a", "b"}
    fleet.stop()


def test_without_a_replica_requests_wait_and_newcomers_too() -> None:
    (a,) = of("a")
    fleet, caller = started(a)
    wanted = [request(f"r{i}", i) for i in range(3)]
    fleet.add(wanted[0])
    a.step()
    a.die(from_outside=True)
    assert fleet.is_alive
    assert not fleet.is_ready
    for each in wanted[1:]:
        fleet.add(each)
    a.revive()
    finish(fleet, caller, wanted)
    fleet.stop()


def test_when_all_are_failing_what_waits_is_failed() -> None:
    a, b = of("a", "b")
    fleet, caller = started(a, b)
    fleet.add(request("r"))
    for replica in (a, b):
        replica.die(from_outside=True)
        replica.is_alive = False
        fleet.failing(replica, "it does not start")
        if replica is a:
            assert fleet.is_alive
            assert not caller.ends
    assert not fleet.is_alive
    error = caller.ends["r"].error
    assert error is not None
    assert (error.kind, error.message) == (
        "EngineDeadError",
        "the engine has died and does not start again",
    )
    b.is_alive = True
    b.revive()
    assert fleet.is_ready
    fleet.gone(a)
    assert not caller.has_died
    fleet.gone(b)
    assert caller.has_died
    fleet.stop()


def test_more_requests_than_the_survivor_takes_wait_and_are_not_refused() -> None:
    replicas = of("a", "b", "c", max_waiting_requests=2, max_waiting_tokens=8)
    fleet, caller = started(*replicas)
    wanted = [request(f"r{i}", i, 7) for i in range(15)]
    for each in wanted:
        fleet.add(each)
    for replica in replicas[:2]:
        replica.step()
        replica.die(from_outside=True)
    finish(fleet, caller, wanted)
    fleet.stop()


class Poison(HashRunner):
    """Its engine dies when a request with 13 in its prompt has three tokens."""

    def execute(self, plan: Plan) -> Seq[Sampled]:
        for chunk in plan:
            sequence = chunk.sequence
            if 13 in sequence.request.prompt_token_ids and sequence.num_output >= 3:
                raise EngineDies
        return super().execute(plan)


@pytest.mark.parametrize("returns", [True, False], ids=["the other returns", "it stays away"])
def test_what_engines_died_with_does_not_queue_behind_the_first_that_is_back(returns: bool) -> None:
    now_s = 0.0
    fleet, caller = started(*(both := of("a", "b")), clock=lambda: now_s)
    wanted = [request(f"r{i}", i + 1, max_tokens=30) for i in range(6)]  # as many as seats
    for each in wanted:
        fleet.add(each)
    for _ in range(4):
        for replica in both:
            replica.step()
    for replica in both:
        replica.die(from_outside=True)
    both[0].revive()
    fleet.add(late := request("late", 9))
    for _ in range(8):
        both[0].step()
    assert gauges(both[0]) == (3, 0)
    if returns:
        both[1].revive()
        for _ in range(8):
            both[1].step()
        assert gauges(both[1])[0] == 3
    else:
        now_s = RETURN_S
        fleet.check_health()
        assert gauges(both[0]) == (3, 4)
    finish(fleet, caller, [*wanted, late])


def gauges(replica: HashReplica) -> tuple[int, int]:
    """Requests with and without a seat."""
    assert replica.core is not None
    found = replica.core.stats().gauges
    return found.num_running, found.num_waiting


@pytest.mark.parametrize("from_outside", [False, True])
def test_poison_takes_two_engines_of_any_number(from_outside: bool) -> None:
    replicas = of(*"abcdef", runner=Poison)
    fleet, caller = started(*replicas)
    wanted = [request(f"r{i}", i, 7) for i in range(12)]
    poison = request("poison", 13, 1)
    for each in (*wanted[:6], poison, *wanted[6:]):
        fleet.add(each)
    for _ in range(200):
        for replica in replicas:
            if from_outside and replica.core is not None:
                _step_killed(replica)
            else:
                replica.step()
    finish(fleet, caller, wanted)
    end = caller.ends["poison"]
    assert end.error is not None
    assert "died more than once" in end.error.message
    num_deaths = sum(replica.num_deaths for replica in replicas)
    assert num_deaths == (1 + MAX_FROM_OUTSIDE if from_outside else 2)
    assert num_deaths <= 3
    fleet.stop()


def _step_killed(replica: HashReplica) -> None:
    """A step in which a death looks as if it came from outside, as with a whole machine."""
    die = replica.die
    replica.die = lambda *, from_outside: die(from_outside=True)  # type: ignore[method-assign]
    replica.step()
    replica.die = die  # type: ignore[method-assign]


def test_a_drain_gets_nothing_new_and_moves_what_is_left() -> None:
    now_s = [0.0]
    a, b = of("a", "b")
    fleet, caller = started(a, b, clock=lambda: now_s[0])
    wanted = [request(f"r{i}", i, 7, max_tokens=30) for i in range(4)]
    fleet.add(wanted[0])
    fleet.add(wanted[1])
    for replica in (a, b):
        replica.step()
    fleet.draining(a, 2.0)
    fleet.add(wanted[2])
    fleet.add(wanted[3])
    assert a.core is not None
    assert b.core is not None
    assert [s.request_id for s in a.core.scheduler.unfinished] == ["r0"]
    for now_s[0] in (1.0, 2.0):
        fleet.check_health()
        a.step()
    assert not a.core.scheduler.num_unfinished
    (moved,) = (s.request for s in b.core.scheduler.unfinished if s.request_id == "r0")
    assert (moved.num_crashes, len(moved.output_token_ids)) == (0, 2)
    finish(fleet, caller, wanted)
    fleet.leave("a")
    assert fleet.replicas == {"b": b}
    fleet.stop()


def test_an_abort_reaches_the_replica_and_makes_room() -> None:
    (a,) = of("a", max_batch_size=1, max_waiting_requests=0)
    fleet, caller = started(a)
    wanted = [request(f"r{i}", i, 7) for i in range(3)]
    for each in wanted:
        fleet.add(each)
    assert a.core is not None
    a.step()
    assert [s.request_id for s in a.core.scheduler.unfinished] == ["r0"]
    fleet.abort("r0")
    assert [s.request_id for s in a.core.scheduler.unfinished] == ["r1"]
    fleet.abort("r2")  # it waits in the fleet
    finish(fleet, caller, wanted[1:2])
    assert not {"r0", "r2"} & caller.ends.keys()
    fleet.stop()


def test_what_a_replica_fell_silent_with_is_suspected() -> None:
    a, b = of("a", "b")
    fleet, caller = started(a, b)
    fleet.add(request("r"))
    a.step()
    a.cut()
    fleet.check_health()
    assert b.core is not None
    (moved,) = b.core.scheduler.unfinished
    assert (moved.request.num_crashes, len(moved.request.output_token_ids)) == (1, 1)
    finish(fleet, caller, [request("r")])
    fleet.stop()


def test_the_journal_takes_tokens_from_the_holder_only() -> None:
    journal, one, two = RequestJournal(), object(), object()
    journal.add(request("r"))
    journal.assign("r", one)
    output = StepOutput("r", 5)
    assert journal.record([output], two) == []
    assert journal.record([output], one) == [output]
    assert journal.release(one) == ["r"]
    assert journal.record([output], one) == []
    (resumed,) = journal.unassigned()
    assert resumed.output_token_ids == (5,)


# ---- equal replicas

OTHER = Fingerprint(model="model", numbers="other")


def test_streams_go_to_equal_replicas_first() -> None:
    a, b, c = of("a", "b", "c")
    b.fingerprint = OTHER
    fleet, caller = started(a, b, c)
    wanted = [request(f"r{i}", i, 7) for i in range(9)]
    for each in wanted:
        fleet.add(each)
    for replica in (a, b, c):
        replica.step()
    a.die(from_outside=True)
    finish(fleet, caller, wanted)
    assert {"a", "b"} not in caller.replicas.values()
    assert {"a", "c"} in caller.replicas.values()
    assert fleet.stats().counters.num_moved_unequal == 0
    fleet.stop()


def test_without_an_equal_one_any_goes_on_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    a, b = of("a", "b")
    b.fingerprint = OTHER
    fleet, caller = started(a, b)
    wanted = [request("r", 1, 7), request("s", 2, 7), request("t", 3, 7, max_tokens=2)]
    for each in wanted[:2]:
        fleet.add(each)
    a.step()
    fleet.add(wanted[2])
    a.die(from_outside=True)
    assert fleet.stats().counters.num_moved_unequal == 1
    assert "request r goes on at b, which may compute other tokens" in caplog.text
    finish(fleet, caller, wanted)
    fleet.stop()


def test_exact_ends_the_stream_with_an_error_or_waits_for_its_own() -> None:
    a, b = of("a", "b")
    b.fingerprint = OTHER
    fleet, caller = started(a, b, moved_streams="exact")
    wanted = [request("r", 1, 7), request("s", 2, 7)]
    for each in wanted:
        fleet.add(each)
    a.step()
    a.die(from_outside=True)
    assert not caller.ends, "its own engine comes back"
    fleet.add(newcomer := request("u", 9, 7))
    b.step()
    assert caller.tokens["u"], "a newcomer does not wait behind it"
    a.revive()
    a.step()
    a.die(from_outside=True)
    a.is_alive = False
    fleet.failing(a, "it does not start")
    error = caller.ends["r"].error
    assert error is not None
    assert (error.kind, "computes the same bits" in error.message) == ("MovedStreamError", True)
    assert fleet.stats().counters.num_moved_unequal == 0
    finish(fleet, caller, [wanted[1], newcomer])
    fleet.stop()


def test_exact_moves_what_has_no_token_anywhere() -> None:
    a, b = of("a", "b")
    b.fingerprint = OTHER
    fleet, caller = started(a, b, moved_streams="exact")
    fleet.add(request("r", 1, 7))
    a.die(from_outside=True)
    finish(fleet, caller, [request("r", 1, 7)])
    assert caller.replicas["r"] == {"b"}
    fleet.stop()


@pytest.mark.parametrize(
    ("fingerprint", "settings", "why"),
    [
        (Fingerprint(model="another"), {}, "its model (config and tokenizer another) is not the"),
        (Fingerprint(model="model", protocol=7), {}, "it speaks version 7 of the protocol, not 1"),
        (EQUAL, {"max_seq_len": 32}, "start it with --max-seq-len 64"),
        (EQUAL, {"vocab_size": 50}, "its vocabulary has 50 ids"),
    ],
)
def test_a_replica_of_another_model_is_kept_out_and_named(
    fingerprint: Fingerprint, settings: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    (a,) = of("a")
    fleet, caller = started(a)
    wanted = [request(f"r{i}", i) for i in range(4)]
    (stranger,) = of("stranger", **settings)
    stranger.fingerprint = fingerprint
    fleet.join(stranger)
    for each in wanted:
        fleet.add(each)
    assert "stranger is kept out of the fleet" in caplog.text
    assert why in caplog.text
    finish(fleet, caller, wanted)
    assert set().union(*caller.replicas.values()) == {"a"}
    with pytest.raises(ValueError, match="'a' is there already"):
        fleet.join(HashReplica("a", **SMALL))
    fleet.stop()


# ---- sums, loads


def test_limits_are_summed_and_lengths_are_not() -> None:
    one = EngineLimits(vocab_size=9, max_seq_len=50, num_seats=2, max_waiting_requests=3)
    two = EngineLimits(
        vocab_size=9, max_seq_len=40, num_seats=4, max_waiting_requests=5, max_waiting_tokens=7
    )
    both = fleet_limits([one, two])
    assert (both.max_seq_len, both.num_seats, both.max_waiting_requests) == (40, 6, 8)
    assert both.max_waiting_tokens is None
    assert fleet_limits([two, two]).max_waiting_tokens == 14


def test_the_least_loaded_replica_gets_a_request() -> None:
    replicas = of("a", "b", "c")
    fleet, caller = started(*replicas)
    prompts = [(1,) * 12, (2,) * 3, (3,) * 3, (4,) * 3, (5,) * 3, (6,) * 3]
    wanted = [request(f"r{i}", *prompt) for i, prompt in enumerate(prompts)]
    for each in wanted:
        fleet.add(each)
    loads = [replica.core.scheduler.num_unfinished for replica in replicas if replica.core]
    assert loads == [1, 3, 2]
    finish(fleet, caller, wanted)
    fleet.stop()


def test_a_load_follows_its_requests_to_the_end() -> None:
    limits = EngineLimits(
        vocab_size=9, max_seq_len=50, num_seats=1, max_waiting_requests=2, max_waiting_tokens=4
    )
    load = ReplicaLoad("a", limits)
    assert load.has_room(50)
    load.add(request("r", *range(9)))
    assert not load.has_room(4)
    assert load.has_room(4, is_resumed=True)
    load.remove("r")
    load.remove("unknown")
    assert (load.num_waiting_tokens, load.num_unfinished, load.has_room(50)) == (0, 0, True)


def test_stats_are_summed_over_replicas_and_go_on_after_they_leave() -> None:
    a, b = of("a", "b")
    fleet, _ = started(a, b)
    a.die(from_outside=True)
    b.die(from_outside=True)
    b.revive()
    assert fleet.stats().counters.num_restarts == 2
    fleet.leave("a")
    assert fleet.stats().counters.num_restarts == 2
    assert Counter(fleet.stats_of_replicas().keys()) == Counter("b")
    fleet.stop()


def test_a_refusal_of_an_engine_ends_one_request() -> None:
    (a,) = of("a", num_pages=5)
    fleet, caller = started(a)
    fleet.add(request("long", *range(30)))
    a.step()
    a.deliver()
    end = caller.ends["long"]
    assert end.finish_reason is FinishReason.ERROR
    assert isinstance(end.error, ErrorRecord)
    finish(fleet, caller, [])
    fleet.stop()


def test_a_loss_of_an_unknown_life_changes_nothing() -> None:
    (a,) = of("a")
    fleet, caller = started(a)
    fleet.add(request("r"))
    assert not fleet.lost(a, 7, Loss("a mistake", from_outside=False, isolated="r"))
    finish(fleet, caller, [request("r")])
    fleet.stop()
