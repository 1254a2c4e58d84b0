"""`infer connect`: starts a coding agent with a server's model, or prints the lines that do

An agent needs an address, a model's name, and the size of its context: without that, most assume
one of a million tokens and never shorten a conversation. All of it goes into the environment and
the arguments of the agent's own command, so nothing is written to its files.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from infer.cli.explain import get_json, is_here
from infer.errors import InferError

MIN_WINDOW = 32_768
"""Tokens below which an agent has no room to work: its first prompt alone has up to 19,000."""


class Start(NamedTuple):
    """How an agent is started."""

    environment: Mapping[str, str]
    command: Sequence[str]


class ServedModel(NamedTuple):
    """What an agent is to use."""

    url: str
    """Of the server, without a path."""
    model: str
    window: int
    """Tokens of prompt and output together."""
    api_key: str

    @property
    def max_output(self) -> int:
        """Tokens that an answer may have: a quarter of the window, so that a prompt has room."""
        return self.window // 4


def _codex(to: ServedModel) -> Start:
    provider = {
        "name": "infer",
        "base_url": f"{to.url}/v1",
        "wire_api": "responses",
        "env_key": "INFER_API_KEY",
    }
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = {
        "model": json.dumps(to.model),
        "model_provider": '"infer"',
        "model_providers.infer": f"{{{table}}}",
        "model_context_window": str(to.window),
        "model_auto_compact_token_limit": str(to.window * 3 // 4),
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return Start({"INFER_API_KEY": to.api_key}, ["codex", *options])


def _claude(to: ServedModel) -> Start:
    environment = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.api_key,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.max_output),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    return Start(environment, ["claude", "--model", to.model])


def _qwen(to: ServedModel) -> Start:
    environment = {
        "OPENAI_BASE_URL": f"{to.url}/v1",
        "OPENAI_API_KEY": to.api_key,
        "OPENAI_MODEL": to.model,
    }
    return Start(environment, ["qwen", "--auth-type", "openai"])


def _opencode(to: ServedModel) -> Start:
    model = {"limit": {"context": to.window, "output": to.max_output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{to.url}/v1", "apiKey": to.api_key},
        "models": {to.model: model},
    }
    config = {"provider": {"infer": provider}, "model": f"infer/{to.model}"}
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, ["opencode"])


AGENTS: Mapping[str, Callable[[ServedModel], Start]] = {
    "codex": _codex,
    "claude": _claude,
    "qwen": _qwen,
    "opencode": _opencode,
}
"""Agents by the name of their command."""


def around_proxies(url: str) -> Mapping[str, str]:
    """What an agent's environment needs besides, so that a proxy is not asked for this machine."""
    parts, proxies = urlsplit(url), getproxies_environment()
    host = parts.hostname or ""
    if not proxies.keys() - {"no"} or not is_here(parts.netloc) or proxy_bypass(host):
        return {}
    value = ",".join(filter(None, (proxies.get("no"), host)))
    return {"NO_PROXY": value, "no_proxy": value}


def find_target(url: str, model: str | None, api_key: str | None) -> ServedModel:
    """What the server at `url` has. Raises `InferError` with one sentence."""
    url = url.rstrip("/").removesuffix("/v1")
    listed = get_json(url, "/v1/models", api_key, "its answer is no list of models")
    try:
        cards = {card["id"]: card["max_model_len"] for card in listed["data"]}
    except (LookupError, TypeError):
        raise InferError(f"no infer server answers at {url}: no list of models") from None
    name = model if model is not None else next(iter(cards), None)
    if name is None or name not in cards:
        raise InferError(f"the server at {url} has no model {name!r}; it has {', '.join(cards)}")
    if not isinstance(cards[name], int):
        raise InferError(f"the model {name!r} is not loaded, so its context is not known yet")
    return ServedModel(url, name, cards[name], api_key or "none")


def run_connect(agent: str, url: str, model: str | None, api_key: str | None, start: bool) -> None:
    """`infer connect`."""
    if agent not in AGENTS:
        raise InferError(f"there is no agent {agent!r}; known are {', '.join(AGENTS)}")
    target = find_target(url, model, api_key)
    environment, command = AGENTS[agent](target)
    how = Start({**environment, **around_proxies(target.url)}, command)
    if target.window < MIN_WINDOW:
        window = f"the context of {target.model!r} has {target.window:,} tokens"
        raise InferError(
            f"{window}; an agent needs {MIN_WINDOW:,} or more: serve it with --max-seq-len"
            f" {MIN_WINDOW}, if the model takes as many"
        )
    if not start:
        for line in shell_lines(how):
            print(line)
        return
    if shutil.which(how.command[0]) is None:
        raise InferError(f"there is no command {how.command[0]!r} here: install the agent first")
    os.execvpe(how.command[0], [*how.command], {**os.environ, **how.environment})


def shell_lines(how: Start) -> list[str]:
    """The lines for a shell."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in how.environment.items()]
    return [*exports, shlex.join(how.command)]
