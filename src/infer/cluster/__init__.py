"""`infer.cluster`: engines on several machines under one address, placed and scaled by Ray Serve

`serve run infer.cluster:app model=PATH replicas=1-3 fronts=2`; see `docs/cluster.md`. Only
`cluster.deployments` imports Ray, and whoever calls `app`.
"""

from __future__ import annotations

from typing import Any


def app(arguments: dict[str, Any]) -> Any:
    """The application for `serve run` and for the YAML of `serve deploy`.

    `arguments`: see `cluster.cluster_settings`. Raises `ConfigError`.
    """
    from infer.cluster.ray_version import check_version, is_installed

    if not is_installed():
        check_version(None)
    from infer.cluster.deployments import application

    return application(arguments)
