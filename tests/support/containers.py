"""Containers of podman: those of our image, and one with systemd that stands for a machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEBIAN = "docker.io/library/debian:bookworm"
MACHINE = f"""
FROM {DEBIAN}
RUN apt-get update && apt-get install -y --no-install-recommends \
    ca-certificates curl dbus git procps systemd systemd-sysv && rm -rf /var/lib/apt/lists/*
CMD ["/sbin/init"]
"""


def podman(*command: object, fails: bool = False, input: str | None = None) -> str:
    """What podman prints; what it says of a failure where one may be."""
    done = subprocess.run(
        ["podman", *map(str, command)],
        input=input,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert fails or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr if fails else done.stdout


def log_of(name: str) -> str:
    """What the container has written, both streams."""
    done = subprocess.run(
        ["podman", "logs", name], capture_output=True, text=True, encoding="utf-8"
    )
    return done.stdout + done.stderr


def must_run(image: str) -> None:
    """Skip the test where podman cannot run this image, with the reason."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    reason = podman("run", "--rm", "--entrypoint=true", image, fails=True)
    if "Error" in reason:
        pytest.skip(f"podman does not run {image} here: {reason.strip()[-200:]}")


class Machine:
    """A Debian with systemd, without anything that we need."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, command: str, folder: str = "/root") -> str:
        """What a shell prints, as root."""
        return podman("exec", "--workdir", folder, self.name, "bash", "-c", command)

    def put(self, source: Path, target: str) -> None:
        podman("cp", source, f"{self.name}:{target}")

    def property(self, unit: str, name: str) -> str:
        """What systemd knows of a unit."""
        return self.run(f"systemctl show -p {name} --value {unit}").strip()


@contextmanager
def machine(*options: str) -> Iterator[Machine]:
    """A machine whose systemd has started; skips the test where there can be none."""
    must_run(DEBIAN)
    podman("build", "--tag", "infer-machine", "-", input=MACHINE)
    start = ("run", "--detach", "--systemd=always", "--privileged", *options, "infer-machine")
    name = podman(*start).strip()
    try:
        waits = ("exec", name, "systemctl", "is-system-running", "--wait")
        if state := podman(*waits, fails=True).strip():
            pytest.skip(f"systemd does not run in a container here: {state[-200:]}")
        yield Machine(name)
    finally:
        podman("rm", "--force", "--time=5", name)
