"""Whether there is a Ray that `infer.cluster` works with, set up well; without importing it"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping

from infer.errors import ConfigError
from infer.extras import to_install

log = logging.getLogger(__name__)

LOWEST, BELOW = (2, 60), (3, 0)
"""Versions that the extra `cluster` allows."""


def check_version(version: str | None) -> None:
    """Raise `ConfigError` if a version of Ray is missing (None) or outside the range."""
    wanted = f"ray[serve]>={LOWEST[0]}.{LOWEST[1]},<{BELOW[0]}"
    if version is None:
        raise ConfigError("ray", f"is not installed: {to_install('cluster')} ({wanted})")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not LOWEST <= numbers < BELOW:
        raise ConfigError("ray", f"{version} is installed, and infer works with {wanted}")


def is_installed() -> bool:
    """Whether there is a Ray at all."""
    return importlib.util.find_spec("ray") is not None


def warn_without_haproxy(environment: Mapping[str, str]) -> None:
    """Log a warning where all answers pass through a Python process of Ray's."""
    if environment.get("RAY_SERVE_ENABLE_HA_PROXY", "0") != "1":
        log.warning(
            "RAY_SERVE_ENABLE_HA_PROXY is off: every part of an answer passes through Ray's own"
            " proxy, which is slower; set it to 1 where Ray is started and where this is run, and"
            " clients reach the fronts through HAProxy"
        )
