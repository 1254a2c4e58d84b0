"""`fingerprint_of`: what an engine serves and which bits it computes, as digests

An engine computes a fixed prompt when it is built, in one chunk and one further step, as a request
is prefilled and decoded. The logits of some positions are hashed bit by bit. So two engines have
equal digests if their kernels, weights and number formats give equal bits, whatever they are called
and whichever machines they run on. No torch here: the runner hands out arrays.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import asdict
from typing import Any

from infer.engine.core import EngineCore
from infer.schedule.page_allocator import PageTable
from infer.schedule.sequence import Chunk, Sequence
from infer.text.checkpoint_text import TextFiles
from infer.types import Request, SamplingParams
from infer.types.fingerprint import Fingerprint
from infer.version import VERSION

log = logging.getLogger(__name__)

PROMPT_TOKENS = 33
"""Length of the prompt, if the engine has room for it; the last token has a step of its own."""
POSITIONS = (0, 7, 15, 24, 31, 32)
"""Positions of the prompt whose logits are hashed, and the last one."""


def fingerprint_of(
    core: EngineCore, *, model: Any, text: TextFiles, vocab_size: int, formats: tuple[str, ...]
) -> Fingerprint:
    """The fingerprint of an engine that has no requests yet.

    `model`: the dataclass of the model's config. `formats`: names of the number formats that it
    computes and caches in.
    """
    known = (asdict(model), text.tokenizer_json, dict(text.named_tokens), text.eos_token_ids)
    return Fingerprint(
        model=_digest(repr(known).encode()),
        numbers=_digest(repr((VERSION, formats)).encode(), _logits(core, vocab_size)),
    )


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _logits(core: EngineCore, vocab_size: int) -> bytes:
    """The logits of the fixed prompt, or of what fits of it; random bytes, which are equal to no
    others, if they cannot be computed."""
    size = min(PROMPT_TOKENS, core.scheduler.config.max_seq_len)
    prompt = tuple((7919 * i + 13) % vocab_size for i in range(size))
    positions = tuple(dict.fromkeys(min(position, size - 1) for position in POSITIONS))
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    request = Request("fingerprint", prompt, sampling, 1, 1, logits_at=positions)
    sequence, allocator = Sequence.from_request(request, 0), core.scheduler.allocator
    sequence.table = PageTable()
    if not allocator.grow(sequence.table, size):
        log.warning("the engine has no fingerprint: its cache has no %d tokens", size)
        return secrets.token_bytes(32)
    try:
        for start, count in ((0, size - 1), (size - 1, 1)):
            if count:
                core.runner.execute((Chunk(sequence, start, count),))
                sequence.num_computed = start + count
        return b"".join(sequence.logits[position].tobytes() for position in positions)
    except Exception:
        log.exception("the engine has no fingerprint: its prompt cannot be computed")
        return secrets.token_bytes(32)
    finally:
        allocator.release(sequence.table)
