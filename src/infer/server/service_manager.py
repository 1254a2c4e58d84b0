"""`ServiceManager`: says to systemd, or to whoever started the server so, what the server does"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping


class ServiceManager:
    """The protocol is that of `sd_notify`: a datagram to the Unix socket in `NOTIFY_SOCKET`. With
    `WATCHDOG_USEC` a sign of life is sent twice in that time, by the event loop, so one that hangs
    is ended and started again. Without these variables nothing is sent."""

    def __init__(
        self,
        variables: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = variables.get("NOTIFY_SOCKET", "")
        self._clock = clock
        self._beat_s = 0.0
        """Seconds between two signs of life; 0: none are wanted."""
        self._next_s = 0.0
        is_ours = variables.get("WATCHDOG_PID") in (None, "", str(os.getpid()))
        if is_ours and variables.get("WATCHDOG_USEC", "").isdecimal():
            self._beat_s = int(variables["WATCHDOG_USEC"]) / 2e6

    def say(self, *lines: str) -> None:
        """Send lines such as `READY=1`; one that cannot be sent is lost."""
        if not self._address or not hasattr(socket, "AF_UNIX"):
            return
        address = self._address
        if address.startswith("@"):  # an abstract socket
            address = f"\0{address[1:]}"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), address)

    def ready(self, status: str) -> None:
        """Requests are served; `status` is for people."""
        self.say("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Files are read again; `ready` ends it."""
        self.say(
            "RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"
        )

    def stopping(self) -> None:
        """The server ends."""
        self.say("STOPPING=1", "STATUS=running requests may finish")

    def tick(self) -> None:
        """Called several times a second by the event loop."""
        if self._beat_s and self._clock() >= self._next_s:
            self._next_s = self._clock() + self._beat_s
            self.say("WATCHDOG=1")
