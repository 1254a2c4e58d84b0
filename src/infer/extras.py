"""`to_install`: the command that adds an optional part, as this copy of infer was installed

The public index has an unrelated package of the same name, so a command never asks it for `infer`:
a checkout is installed again from its folder, a wheel from its file or address. Where it is not
known how infer was installed, the packages of the extra are named.
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

DISTRIBUTION = "infer-serve"
"""Name of the distribution, as in pyproject.toml; the import name and the command are `infer`."""


def to_install(extra: str, name: str = DISTRIBUTION) -> str:
    """The command for one of the extras in pyproject.toml. `name`: of the distribution."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return _in_checkout(extra)
    origin = _origin(distribution)
    if isinstance(url := origin.get("url"), str):
        if "dir_info" in origin:
            return _in_checkout(extra)
        if isinstance(vcs := origin.get("vcs_info"), dict):
            url = f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
        return f"pip install '{name}[{extra}] @ {url}'"
    packages = [
        requirement.partition(";")[0].strip()
        for requirement in distribution.requires or ()
        if f'extra == "{extra}"' in requirement.replace("'", '"')
    ]
    if not packages:
        return _in_checkout(extra)
    return f"pip install {' '.join(repr(package) for package in packages)}"


def _in_checkout(extra: str) -> str:
    return f"pip install -e '.[{extra}]' in the folder of the source"


def _origin(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """What pip has noted about where a distribution came from; {} for one from an index."""
    try:
        value = json.loads(distribution.read_text("direct_url.json") or "{}")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
