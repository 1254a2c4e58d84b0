"""The states of requests: the server's, those of `infer top` and those of the page are one table.

`python tests/server/test_request_states.py` writes frames.json: frames of random steps, and the
states of the server's requests after each of them. Everybody who reads frames must find the same.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from infer.cli.engine_state import EngineState
from infer.engine.client.step_frames import (
    FollowedRequest,
    Frame,
    FrameBuilder,
    FrameWriter,
    RequestFacts,
    state_fields,
)
from infer.requests.event_fields import event_of, fields_of, kind_of
from infer.requests.state import RequestStates, Status
from infer.server.ui.page import FOLDER
from infer.types import FinishReason, StepOutput
from infer.types.step_events import (
    Admitted,
    ComputedChunk,
    Finished,
    FirstToken,
    Preempted,
    Queued,
    RecordedEvent,
    RequestEvent,
    Resumed,
    Speculated,
    StepEvents,
)

FILE = Path(__file__).with_name("frames.json")
NUM_SCENARIOS = 4
NUM_FRAMES = 14
EXAMPLES: tuple[RequestEvent, ...] = (
    Queued("a", 3, 2, ("b", "c")),
    Resumed("a", 1, 0, (), has_other_bits=True),
    Admitted("a", 16, 40, "batch-1"),
    ComputedChunk("a", 16, 24),
    Preempted("a", 40, "b"),
    Speculated("a", 9, 4),
    FirstToken("a", 16),
    Finished("a", "stop", 7),
)
STATUSES: tuple[Status, ...] = ("waiting", "running", "preempted")
HELLO = {"version": 2, "seats": 4, "gap_bounds_ms": [1, 10]}

# What follows the frames in a browser, without a browser.
SCRIPT = """
import { readFileSync } from "node:fs";
import { History } from "./history.js";
import { Keeper, played } from "./recording.js";
const states = ({ open }) => Object.fromEntries([...open].map(([name, bar]) => [name, bar.row()]));
const [hello, scenarios] = JSON.parse(readFileSync(0, "utf8"));
const live = scenarios.map(({ frames }) => {
  const history = new History(hello);
  return frames.map((frame) => { history.take(frame); return states(history); });
});
// A recording that begins in the middle: what was before it is told by its first frame.
const recorded = scenarios.map(({ frames }) => {
  const keeper = new Keeper(hello);
  frames.slice(0, -1).forEach((frame) => keeper.before.take(frame));
  keeper.take(frames.at(-1));
  return states(played(JSON.parse(JSON.stringify(keeper.recording()))));
});
console.log(JSON.stringify([live, recorded]));
"""


class Scenario:
    """Random steps of an engine, or of two, and what is known of their requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replicas = ["", "replica-1", "replica-2"][: 1 + 2 * (seed % 2)][-2:]
        self.states = RequestStates()
        self.requests: dict[str, FollowedRequest] = {}
        self.builder = FrameBuilder(self.requests.get, clock=lambda: self.now_s)
        self.writer = FrameWriter(0.0, lambda facts: facts.num_prompt % 2 == 0)
        self.now_s = 0.0
        self.number = 0
        self.num_requests = 0

    def event(self) -> RecordedEvent:
        """Any event of any request, whether or not an engine would tell it now."""
        r, names = self.random, list(self.requests)
        name, other = r.choice(names), r.choice([None, *names])
        events: list[RecordedEvent] = [
            Queued(name, r.randrange(3), 1, tuple(names[:2])),
            Resumed(name, r.randrange(3), 1),
            Admitted(name, r.randrange(20), 20 + r.randrange(20)),
            Admitted(name, 0, 20),
            ComputedChunk(name, r.randrange(20), 1 + r.randrange(20)),
            Preempted(name, r.randrange(40), other),
            Speculated(name, 9, r.randrange(9)),
        ]
        return r.choice(events)

    def step(self) -> None:
        r = self.random
        if not self.requests or r.random() < 0.3:
            self.num_requests += 1
            name, num_prompt = f"cmpl-{self.num_requests}", 1 + r.randrange(50)
            facts = RequestFacts(name, 0, "", num_prompt, 30, self.now_s)
            self.requests[name] = FollowedRequest(facts, self.states.add(name, num_prompt))
        self.number += 1
        events = tuple(self.event() for _ in range(r.randrange(4)))
        outputs = [
            StepOutput(name, 5, num_cached=r.randrange(5))
            for name in self.requests
            for _ in range(r.choice([0, 0, 1, 3]))
        ]
        if outputs and r.random() < 0.2:
            outputs[-1] = outputs[-1]._replace(finish_reason=FinishReason.LENGTH)
        begin_s, self.now_s = self.now_s, self.now_s + 0.01
        replica = r.choice(self.replicas)
        step = StepEvents(self.number, begin_s, self.now_s, 1, events, 9, 3, replica=replica)
        self.builder.stepped(self.states.stepped(outputs, step))
        if outputs and outputs[-1].finish_reason is not None:
            self.leave(outputs[-1].request_id, outputs[-1].finish_reason)
        if self.requests and r.random() < 0.05:
            self.leave(r.choice(list(self.requests)), None)

    def leave(self, name: str, reason: FinishReason | None) -> None:
        self.builder.left(name, reason)
        self.states.remove(name)
        del self.requests[name]

    def frames(self) -> list[dict[str, Any]]:
        r = self.random
        for _ in range(1 + r.randrange(4)):
            self.step()
        if r.random() < 0.15:
            self.states.restarted()
            self.builder.restarted()
        frames = self.builder.take()
        if r.random() < 0.2:
            frames[-1].requests = self.builder.requests
        return [self.writer.fields(frame, self.now_s) for frame in frames]

    def told(self) -> dict[str, Any]:
        """The states of the requests that frames have told of, by their numbers."""
        table = self.writer.fields(Frame(requests=self.builder.requests), self.now_s)["requests"]
        states = (state_fields(it.state) for it in self.builder.requests)
        return dict(zip(map(str, table.get("request", ())), states, strict=True))

    def whole(self) -> dict[str, Any]:
        frames: list[dict[str, Any]] = []
        after: list[dict[str, Any] | None] = []
        while len(frames) < NUM_FRAMES:
            several = self.frames()
            frames += several
            after += [None] * (len(several) - 1) + [self.told()]
        return {"frames": frames, "after": after}


def scenarios() -> list[dict[str, Any]]:
    return [Scenario(seed).whole() for seed in range(NUM_SCENARIOS)]


def written(found: list[dict[str, Any]]) -> str:
    lines = [
        json.dumps({"frame": frame, "after": after})
        for each in found
        for frame, after in zip(each["frames"], each["after"], strict=True)
    ]
    ends = [len(each["frames"]) for each in found]
    return "[\n" + ",\n".join([json.dumps(ends), *lines]) + "\n]\n"


def stored() -> list[dict[str, Any]]:
    ends, *lines = json.loads(FILE.read_text(encoding="utf-8"))
    found = []
    for count in ends:
        own, lines = lines[:count], lines[count:]
        columns = {"frames": [it["frame"] for it in own], "after": [it["after"] for it in own]}
        found.append(columns)
    return found


def check(found: list[list[dict[str, Any]]]) -> None:
    """Compare the states that somebody has found with those of the server."""
    for number, (each, states) in enumerate(zip(stored(), found, strict=True)):
        for index, (expected, own) in enumerate(zip(each["after"], states, strict=True)):
            if expected is not None:
                assert own == expected, (number, index, each["frames"][index])


def test_the_frames_are_those_of_this_server() -> None:
    assert FILE.read_text(encoding="utf-8") == written(scenarios()), (
        "frames or states have changed: run python tests/server/test_request_states.py"
    )
    events = [it for each in stored() for frame in each["frames"] for it in frame.get("events", [])]
    assert {it["event"] for it in events} == {kind_of(event) for event in EXAMPLES}
    assert {it["event"] for it in events if "duration" in it} == {"chunk"}
    assert {it["event"] for it in events if "since_received" in it} == {"first_token"}
    assert any("restarted" in frame for each in stored() for frame in each["frames"])
    assert any("requests" in frame for each in stored() for frame in each["frames"])


def test_infer_top_finds_the_same_states() -> None:
    found = []
    for each in stored():
        state, after = EngineState(), []
        for frame in each["frames"]:
            state.take("frame", frame)
            seen = {number: each.state for number, each in state.requests.items()}
            assert all(state.states.get(number) is own for number, own in seen.items())
            after.append({number: state_fields(own) for number, own in seen.items()})
        found.append(after)
    check(found)


def test_the_page_finds_the_same_states(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    for name in ("history.js", "recording.js", "states.js"):
        shutil.copy(FOLDER / "engine" / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "follow.js").write_text(SCRIPT, encoding="utf-8")
    given = json.dumps([HELLO, stored()])
    done = subprocess.run(
        [node, tmp_path / "follow.js"],
        input=given,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    live, recorded = json.loads(done.stdout)
    check(live)
    assert recorded == [each["after"][-1] for each in stored()]


def test_every_kind_is_told_and_read_again() -> None:
    assert {type(event) for event in EXAMPLES} == set(get_args(RequestEvent))
    docs = Path("docs/events.md").read_text(encoding="utf-8")
    for event in EXAMPLES:
        kind, fields = kind_of(event), fields_of(event, str.upper)
        row = next(line for line in docs.splitlines() if line.startswith(f"| `{kind}` |"))
        assert not [name for name in fields if f"`{name}`" not in row], row
        again = event_of("a", {"event": kind, **fields})
        assert again is not None
        unnamed = {"behind", "needed_by"}
        assert fields_of(again, str) == {n: [] if n in unnamed else v for n, v in fields.items()}
    assert event_of("a", {"event": "invented"}) is None
    with pytest.raises(TypeError):
        event_of("a", {"event": "admitted"})


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_states(seed: int) -> None:
    scenario = Scenario(seed)
    for _ in range(60):
        scenario.frames()
        states = [each.state for each in scenario.requests.values()]
        for status in STATUSES:
            own = [it.num_tokens for it in states if it.status == status]
            assert scenario.states.count(status) == len(own)
            assert scenario.states.num_tokens(status) == sum(own)
        waiting = {it.request_id for it in states if it.status == "waiting"}
        assert scenario.states.waiting().keys() == waiting


def test_who_waits_again_waits_behind_the_others() -> None:
    states = RequestStates()
    for name in "abc":
        states.add(name, 10)
    states.apply(Admitted("a", 0, 10), 1.0)
    states.apply(Resumed("a", 2, 0), 2.0)
    assert list(states.waiting()) == ["b", "c", "a"]
    states.remove("b")
    states.remove("b")
    assert states.num_tokens("waiting") == 20


def test_times_of_tokens() -> None:
    states = RequestStates()
    state = states.add("a", 10)
    outputs = [StepOutput("a", 1), StepOutput("a", 2), StepOutput("b", 3)]
    first = states.stepped(outputs, StepEvents(1, 1.0, 2.0, 1, (Admitted("a", 4, 10),)))
    assert first.tokens == [(state, 1, None), (state, 2, 2.0)]
    assert first.events[1:] == [(FirstToken("a"), 2.0)]
    second = states.stepped([StepOutput("a", 1)], StepEvents(2, 2.5, 4.0, 1))
    assert second.tokens == [(state, 3, 2.0)]
    assert (state.admitted_s, state.first_s, state.last_s) == (1.0, 2.0, 4.0)


if __name__ == "__main__":
    FILE.write_text(written(scenarios()), encoding="utf-8")
