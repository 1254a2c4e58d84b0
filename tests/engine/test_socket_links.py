"""Links over sockets: two fronts use the engine that one process has."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from infer.replicas.fleet import Fleet
from infer.replicas.host import ReplicaHost
from infer.replicas.link_transport import LinkTransport
from infer.replicas.messages import FrameBuffer, Heartbeat, decode_inward, frame_of
from infer.replicas.replica import Replica
from infer.replicas.socket_link import SocketLink, serve_link
from infer.types import Request, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import process_id, start_hash_engines
from tests.support.fleet_replicas import Caller
from tests.support.hash_engine import solo
from tests.support.waits import until


class SharedEngine:
    """An engine's process, and two fronts that have a socket each to its host."""

    def __init__(self) -> None:
        (self.replica,) = start_hash_engines(step_s=0.001).replicas
        self.host = ReplicaHost(self.replica)
        self.replica.start(self.host)
        pairs = [socket.socketpair() for _ in range(2)]
        self.near = [near for near, _ in pairs]
        self._far = [far for _, far in pairs]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        self.callers = [Caller(), Caller()]
        self.fleets = [self._fleet(*each) for each in zip(self.near, self.callers, strict=True)]
        until(lambda: all(fleet.is_ready for fleet in self.fleets))

    def _fleet(self, sock: socket.socket, caller: Caller) -> Fleet:
        transport = LinkTransport(SocketLink(sock), "engine")
        fleet = Fleet([Replica("engine", self.replica.limits, transport)])
        fleet.start(caller.deliver, caller.died)
        return fleet

    async def _serve(self) -> None:
        for sock in self._far:
            sock.setblocking(False)
        links = [
            asyncio.create_task(serve_link(self.host, f"front-{i}", sock))
            for i, sock in enumerate(self._far)
        ]
        while not self._stop.is_set():
            await asyncio.sleep(0.05)
            self.host.heartbeat()
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    def stop(self) -> None:
        for fleet in self.fleets:
            fleet.stop()
        self._stop.set()
        self._thread.join()
        self.replica.stop()
        for sock in (*self.near, *self._far):
            sock.close()


@pytest.fixture
def shared() -> Iterator[SharedEngine]:
    engine = SharedEngine()
    yield engine
    engine.stop()


def request(name: str, dice: random.Random) -> Request:
    prompt = tuple(dice.randrange(50) for _ in range(dice.randrange(1, 60)))
    sampling = SamplingParams(temperature=dice.choice([0.0, 1.0]))
    return Request(name, prompt, sampling, dice.randrange(100), 60)


@pytest.mark.parametrize("fault", ["none", "dropped", "killed", "closed"])
def test_no_token_is_lost_or_changed(shared: SharedEngine, fault: str) -> None:
    dice = random.Random(fault)
    sent = [(i % 2, request(f"r{i}", dice)) for i in range(16)]
    for front, wanted in sent:
        shared.fleets[front].add(wanted)
    until(lambda: all(caller.tokens for caller in shared.callers))
    if fault == "dropped":  # what a full queue does: the next link begins on the same socket
        shared.host.detach("front-0")
    elif fault == "killed":
        pid = process_id(shared.replica)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    elif fault == "closed":
        shared.near[0].shutdown(socket.SHUT_RDWR)
        sent = [(front, wanted) for front, wanted in sent if front == 1]
    until(lambda: all(r.request_id in shared.callers[front].ends for front, r in sent))
    for front, wanted in sent:
        caller = shared.callers[front]
        assert caller.ends[wanted.request_id].error is None
        assert caller.tokens[wanted.request_id] == solo(wanted, VOCAB_SIZE)
    until(lambda: not shared.host.num_unfinished)  # what the closed one had is dropped


def test_only_whole_frames_are_handed_on() -> None:
    frames = b"".join(frame_of(Heartbeat()) for _ in range(3))
    for cut in range(len(frames) + 1):
        buffer = FrameBuffer(frames[:cut])
        first = buffer.whole()
        buffer.add(frames[cut:])
        assert first + buffer.whole() == frames
        assert len([decode_inward(each) for each in FrameBuffer(first).frames()]) == cut // (
            len(frames) // 3
        )
