"""`infer load`, `unload` and `ps`: the models of a running server, which it loads and unloads."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from infer.cli.explain import get_json, post_json
from infer.cli.plain import plain
from infer.errors import InferError

LOAD_TIMEOUT_S = 3600.0
"""Seconds that a server has to load a model, or to finish the requests of one."""


def run_load(url: str, model: str, api_key: str | None) -> None:
    """Have a model loaded, and say that it is. Raises `InferError` with the server's reason."""
    _change(url, "/v1/models/load", {"model": model}, api_key)


def run_unload(url: str, model: str, api_key: str | None, *, force: bool) -> None:
    """Have a model unloaded, and say that it is. Raises `InferError` with the server's reason."""
    _change(url, "/v1/models/unload", {"model": model, "force": force}, api_key)


def _change(url: str, path: str, body: dict[str, Any], api_key: str | None) -> None:
    model = post_json(url, path, body, api_key, "its answer is no model", LOAD_TIMEOUT_S)
    status = model.get("status", "loaded")  # a server with one model does not say
    console = Console(highlight=False)
    console.print(plain(f"{model.get('id', body['model'])}: {status}"), soft_wrap=True)


def run_ps(url: str, api_key: str | None) -> None:
    """Print the models of a server. Raises `InferError` where it has no list of them."""
    wrong = "its answer is no list of models"
    data = get_json(url, "/v1/models", api_key, wrong).get("data")
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise InferError(f"no infer server answers at {url}: {wrong}")
    table = Table("model", "status", "context", "", box=box.SIMPLE)
    for model in data:
        size = model.get("max_model_len")
        cells = (model.get("id"), model.get("status", "loaded"), size or "", model.get("reason"))
        table.add_row(*(plain(cell or "") for cell in cells))
    Console().print(table)
