"""`main`: where the `infer` command begins; a server's engine process is started before all imports

Importing torch is most of the time until an engine is ready, and takes its time beside what the
command itself imports. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from infer.replicas.spawned import EarlyProcess
from infer.signals import ended_by_signals, open_standard_streams

WITHOUT_PROCESS = ("--help", "--help-all", "--engine-thread", "--load-on-first-use")
"""Options of `infer serve` with which no engine process is started at once."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the `infer` script. `arguments`: default: those of this process."""
    open_standard_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not starts_engine(given):
        _run(given, None)
        return
    with ended_by_signals(), EarlyProcess() as early:
        _run(given, early)


def starts_engine(arguments: Sequence[str]) -> bool:
    """Whether a command line is that of a server which needs an engine at once."""
    is_server = arguments[:1] == ["serve"] and sys.platform != "win32"
    return is_server and not set(WITHOUT_PROCESS) & set(arguments)


def _run(arguments: list[str], early: EarlyProcess | None) -> None:
    from infer.cli.main import main as run

    run(arguments, early)
