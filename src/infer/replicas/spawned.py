"""`Spawned`: an engine process without orders; `EarlyProcess`: one for the first engine"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType

FACTORY = "infer.engine.build.assemble:prepare_process"
"""`module:function` that makes the blueprint of an engine in its process."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command of a process that runs a module. With `module_environment`, it finds modules
    where this process finds them, and nowhere else: not in the folder where the server was started,
    which may be a stranger's checkpoint."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The environment of such a process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def start_module(
    module: str, *arguments: str, pass_fds: Sequence[int], stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that runs a module, as `module_command` says. It has the descriptors
    `pass_fds`, and nothing to read."""
    return subprocess.Popen(
        module_command(module, *arguments),
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        env=module_environment(),
    )


class Spawned:
    """Importing torch is most of the time until an engine is ready. So `infer serve` starts the
    process of its first engine before it imports the server, and both import at the same time.
    Standard library only, so that nothing has to be imported before. It belongs to the `EngineRun`
    that is made of it."""

    def __init__(self, imports: str = "") -> None:
        """`imports`: module that the process imports before it reads its first message."""
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115  closed by its owner
        """Where the process writes its stacks."""
        self.end_here, theirs = socket.socketpair()
        """This side of the connection."""
        with theirs:
            numbers = (theirs.fileno(), os.getpid(), self.stacks.fileno())
            self.popen = start_module(
                "infer.replicas.child",
                *(*map(str, numbers), imports),
                pass_fds=[theirs.fileno(), self.stacks.fileno()],
                stderr=subprocess.PIPE,
            )

    def end(self) -> None:
        """End a process that no `EngineRun` has been made of."""
        self.popen.kill()
        self.popen.communicate()
        self.end_here.close()
        self.stacks.close()


class EarlyProcess:
    """The process of the first engine; ended with the block if nobody has taken it.

    The system ends a process with the thread that has started it, so that thread must live as long
    as the engine.
    """

    def __init__(self, factory: str = FACTORY) -> None:
        """`factory`: of the engine; the process imports its module."""
        self._lock = threading.Lock()
        self._spawned: Spawned | None = Spawned(factory.partition(":")[0])

    def take(self) -> Spawned | None:
        """The process; None if it was taken before. It belongs to the caller."""
        with self._lock:
            spawned, self._spawned = self._spawned, None
            return spawned

    def __enter__(self) -> EarlyProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (spawned := self.take()) is not None:
            spawned.end()
