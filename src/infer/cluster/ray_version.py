"""Whether the installed Ray is one that `infer.cluster` works with; without importing it"""

from __future__ import annotations

import importlib.util
import re

from infer.errors import ConfigError

LOWEST, BELOW = (2, 60), (3, 0)
"""versions that the extra `cluster` allows"""


def check_version(found: str | None) -> None:
    """Raise `ConfigError` if a version of Ray is missing (None) or outside the range."""
    wanted = f"ray[serve]>={LOWEST[0]}.{LOWEST[1]},<{BELOW[0]}"
    if found is None:
        raise ConfigError("ray", f"is not installed: pip install 'infer[cluster]' ({wanted})")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not LOWEST <= numbers < BELOW:
        raise ConfigError("ray", f"{found} is installed, and infer works with {wanted}")


def is_installed() -> bool:
    """Whether there is a Ray at all."""
    return importlib.util.find_spec("ray") is not None
