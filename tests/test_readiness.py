"""Tests of waiting for files, with and without `poll`."""

from __future__ import annotations

import selectors
import socket
import time

import pytest

from infer import readiness
from infer.replicas.messages import Channel, Log


@pytest.fixture(params=["poll", "no poll"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no poll":
        monkeypatch.delattr(selectors, "PollSelector")
        monkeypatch.setattr(selectors, "DefaultSelector", selectors.SelectSelector)


def test_a_file_is_ready_once_something_is_there() -> None:
    near, far = socket.socketpair()
    with near, far:
        begun = time.monotonic()
        assert not readiness.is_ready(near, readiness.READABLE, 0.05)
        assert time.monotonic() - begun > 0.04
        assert readiness.is_ready(near, readiness.WRITABLE, 0)
        far.send(b"x")
        assert readiness.is_ready(near, readiness.READABLE, 60)


def test_a_channel_says_when_nothing_comes_and_when_it_is_closed() -> None:
    near, far = (Channel(end) for end in socket.socketpair())
    frames = near.frames(0.02)
    assert next(frames) is None
    far.send(Log("a", 1, "b" * 1_000))
    frame = next(frames)
    assert frame is not None
    assert b"b" * 1_000 in frame
    far.close()
    assert list(frames) == []
    near.close()
