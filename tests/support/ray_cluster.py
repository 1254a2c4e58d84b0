"""A Ray cluster of several nodes on this machine, in a program of its own; what kills its parts"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.server_process import ENV

ENGINE, STANDBY, ACTOR = "infer-engine", "infer-standby", "ray::EngineActor"
REPLICA, FRONT = "ray::ServeReplica:infer:Engine", "ray::ServeReplica:infer:Front"
RAYLET, GCS = "raylet/raylet", "gcs/gcs_server"
START_S = 240.0
"""Seconds that a cluster may take to start; other work may share its cores."""


@dataclass(frozen=True)
class Part:
    """A process of the cluster."""

    pid: int
    parent: int
    name: str
    """Name of an engine's process or of its standby, and the command of others."""


class RayCluster:
    """A running cluster.

    `ray_cluster` runs this file as a program: it starts a head without cores and nodes, serves the
    model that ships, and obeys lines on its stdin. Ray may end the program when its GCS dies, so
    the tests are another one. All processes are of one session, by which the tests find and end
    them.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port
        """Where Ray Serve answers HTTP."""

    def parts(self) -> dict[int, Part]:
        """All processes of the cluster that live."""
        return {part.pid: part for part in _of_session(self._process.pid)}

    def pids(self, name: str) -> list[int]:
        """Ids of the processes whose name begins with `name`, or that run that program."""
        return [
            part.pid
            for part in self.parts().values()
            if part.name.startswith(name) or part.name.split(" ")[0].endswith(name)
        ]

    def raylet_of(self, pid: int) -> int:
        """Id of the raylet of the node on which a process runs."""
        parts = self.parts()
        while not parts[pid].name.split(" ")[0].endswith(RAYLET):
            pid = parts[pid].parent
        return pid

    def nodes_of_engines(self) -> list[int]:
        """Ids of the raylets that have an engine and no front."""
        fronts = {self.raylet_of(pid) for pid in self.pids(FRONT)}
        return sorted({self.raylet_of(pid) for pid in self.pids(ENGINE)} - fronts)

    def ask(self, command: str) -> Any:
        """The answer of the program to a line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def add_node(self) -> None:
        """Start another node, in place of one that was killed."""
        self.ask("add")


def _of_session(session: int) -> Iterator[Part]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name in brackets may have spaces.
            name, _, rest = (
                (path / "stat").read_text(encoding="utf-8").partition(" (")[2].rpartition(") ")
            )
            state, parent, _, its_session, *_ = rest.split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if int(its_session) == session and state != "Z":
                is_ours = name in (ENGINE, STANDBY)
                yield Part(int(path.name), int(parent), name if is_ours else command)


@contextlib.contextmanager
def ray_cluster(
    log: Path,
    arguments: Mapping[str, str],
    *,
    port: int,
    cores: Sequence[int] = (1, 1, 1),
    labels: Sequence[Mapping[str, str]] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[RayCluster]:
    """Serve with `arguments` on a head and nodes with so many cores each; ends all of it.
    `labels`: of the nodes; default: none."""
    nodes = list(zip(cores, labels or [{}] * len(cores), strict=True))
    settings = {"arguments": dict(arguments), "port": port, "nodes": nodes}
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, json.dumps(settings)],
            env={**ENV, "RAY_USAGE_STATS_ENABLED": "0", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            encoding="utf-8",
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "serving\n", log.read_text(encoding="utf-8")[
                    -5000:
                ]
                yield RayCluster(process, port)
            finally:
                ends_s = time.monotonic() + 20
                while left := list(_of_session(process.pid)):
                    assert time.monotonic() < ends_s, f"they do not end: {left}"
                    for part in left:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(part.pid, signal.SIGKILL)
                    time.sleep(0.1)


def main(settings: Mapping[str, Any]) -> None:
    """Start and serve, then obey; Ray's own output goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        _obey(settings, answers)


def _obey(settings: Mapping[str, Any], answers: Any) -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    import infer.cluster
    from infer.errors import ConfigError

    def say(line: str) -> None:
        answers.write(line + "\n")
        answers.flush()

    store = 80 << 20
    head = {"num_cpus": 0, "object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    labels = {}
    for count, each in settings["nodes"]:
        node = cluster.add_node(num_cpus=count, object_store_memory=store, labels=each)
        labels[node.all_processes["raylet"][0].process.pid] = each
    ray.init(address=cluster.address)
    serve.start(http_options={"port": settings["port"], "location": "HeadOnly"})
    serve.run(infer.cluster.app(settings["arguments"]), name="infer", route_prefix="/")
    threading.Thread(target=_reap, args=(cluster,), daemon=True).start()
    say("serving")
    for line in sys.stdin:
        command, _, arguments = line.strip().partition(" ")
        match command:
            case "refused":
                try:
                    infer.cluster.app(json.loads(arguments))
                except ConfigError as error:
                    say(json.dumps(str(error)))
                else:
                    say('"not refused"')
            case "add":
                cluster.add_node(num_cpus=1, object_store_memory=store)
                say("{}")
            case "labels":
                say(json.dumps(labels))
            case "states":
                engines = serve.status().applications["infer"].deployments["Engine"]
                say(json.dumps({str(each): n for each, n in engines.replica_states.items()}))


def _reap(cluster: Any) -> None:
    """Take note of processes that have ended, as a machine's init does: Ray's workers end with
    their raylet, which lives for them as long as it is a zombie."""
    while True:
        time.sleep(0.1)
        for node in list(cluster.list_all_nodes()):
            for started in list(node.all_processes.values()):
                for each in list(started):
                    each.process.poll()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
