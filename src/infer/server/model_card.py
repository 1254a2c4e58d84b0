"""`model_card`: what `/v1/models` says of a model, for clients of OpenAI and of Anthropic"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def model_card(name: str, created_s: int, max_model_len: int | None, **more: Any) -> dict[str, Any]:
    """The fields that either kind of client looks for. `created_s`: seconds since the epoch;
    `max_model_len`: tokens of prompt and output together, None while that is not known; `more`:
    fields of this server."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "infer",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
        "max_model_len": max_model_len,
        **more,
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A list of models, all on one page."""
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
    return {"object": "list", "data": cards, "has_more": False, **ends}
