"""`Reload`: what a running server reads again at HUP, or when a file has changed"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from infer.errors import InferError
from infer.server.certificate import Certificate
from infer.server.observe.logs import set_log_level
from infer.server.settings import ServerSettings

log = logging.getLogger("infer.server")

ReadAgain = Callable[[ServerSettings], tuple[ServerSettings, list[str]]]
"""From the settings as they are: those that hold from now on, and the names of others that have
changed and need a restart."""


class Reload:
    """What is read again is the certificate, the settings that are live (`Setting.is_live`), and
    the file of keys, which is looked at with each request anyway. What cannot be used is said in
    the log, and what was there before stays. Files are read in a thread. Lives on the event loop.
    """

    def __init__(
        self,
        settings: ServerSettings,
        certificate: Certificate,
        apply: Callable[[ServerSettings], None],
        read_again: ReadAgain | None = None,
    ) -> None:
        """`apply`: hands settings to the parts that obey them."""
        self.settings = settings
        """As they are now."""
        self._certificate = certificate
        self._apply = apply
        self._read_again = read_again
        self._task: asyncio.Task[None] | None = None

    def context(self) -> ssl.SSLContext:
        """What a new connection has for TLS."""
        assert self._certificate.context is not None
        return self._certificate.context

    def refresh(self) -> None:
        """Read the certificate again if its files have changed."""
        if self._certificate.context is not None:
            self._start(False)

    def begin(self) -> asyncio.Task[None]:
        """Read everything again; returns what is done when that is."""
        return self._start(True)

    def _start(self, everything: bool) -> asyncio.Task[None]:
        if self._task is None or self._task.done() or everything:
            self._task = asyncio.ensure_future(self._run(self._task, everything))
        return self._task

    async def _run(self, before: asyncio.Task[None] | None, everything: bool) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        await asyncio.to_thread(self._certificate.refresh, always=everything)
        if not everything:
            return
        if self._read_again is None:
            log.info("the settings have no file; they stay")
            return
        try:
            settings, others = await asyncio.to_thread(self._read_again, self.settings)
        except InferError as error:
            log.error("the settings stay as they were: %s", error)
            return
        self.settings = settings
        set_log_level(settings.log_level)
        self._apply(settings)
        more = f"; only a restart changes {', '.join(others)}" if others else ""
        log.info("the settings were read again%s", more)
