"""Settings for all tests; what they share is in `tests/support`."""

import gc
import os
import tempfile

import pytest

pytest.register_assert_rewrite("tests.support")

# The models here are so small that a second thread only waits for the first one.
os.environ["OMP_NUM_THREADS"] = "1"
# What engines promise here is not for the engines of others on this machine, nor theirs for these.
_RUNTIME = tempfile.TemporaryDirectory(prefix="infer-tests-")
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name


def pytest_configure(config: pytest.Config) -> None:
    """Tests are of the CPU's parts, on a machine with a GPU too; those marked `gpu` run when they
    are asked for (`-m gpu`)."""
    wanted = (config.getoption("markexpr") or "").replace("not gpu", "")
    if "gpu" not in wanted and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_unconfigure() -> None:
    """Free what tests have frozen: of that, Triton's library complains at the end."""
    gc.unfreeze()
