"""Settings for all tests; what they share is in `tests/support`."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")

# The models here are so small that a second thread only waits for the first one.
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test asks for more, those that wait do not take the cores of the tests beside it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests start some hundred processes; each would compile the package for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What engines promise here is not for the engines of others on this machine, nor theirs for these.
_RUNTIME = tempfile.TemporaryDirectory(prefix="infer-tests-", ignore_cleanup_errors=True)
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name
# Nor are what servers store.
os.environ["XDG_STATE_HOME"] = _RUNTIME.name

# Servers of tests are on this machine, where no proxy of the environment reaches them.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1,localhost,::1")))

# A shell that starts this run in the background has it ignore Ctrl-C; what tests start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MAX_WORKERS = 5
"""A worker has torch in its memory, and its tests start engines that have it too."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes share the files of tests (`-n auto`, which `pyproject.toml` sets): one
    more than there are cores, as tests wait for processes and clocks a good part of their time.

    Only this one (0) for a single file, for output that is to be seen at once (`-s`), for a test
    that starts pytest, and for tests of other lanes, which want the whole machine.
    """
    files = [Path(str(arg).partition("::")[0]) for arg in config.args]
    if (
        "PYTEST_XDIST_WORKER" in os.environ
        or "not slow" not in (config.getoption("markexpr") or "")
        or config.getoption("capture") == "no"
        or (len(set(files)) == 1 and files[0].is_file())
    ):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min((cores or 1) + 1, MAX_WORKERS)


# Collecting makes hundreds of thousands of objects that stay. To look for garbage among them takes
# more than a second each time.
gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays: no collection looks at it."""
    gc.freeze()
    gc.enable()
    if (storage := sys.modules.get("infer.runner.kv_storage")) is not None:
        # Most of the engines here fill less than that; to prepare 64 MiB took a twentieth of a run.
        storage.PREPARED_BYTES = 4 << 20  # type: ignore[attr-defined]


def rooms_from(worker: int) -> list[str]:
    """The folders and files of tests, from another third on for each of three processes: in a new
    clone each compiles a part of the files, and finds the others compiled by its neighbours."""
    here = Path(__file__).parent
    rooms = sorted(map(str, [*here.glob("[a-z]*/"), *here.glob("test_*.py")]))
    first = worker * len(rooms) // 3 % len(rooms)
    return [*rooms[first:], *rooms[:first]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One order, wherever collecting began."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: str(item.path))


def pytest_configure(config: pytest.Config) -> None:
    """Tests are of the CPU's parts, on a machine with a GPU too; those marked `gpu` run when they
    are asked for (`-m gpu`)."""
    marks = config.getoption("markexpr") or ""
    if "not slow" in marks:
        # A server's process in reserve imports all that an engine does, for most tests in vain:
        # those that end engines ask for it.
        os.environ.setdefault("INFER_STANDBY", "false")
    # Of a heap that is still frozen Triton's library complains at the end.
    config.add_cleanup(gc.unfreeze)
    config.add_cleanup(_RUNTIME.cleanup)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = rooms_from(int(worker.removeprefix("gw")))
    wanted = marks.replace("not gpu", "")
    if "gpu" not in wanted and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
