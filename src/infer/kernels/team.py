"""The threads of the CPU kernels: how many they are

As many as torch's. OpenMP's threads, which torch has, look for work for milliseconds after each of
torch's operations, on the cores that a kernel needs next, and such an operation waits for all of
them, however long another process keeps one from its core. So torch has one thread in a step that
only kernels compute (`ForKernels`), and they have its threads.
"""

from __future__ import annotations

import torch

from infer.kernels import loader


def num_threads() -> int:
    """How many threads the kernels that this thread calls may use."""
    if isinstance(library := loader.library(), str):
        return torch.get_num_threads()
    return library.infer_threads() or torch.get_num_threads()


class ForKernels:
    """A context in which torch has one thread, and the kernels that this thread calls have those
    that torch had before."""

    def __enter__(self) -> None:
        """Begin."""
        self._count = torch.get_num_threads()
        if self._count > 1:
            loader.loaded().infer_set_threads(self._count)
            torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        """End."""
        if self._count > 1:
            loader.loaded().infer_set_threads(0)
            torch.set_num_threads(self._count)
