"""The image of `deploy/Dockerfile`, built by podman and run as `deploy/compose.yaml` runs it.

`pytest -m peer tests/test_image.py`. `INFER_IMAGE=NAME` names an image that is built already, for
building takes ten minutes on two cores. Without podman, or where it cannot run the base image, all
is skipped with the reason.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.test_rolls import free_port
from tests.support.containers import log_of, must_run, podman
from tests.support.waits import until

yaml = pytest.importorskip("yaml")
pytestmark = [pytest.mark.peer, pytest.mark.timeout(3000)]
ROOT = Path(__file__).parents[1]
BASE = "docker.io/library/python:3.12-slim-bookworm"
MOST_BYTES = 1_500_000_000
Serve = Callable[..., "AbstractContextManager[Container]"]


@pytest.fixture(scope="module")
def image() -> str:
    must_run(os.environ.get("INFER_IMAGE", BASE))
    if built := os.environ.get("INFER_IMAGE"):
        return built
    index = os.environ.get("TORCH_INDEX", "")
    options = ("--format", "docker", "--build-arg", f"TORCH_INDEX={index}", "--tag", "infer-test")
    podman("build", *options, "--file", ROOT / "deploy/Dockerfile", ROOT)
    return "infer-test"


def hardening() -> list[str]:
    """What compose.yaml takes from the container, as options of podman."""
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))
    service = service["services"]["infer"]
    assert service["read_only"]
    options = ["--read-only", "--read-only-tmpfs=false"]
    options += [f"--tmpfs={each}" for each in service["tmpfs"]]
    options += [f"--cap-drop={each}" for each in service["cap_drop"]]
    options += [f"--security-opt={each.removesuffix(':true')}" for each in service["security_opt"]]
    return options


@pytest.fixture(scope="module")
def secret(image: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file of keys that the container's user may read, and its key, as compose.yaml says."""
    file = tmp_path_factory.mktemp("secrets") / "keys.json"
    command = [sys.executable, "-m", "infer", "keys", "create", "open-webui", "--file", str(file)]
    made = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    key = made.stdout.strip()
    mount = f"--volume={file.parent}:/secrets"
    podman(
        "run", "--rm", "--user=0", mount, "--entrypoint=chown", image, 10001, "/secrets/keys.json"
    )
    return file, key


@pytest.fixture
def serve(image: str, secret: tuple[Path, str]) -> Serve:
    """Starts a container of the image; `command` is serve, with the keys, if none is given."""
    file, key = secret

    @contextmanager
    def started(*options: str, command: Sequence[str] = SERVE) -> Iterator[Container]:
        port = free_port()
        options = (*hardening(), f"--volume={file}:/run/secrets/keys:ro", *options)
        publish = f"--publish=127.0.0.1:{port}:8000"
        name = podman("run", "--detach", publish, *options, image, *command).strip()
        try:
            yield Container(name, port, key)
        finally:
            podman("rm", "--force", "--time=0", name)

    return started


class Container:
    """A container that serves the shipped model."""

    def __init__(self, name: str, port: int, key: str) -> None:
        self.name, self.port = name, port
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON; 0 while nothing answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, content, self.headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def wait(self) -> None:
        until(lambda: self.ask("/health/ready")[0] == 200, 180)

    def inside(self, *command: str) -> str:
        return podman("exec", self.name, *command)

    def log(self) -> str:
        return log_of(self.name)


SERVE = ("serve", "--api-keys", "/run/secrets/keys")
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}


def test_it_is_small_and_holds_no_compiler(image: str) -> None:
    assert int(podman("image", "inspect", "--format", "{{.Size}}", image)) <= MOST_BYTES
    script = "id -u; command -v gcc cc g++ make; find / -xdev -perm -4000 -user root -path '/opt/*'"
    found = podman("run", "--rm", "--entrypoint=sh", image, "-c", script + "; true")
    assert found.split() == ["10001"]


def test_it_serves_with_a_root_that_is_read_only(serve: Serve) -> None:
    with serve("--health-cmd=none") as server:
        server.wait()
        status, answer = server.ask("/v1/chat/completions", CHAT)
        assert status == 200
        assert answer["choices"][0]["message"]["content"]
        written = "find / -xdev -newer /proc/1/cmdline -type f -not -path '/proc/*'; true"
        assert server.inside("sh", "-c", written).split() == []
        state = server.inside("sh", "-c", "find /var/lib/infer/state -type f")
        assert "/infer/" in state, state
        lines = server.log().splitlines()
    levels = {json.loads(each)["level"] for each in lines if not each.startswith("infer serves ")}
    assert levels <= {"info", "warning"}, lines


def test_its_health_is_what_the_image_says(serve: Serve) -> None:
    """The command of HEALTHCHECK, as the container's engine runs it."""
    with serve() as server:
        server.wait()
        podman("healthcheck", "run", server.name)
        server.inside("python", "-c", "import os, signal; os.kill(1, signal.SIGSTOP)")
        assert podman("healthcheck", "run", server.name, fails=True) is not None
        server.inside("python", "-c", "import os, signal; os.kill(1, signal.SIGCONT)")


def test_variables_and_the_command_change_settings(serve: Serve) -> None:
    with serve("--env=INFER_MAX_BATCH_SIZE=3", command=("config", "show")) as shown:
        podman("wait", shown.name)
        line = next(each for each in shown.log().splitlines() if "max_batch_size" in each)
        assert "3" in line.split()
        assert "INFER_MAX_BATCH_SIZE" in line
        assert "/etc/infer/infer.toml" in shown.log()


def test_a_limit_of_memory_is_what_the_plan_counts(serve: Serve) -> None:
    with serve("--memory=2g") as server:
        server.wait()
        assert server.ask("/v1/chat/completions", CHAT)[0] == 200
        limit = server.inside("infer", "doctor")
    assert "the container's limit is 2.00 GiB" in " ".join(limit.split()), limit


def test_state_outlives_the_container_and_a_stop_loses_no_stream(serve: Serve) -> None:
    volume = podman("volume", "create").strip()
    options = (f"--volume={volume}:/var/lib/infer/state",)
    try:
        with serve(*options) as server:
            server.wait()
            body = {"input": "Remember the red fox.", "max_output_tokens": 8, "store": True}
            status, first = server.ask("/v1/responses", body)
            assert status == 200
            with stream(server, 400) as lines:
                next(lines)
                stopping = subprocess.Popen(["podman", "stop", "--time=60", server.name])
                ended = list(lines)
            assert ended[-1] == b"data: [DONE]"
            assert stopping.wait(90) == 0
            assert podman("wait", server.name).strip() == "0", server.log()[-2000:]
        with serve(*options) as server:
            server.wait()
            status, answer = server.ask(f"/v1/responses/{first['id']}")
            assert status == 200
            assert answer["output"] == first["output"]
    finally:
        podman("volume", "rm", "--force", volume)


@contextmanager
def stream(server: Container, num_tokens: int) -> Iterator[Iterator[bytes]]:
    """The lines of a stream that are not empty."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = CHAT | {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), server.headers)
    answer = connection.getresponse()
    try:
        yield (line.strip() for line in answer if line.strip())
    finally:
        connection.close()


def test_what_cannot_be_used_is_said_in_one_line(serve: Serve, tmp_path: Path) -> None:
    """A file of keys and a folder of states of another user."""
    keys = tmp_path / "keys.json"
    keys.touch(mode=0o600)
    with serve(f"--volume={keys}:/keys:ro", command=("serve", "--api-keys", "/keys")) as server:
        assert podman("wait", server.name).strip() == "2"
        last = server.log().splitlines()[-1]
    assert last.startswith("infer: api_keys: keys cannot be read (Permission denied)"), last
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    with serve(f"--volume={folder}:/var/lib/infer/state") as server:
        server.wait()
        assert server.ask("/v1/chat/completions", CHAT)[0] == 200
        assert "Traceback" not in server.log()
