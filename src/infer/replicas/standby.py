"""`Standby`: a process that has imported what an engine needs, and becomes the next engine"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from infer.engine.build.server_memory import STANDBY_ABOVE
from infer.main_memory import available_bytes
from infer.replicas.engine_run import EngineRun
from infer.replicas.messages import Prepare
from infer.threads import BackgroundThread

log = logging.getLogger(__name__)

ENDS_BELOW = 1 << 30
"""Bytes of available main memory; see `Standby`."""
WATCH_S = 1.0
"""Interval in seconds at which the standby and the available memory are looked at."""
RETRY_S = 60.0
"""Seconds until the next standby after one that has ended without having been taken."""


class Standby:
    """Importing is most of the time that a restart takes. One standby serves all engines of a
    server, as it learns with `Begin` which engine it is to be. The first one is started after the
    first engine is ready, and another one after each that was taken. It is an addition only: where
    it is absent, has died or does not answer, an engine gets a new process. It is absent while less
    than `STANDBY_ABOVE` bytes of main memory are available, and ended when less than `ENDS_BELOW`
    are."""

    def __init__(
        self,
        factory: str,
        *,
        available: Callable[[], int] = available_bytes,
        watch_s: float = WATCH_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """`factory`: `module:function` of the engines; its module is imported. `available`: bytes
        of main memory that are available."""
        self._factory = factory
        self._watch_s, self._retry_s = watch_s, retry_s
        self._available = available
        self._changed = threading.Condition()
        self._engine_run: EngineRun | None = None
        self._is_wanted = False
        self._is_stopping = False
        self._not_before_s = 0.0
        # The system ends a process with the thread that has started it. So this thread starts them
        # all, and it lives as long as the engines that were taken.
        self._thread = BackgroundThread(self._run, self._end, "infer-standby")
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the standby, if there is one."""
        with self._changed:
            return None if self._engine_run is None else self._engine_run.pid

    def want(self) -> None:
        """Have a standby from now on. Called when an engine is ready, so that the standby takes no
        time from its start."""
        with self._changed:
            self._is_wanted = True
            self._changed.notify_all()

    def take(self) -> EngineRun | None:
        """The standby, if there is one; it belongs to the caller. There is none until `want`. One
        that still imports is none yet: beside busy cores a new process is ready before it."""
        with self._changed:
            if self._engine_run is None or not self._engine_run.stands_by:
                return None
            return self._give()

    def _give(self) -> EngineRun | None:
        engine_run, self._engine_run = self._engine_run, None
        self._is_wanted = False
        return engine_run

    def stop(self) -> None:
        """End the standby and the thread; called after the end of all engines."""
        self._thread.stop()

    def _end(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._is_stopping:
                        return
                    ended = self._look()
                    if ended is None:
                        self._changed.wait(self._watch_s if self._is_wanted else None)
                if ended is not None:
                    _kill(ended)
        finally:
            with self._changed:
                engine_run = self._give()
            if engine_run is not None:
                _kill(engine_run)

    def _look(self) -> EngineRun | None:
        """Start a standby, or give up the present one, as it and the memory are now; returns the
        one that is given up."""
        engine_run = self._engine_run
        if engine_run is None:
            is_due = self._is_wanted and time.monotonic() >= self._not_before_s
            if is_due and self._available() >= STANDBY_ABOVE:
                self._start()
            return None
        lacks_memory = self._available() < ENDS_BELOW
        if not (lacks_memory or engine_run.has_ended):
            return None
        why = "main memory is scarce" if lacks_memory else "its process has died"
        log.info("there is no standby for now (%s); a restart would take longer", why)
        self._engine_run = None
        self._not_before_s = time.monotonic() + self._retry_s
        return engine_run

    def _start(self) -> None:
        try:
            self._engine_run = EngineRun(Prepare(self._factory))
        except OSError as error:
            log.warning("a standby cannot be started: %s", error)
            self._not_before_s = time.monotonic() + self._retry_s


def _kill(engine_run: EngineRun) -> None:
    engine_run.kill()
    engine_run.reap()
