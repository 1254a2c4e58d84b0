"""Machines of several NUMA nodes or sockets, emulated by QEMU, over this machine's files.

The kernel comes from `INFER_LINUX`, a folder into which a Debian package `linux-image-*-amd64` is
unpacked (`apt-get download`, `dpkg-deb -x`). This machine's files are there read-only; `/run` is
memory. Instructions are emulated, so everything takes some thirty times as long: what is seen is
where threads and memory are, and that bits do not change.
"""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server_process import ROOT

LINUX = "INFER_LINUX"
MODULES = (
    "drivers/virtio/virtio_ring", "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_legacy_dev", "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci", "fs/netfs/netfs", "fs/fscache/fscache", "net/9p/9pnet",
    "net/9p/9pnet_virtio", "fs/9p/9p",
)  # fmt: skip
"""In the order in which they need each other."""
FIRST = """#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc p /proc; $B mount -t sysfs s /sys; $B mount -t devtmpfs d /dev
for module in {modules}; do $B insmod /$module.ko; done
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro host /host
$B mount -t proc p /host/proc; $B mount -t sysfs s /host/sys; $B mount -t devtmpfs d /host/dev
$B mount -t tmpfs t /host/run; $B mkdir -p /host/dev/shm; $B mount -t tmpfs t /host/dev/shm
$B ifconfig lo 127.0.0.1 up
echo BEGINS
$B chroot /host /bin/sh -c "$($B cat /command)" 2>&1
echo "ENDED $?"
$B poweroff -f
"""
"""What the first process does: it runs a command in this machine's files."""


@dataclass(frozen=True)
class Machine:
    """Its sockets, each of some NUMA nodes of some cores."""

    sockets: int
    nodes: int
    cores: int

    def options(self, node_mib: int) -> list[str]:
        """For QEMU."""
        nodes, found = self.sockets * self.nodes, []
        total = nodes * self.cores
        of_socket = total // self.sockets
        found += ["-m", str(node_mib * nodes)]
        found += ["-smp", f"{total},sockets={self.sockets},cores={of_socket},threads=1"]
        for node in range(nodes):
            cpus = f"{node * self.cores}-{(node + 1) * self.cores - 1}"
            found += ["-object", f"memory-backend-ram,id=m{node},size={node_mib}M"]
            found += ["-numa", f"node,nodeid={node},memdev=m{node},cpus={cpus}"]
        return found


def linux() -> Path:
    """The folder of the kernel's package; skips the test where something is missing."""
    for program in ("qemu-system-x86_64", "busybox"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if LINUX not in os.environ:
        pytest.skip(f"{LINUX} names no unpacked linux-image package")
    return Path(os.environ[LINUX])


def first_files(folder: Path, kernel: Path, command: Sequence[str]) -> Path:
    """The archive of files that the kernel begins with (initramfs), made in `folder`."""
    tree = folder / "first"
    for name in ("bin", "proc", "sys", "dev", "host"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tree / "bin/busybox")
    [modules] = (kernel / "lib/modules").iterdir()
    for name in MODULES:
        shutil.copy(modules / f"kernel/{name}.ko", tree)
    (tree / "command").write_text(shlex.join(command), encoding="utf-8")
    modules_in_order = " ".join(Path(each).name for each in MODULES)
    (tree / "init").write_text(FIRST.format(modules=modules_in_order), encoding="utf-8")
    (tree / "init").chmod(0o755)
    packed = subprocess.run(
        ["sh", "-c", "busybox find . | busybox cpio -o -H newc"],
        cwd=tree, check=True, capture_output=True,
    ).stdout  # fmt: skip
    archive = folder / "first.gz"
    archive.write_bytes(gzip.compress(packed))
    return archive


def run_in(machine: Machine, folder: Path, command: Sequence[str], node_mib: int = 2048) -> str:
    """What a command prints there, with this interpreter's package; it must exit with 0.

    Variables of this process are not there; `command` can begin with `env`."""
    kernel = linux()
    (folder / "machine").mkdir()
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": "/run",
        "TMPDIR": "/run",
        "XDG_RUNTIME_DIR": "/run",
        "XDG_STATE_HOME": "/run",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    archive = first_files(folder / "machine", kernel, ["env", *settings, *command])
    [image] = (kernel / "boot").glob("vmlinuz-*")
    done = subprocess.run(
        [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max",
            *machine.options(node_mib), "-kernel", str(image), "-initrd", str(archive),
            "-append", "console=ttyS0 panic=-1 quiet", "-nographic", "-no-reboot",
            "-nic", "none", "-virtfs",
            "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8",
        errors="replace",
    )  # fmt: skip
    printed = done.stdout.replace("\r", "").partition("BEGINS\n")[2]
    assert "ENDED 0\n" in printed, done.stdout[-6000:] + done.stderr[-2000:]
    return printed.partition("ENDED 0\n")[0]


def python(*arguments: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *arguments]
