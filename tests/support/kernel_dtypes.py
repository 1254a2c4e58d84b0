"""The dtypes of the kernels' tests, and how near to float64 their results must be."""

from __future__ import annotations

import os

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

KINDS = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
"""Of tests with products."""
LOADED = [torch.float32, torch.bfloat16] if INTERPRETED else [torch.bfloat16, torch.float16]
"""Of tests of kernels that widen what they load and multiply no matrices."""

# The interpreter cuts bfloat16 off where a device rounds.
_RELATIVE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(got: Tensor, want: Tensor, kind: torch.dtype | None = None) -> None:
    """`want` in float64; the error may be so large relative to the largest number of `want`, as
    the rounding of `kind` (else of `got`) explains. NaN is an error."""
    limit = _RELATIVE[kind or got.dtype] * max(1.0, want.abs().max().item())
    error = (got.double().cpu() - want.cpu()).abs().max().item()
    assert error <= limit, f"{error:.2e} is more than {limit:.2e}"
