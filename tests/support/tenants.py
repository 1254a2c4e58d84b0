"""Keys for requests, and what answers say of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.serving import Reply


def make(file: Path, name: str, **limits: Any) -> dict[str, str]:
    """Make a key; returns the headers to send it."""
    return {
        "authorization": f"Bearer {Keys(file, must_exist=False).create(name, KeyLimits(**limits))}"
    }


def cached(reply: Reply) -> int:
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
