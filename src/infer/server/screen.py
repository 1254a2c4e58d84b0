"""`Screen`: what a server tells the person who has started it"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes long to import, and the spinner begins before
    from infer.engine.client.async_llm import AsyncLLM

log = logging.getLogger("infer.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server serves, at the moment when it begins to."""

    names: str
    """Of all models, separated by commas."""
    engines: Sequence[AsyncLLM]
    """Those that are loaded."""
    url: str
    has_page: bool
    """Whether browsers get a page at `url`."""


class Screen:
    """Without a terminal there is only the line on stdout that says where the server is. Programs
    that start a server read it, so its form stays as it is. The command line has a screen for
    terminals. This one shows the line on stdout, and nothing else."""

    def serving(self, line: str, served: Served) -> None:
        """The server takes requests; `line` says so."""
        announce(line)

    def ending(self, num_open: int, timeout_s: float) -> None:
        """The server ends after its `num_open` requests, or after `timeout_s` seconds."""


def announce(text: str) -> None:
    """Print to stdout, or log where stdout cannot be written."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:  # a name that the locale has no letters for
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)
    except (OSError, ValueError) as error:  # it is full, or closed
        log.info("%s", text)
        log.warning("stdout cannot be written (%s)", error)
        # At its end the interpreter would try to write the rest of the buffer, and fail.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def leave_closed_streams() -> None:
    """Let go of stdout and stderr where they cannot be written, as after a terminal was closed. The
    interpreter flushes both at its end, and exits with 120 if it cannot."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
