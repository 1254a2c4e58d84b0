"""A module after whose import a standby does not read its `Begin`."""

import time
from typing import Any

import infer.replicas.messages as messages


def hang(frame: bytes) -> Any:
    """In place of `decode_inward`."""
    time.sleep(3600)


messages.decode_inward = hang
