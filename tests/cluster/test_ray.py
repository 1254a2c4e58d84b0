"""The cluster on a real Ray: `pytest -m cluster` in the environment that has it.

It starts Ray on this machine with two cores and the model that ships. A stream goes on with the
same tokens when its engine's process, its actor or its replica is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="pip install 'infer[cluster]'")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("default"),  # Ray and what it brings have warnings of their own
]
PORT = 8123
STORY = {"model": "infer-demo", "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from ray import serve

    import infer.cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=150 << 20)
    app = infer.cluster.app({"replicas": "2", "insecure": "true"})
    serve.start(http_options={"port": PORT})
    serve.run(app, name="infer", route_prefix="/")
    yield
    serve.shutdown()
    ray.shutdown()


def post(body: dict[str, Any]) -> Any:
    url, head = f"http://127.0.0.1:{PORT}/v1/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    return urllib.request.urlopen(request, timeout=60)


def streamed(
    body: dict[str, Any], at_chunk: int = 0, act: Callable[[], None] = lambda: None
) -> str:
    """The text of a stream; `act` is called once so many chunks have come."""
    text, count = "", 0
    for line in post({**body, "stream": True}):
        if not line.startswith(b"data: {"):
            continue
        fields = json.loads(line[6:])
        assert "error" not in fields, fields
        text += "".join(choice.get("text") or "" for choice in fields["choices"])
        count += 1
        if count == at_chunk:
            act()
    return text


def kill_one(part_of_command: str) -> None:
    """SIGKILL for a process of this cluster whose command contains something."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True)
    parents: dict[int, int] = {}
    found = []
    for line in listed.stdout.splitlines()[1:]:
        number, parent, command = line.split(maxsplit=2)
        parents[int(number)] = int(parent)
        if part_of_command in command:
            found.append(int(number))
    for pid in found:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():  # not another program's
            os.kill(pid, signal.SIGKILL)
            return
    pytest.fail(f"no process of this cluster is {part_of_command}")


@pytest.mark.parametrize(
    "part", ["", "infer.engine.process.child", "ray::EngineActor", "ray::ServeReplica:infer:Engine"]
)
def test_a_stream_goes_on_whatever_is_killed(cluster: None, part: str) -> None:
    with post(STORY) as answer:
        wanted = json.load(answer)["choices"][0]["text"]
    assert streamed(STORY, 20, lambda: kill_one(part) if part else None) == wanted
    time.sleep(15)  # until there are two engines again
