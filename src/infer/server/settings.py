"""`ServerSettings`: all settings of the server, as `EngineConfig` has those of the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from infer.config import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    MAX_FRONTS,
    MAX_REPLICAS,
    NonNegativeInt,
    PositiveInt,
    at_least,
    check_fields,
    option,
)
from infer.errors import ConfigError
from infer.server.mcp.mcp_settings import QUERY_OF_URL, TOKEN_OF_ENTRY, check_servers
from infer.types.server_limits import (
    DEFAULT_CONNECTIONS,
    MAX_CONNECTIONS,
    MIN_CONNECTIONS,
    SERVER_LIMITS,
    ServerLimits,
)

MAX_PORT = 65535
PASSWORD_OF_URL = r"://[^/@\s]*?:([^/@\s]+)@"
"""The password in a URL such as that of a database."""


@dataclass(frozen=True, kw_only=True)
class ListenAddress:
    """Where a server listens; the constructor raises `ConfigError`."""

    host: str = option(DEFAULT_HOST, "Address to listen on.", is_common=True)
    port: Annotated[int, Meta(ge=0, le=MAX_PORT)] = option(
        DEFAULT_PORT, "Port to listen on; 0 = any free port.", is_common=True
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The options of `infer serve` are made from it. The constructor raises `ConfigError`."""

    drain_timeout_s: Annotated[float, at_least(0)] = option(
        30.0, "At SIGTERM: seconds that running requests have to finish.", is_live=True
    )
    drain_delay_s: Annotated[float, at_least(0)] = option(
        0.0,
        "At SIGTERM: seconds for which new requests are still served while /health/ready is 503, so"
        " that proxies leave; then the port closes. 0 = new requests are refused at once.",
        is_live=True,
    )
    max_connections: Annotated[int, Meta(ge=MIN_CONNECTIONS, le=MAX_CONNECTIONS)] = option(
        DEFAULT_CONNECTIONS,
        "Connections that may be open, beside 8 for health probes; each takes a file descriptor.",
    )
    write_stall_s: Annotated[float, at_least(0.01)] = option(
        30.0, "Seconds after which a client that reads nothing is cancelled."
    )
    request_timeout_s: Annotated[float, at_least(0.001)] = option(
        600.0, "Seconds after which a request is ended.", is_live=True
    )
    hang_s: Annotated[float, at_least(1)] = option(
        120.0, "Seconds after which a step of the engine counts as hanging."
    )
    load_timeout_s: Annotated[float, at_least(1)] = option(
        3600.0, "Seconds that an engine has to load."
    )
    overload_status: Literal["503", "429"] = option(
        "503", "Status of a request that is refused because the server is full; see Retry-After."
    )
    completions_api: Literal["openai", "typed"] = option(
        "openai",
        "typed = /v1/completions always streams typed events and has statuses and defaults of its"
        " own.",
    )
    standby: bool = option(
        True,
        "Keep a process that becomes the next engine (160 MB); without it a restart takes longer.",
    )
    replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] = option(
        1,
        "Engines of each model, which stand in for each other; cores, memory or GPUs are divided.",
        is_common=True,
    )
    fronts: Annotated[int, Meta(ge=1, le=MAX_FRONTS)] = option(
        1,
        "Processes that answer HTTP at the same port, for one model: its streams then have as many"
        " cores. Linux only.",
    )
    routing: Literal["prefix", "least", "round-robin"] = option(
        "prefix",
        "With replicas: prefix = a request goes where its first token is expected first, by the"
        " prompts that each has cached; least = to the least busy; round-robin = in turn.",
    )
    link_timeout_s: Annotated[float, at_least(2)] = option(
        5.0, "With replicas: seconds of silence after which an engine's streams go on elsewhere."
    )
    moved_streams: Literal["any", "exact"] = option(
        "any",
        "With replicas, where no other engine computes the same bits: any = a stream goes on all"
        " the same; exact = it ends with an error.",
    )
    unknown_params: Literal["ignore", "refuse"] = option(
        "ignore",
        "What happens to unknown fields of a body: ignore = they are left out and named in the"
        " answer's X-Ignored-Params; refuse = 422.",
    )
    models_dir: str | None = option(
        None,
        "Folder whose checkpoints (folders and GGUF files) are models by their names, loaded when"
        " they are first asked for; what is added later, too.",
    )
    load_on_first_use: bool = option(
        False, "With several models: load each when it is first asked for, not at the start."
    )
    idle_unload_s: Annotated[float, at_least(0.1)] | None = option(
        None, "With several models: seconds after which an unused one is unloaded."
    )
    models_memory_bytes: PositiveInt | None = option(
        None,
        "With several models: most bytes of the weights of all that are loaded; default: what main"
        " memory leaves. For another one, those that were idle for longest are unloaded.",
    )
    when_not_loaded: Literal["wait", "refuse"] = option(
        "wait",
        "With several models, a request for one that is not loaded: wait = it waits until that is;"
        " refuse = 503 and Retry-After, while it is loaded.",
    )
    keep_alive_s: Annotated[float, at_least(0)] = option(
        15.0, "Seconds after which a silent stream is sent a comment; 0 = never.", is_live=True
    )
    metrics_port: Annotated[int, Meta(ge=0, le=MAX_PORT)] | None = option(
        None,
        "Port on which /metrics and /health are answered without a key, and nothing else; its"
        " address is that of --host.",
    )
    keep_answers_s: Annotated[float, at_least(0)] = option(
        300.0,
        "Seconds after its end for which an answer can be read again, if its request had the header"
        " X-Keep-Answer; 0 = none is kept.",
    )
    metrics_prefix: str = option(
        "infer", "How names in /metrics begin; with vllm, dashboards made for vLLM work."
    )
    log_format: Literal["text", "json"] = option(
        "text", "json = one line of JSON for each event and each request.", is_common=True
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least level of the lines of the log.", is_live=True
    )
    quiet: bool = option(
        False,
        "Write no line for each request to a terminal; warnings and errors come in any case.",
        is_common=True,
    )
    tracing: bool = option(
        False, "Send a span for each request to where OTEL_EXPORTER_OTLP_* say (extra: otel)."
    )
    api_keys: str | None = option(
        None,
        "File of the API keys (made by infer keys create); default: no keys are needed.",
        is_common=True,
    )
    public_prefixes: str | None = option(
        None, "Folder of texts (NAME.txt), such as system messages, whose cache keys may share."
    )
    insecure: bool = option(
        False, "Without keys, listen on an address that other machines can reach.", is_common=True
    )
    ssl_certfile: str | None = option(
        None, "File of the certificate (PEM, with its chain); the server then speaks HTTPS."
    )
    ssl_keyfile: str | None = option(
        None, "File of the certificate's private key; default: it is in the same file."
    )
    uds: str | None = option(
        None, "Listen on a Unix socket at this path instead of an address and port."
    )
    sessions: str | None = option(
        None,
        "Database URL of the sessions, or off; default: a SQLite file in the user's state folder."
        " One with a password is for the file of --config or INFER_SESSIONS.",
        secret=PASSWORD_OF_URL,
    )
    max_sessions: NonNegativeInt = option(1000, "Most sessions of a key.", is_live=True)
    max_session_messages: NonNegativeInt = option(
        100_000, "Most messages in all sessions of a key together.", is_live=True
    )
    max_session_bytes: NonNegativeInt = option(
        64 * 1024 * 1024, "Most bytes in all sessions of a key together.", is_live=True
    )
    cors_origins: str | None = option(
        None, "Origins, separated by commas, whose web pages may use this server."
    )
    allowed_hosts: str | None = option(
        None,
        "Names, separated by commas, that a Host header may have in addition to localhost, as"
        " behind a proxy; checked only without keys, on loopback.",
    )
    mcp_server: str | None = option(
        None,
        "MCP server (NAME=URL, Streamable HTTP) whose tools the page may use; may be repeated."
        " Whoever may use this server may call them. One with a key in its URL is for"
        " INFER_MCP_SERVER or the file of --config.",
        secret=QUERY_OF_URL,
        is_repeatable=True,
    )
    mcp_token: str | None = option(
        None,
        "Key of an MCP server: NAME=@FILE; may be repeated. NAME=TOKEN is for INFER_MCP_TOKEN or"
        " the file of --config. It is sent as Authorization: Bearer, or as the header that it"
        " names (X-Api-Key: TOKEN).",
        secret=TOKEN_OF_ENTRY,
        is_repeatable=True,
    )
    limits: ServerLimits = SERVER_LIMITS
    """No option."""

    ui: bool = option(True, "Answer browsers at / with a page to chat with the model.")

    def __post_init__(self) -> None:
        check_fields(self)
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError("metrics_prefix", "must be letters, digits and _")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile", "is of no use without ssl_certfile")
        self._check_fronts()
        for origin in self.origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/*]+", origin):
                raise ConfigError("cors_origins", f"{origin!r} is not an origin like https://a.org")
        check_servers(self.mcp_server, self.mcp_token)
        for host in self.hosts:
            if not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]", host):
                raise ConfigError(
                    "allowed_hosts", f"{host!r} is not a name like models.example.org"
                )

    def _check_fronts(self) -> None:
        """Raises `ConfigError` for what several processes at one port cannot do; see also
        `serve_config`."""
        if self.fronts == 1:
            return
        if self.uds is not None:
            message = "more than 1 need a port, whose connections the system divides among them"
            raise ConfigError("fronts", f"{message}: leave --uds or --fronts out")
        if self.models_dir is not None:
            message = "more than 1 serve one model, and not a folder of models"
            raise ConfigError("fronts", f"{message}: leave --models-dir or --fronts out")

    @property
    def status_when_full(self) -> int:
        """The status that `overload_status` names."""
        return int(self.overload_status)

    @property
    def origins(self) -> list[str]:
        """The entries of `cors_origins`."""
        return self.cors_origins.split(",") if self.cors_origins else []

    @property
    def hosts(self) -> list[str]:
        """The entries of `allowed_hosts`."""
        return self.allowed_hosts.split(",") if self.allowed_hosts else []
