"""Triton kernel that begins a step: it fills in pending tokens and updates page tables."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from infer.kernels.cuda import has_pdl
from infer.kernels.cuda.launch import launch


@triton.jit
def _begin(
    tokens, sampled, ids, tables, places, pages, num_updates, num_tokens,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < num_tokens
    token = tl.load(tokens + i, mask=ok, other=0)
    is_pending = token < 0
    known = tl.load(sampled + tl.where(is_pending, -1 - token, 0), mask=ok & is_pending, other=0)
    tl.store(ids + i, tl.where(is_pending, known, token), mask=ok)
    for first in range(tl.program_id(0) * BLOCK, tl.load(num_updates), tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        there = j < tl.load(num_updates)
        place = tl.load(places + j, mask=there, other=0)
        tl.store(tables + place, tl.load(pages + j, mask=there, other=0), mask=there)
    if PDL:
        gdc_launch_dependents()


def begin(
    tokens: Tensor, sampled: Tensor, ids: Tensor, tables: Tensor, updates: tuple[Tensor, ...]
) -> None:
    """Write the token ids `ids` [T] and the changed entries of the page tables [rows, P].

    All tensors are int32. `tokens` [T]: token ids; -1 - r stands for row r of `sampled`, the result
    of the previous step. `updates`: (indices into the flattened tables, page numbers, their number
    [1]).
    """
    places, pages, num_updates = updates
    pdl = has_pdl(tokens.device)
    block = 256
    launch(_begin, (triton.cdiv(tokens.shape[0], block),))(
        tokens, sampled, ids, tables, places, pages, num_updates, tokens.shape[0],
        BLOCK=block, PDL=pdl, num_warps=4,
    )  # fmt: skip
