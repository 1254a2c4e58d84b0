"""`ServerSettings`: what a user may choose about the server, as `EngineConfig` is for the engine.

The options of `infer serve` are made from it. Raises `ConfigError` at construction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from infer.config import NonNegativeInt, at_least, check_fields, option
from infer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """See the module's docstring."""

    drain_timeout_s: Annotated[float, at_least(0)] = option(
        30.0, "At SIGTERM: how long what runs may take to finish."
    )
    write_stall_s: Annotated[float, at_least(0.01)] = option(
        30.0, "A client that takes nothing for so long is cancelled."
    )
    request_timeout_s: Annotated[float, at_least(0.001)] = option(
        600.0, "A request that is not done by then is ended."
    )
    hang_s: Annotated[float, at_least(1)] = option(
        120.0, "A step of the engine that takes longer is a hang."
    )
    load_timeout_s: Annotated[float, at_least(1)] = option(
        3600.0, "An engine that is not ready by then is given up."
    )
    unknown_params: Literal["refuse", "ignore"] = option(
        "refuse",
        "Fields of a body that nobody knows; ignore = leave out, and list in X-Ignored-Params.",
    )
    load_on_first_use: bool = option(False, "Of several models: not at the start.")
    idle_unload_s: Annotated[float, at_least(0.1)] | None = option(
        None, "Of several models: one that nobody uses for so long is unloaded."
    )
    keep_alive_s: Annotated[float, at_least(0)] = option(
        15.0, "A stream in which nothing happens gets a comment so often; 0 = never."
    )
    metrics_prefix: str = option(
        "infer", "Names in /metrics begin with it; vllm = dashboards made for vLLM work."
    )
    log_format: Literal["text", "json"] = option(
        "text", "json = a line of JSON for each event and each request."
    )
    tracing: bool = option(
        False, "Send a span for each request as OTEL_EXPORTER_OTLP_* say (extra: otel)."
    )
    api_keys: str | None = option(
        None, "File of the keys that are let in (infer keys create); default: no keys."
    )
    public_prefixes: str | None = option(
        None, "Folder of texts (NAME.txt), as of system messages, that keys may share the cache of."
    )
    insecure: bool = option(
        False, "Without keys, listen on an address that others than this machine can reach."
    )
    ssl_certfile: str | None = option(
        None, "File of the certificate (PEM, with its chain): HTTPS in place of HTTP."
    )
    ssl_keyfile: str | None = option(
        None, "File of the certificate's private key; default: it is in the same file."
    )
    uds: str | None = option(
        None, "Listen on a Unix socket of this path in place of an address and port."
    )
    sessions: str | None = option(
        None, "Database URL of the sessions; default: a SQLite file in the user's state folder."
    )
    max_sessions: NonNegativeInt = option(1000, "Sessions that a key may keep here.")
    max_session_messages: NonNegativeInt = option(
        100_000, "Messages that the sessions of a key may have, all together."
    )
    max_session_bytes: NonNegativeInt = option(
        64 * 1024 * 1024, "Bytes that the sessions of a key may have, all together."
    )
    cors_origins: str | None = option(
        None, "Origins, separated by commas, whose pages in a browser may use this server."
    )
    allowed_hosts: str | None = option(
        None,
        "Names, separated by commas, that a Host header may have beside localhost, as behind a"
        " proxy; looked at without keys, on loopback.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError("metrics_prefix", "must be letters, digits and _")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile", "is of no use without ssl_certfile")
        for origin in self.origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/*]+", origin):
                raise ConfigError("cors_origins", f"{origin!r} is not an origin like https://a.org")
        for host in self.hosts:
            if not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]", host):
                raise ConfigError(
                    "allowed_hosts", f"{host!r} is not a name like models.example.org"
                )

    @property
    def origins(self) -> list[str]:
        """`cors_origins` as a list."""
        return self.cors_origins.split(",") if self.cors_origins else []

    @property
    def hosts(self) -> list[str]:
        """`allowed_hosts` as a list."""
        return self.allowed_hosts.split(",") if self.allowed_hosts else []
