"""The events of requests as JSON values, in traces and in frames, and read again from frames.

`types.step_events` says what each kind and each field is called; nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args

from msgspec.structs import fields

from infer.types.step_events import RequestEvent

_NAMES_REQUESTS = ("behind", "needed_by")
"""Fields with ids of other requests: none, one or several."""
_KINDS: Mapping[str, type[RequestEvent]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(RequestEvent)
}


@cache
def _names_of(kind: type[RequestEvent]) -> tuple[tuple[str, str], ...]:
    """The fields beside `request_id`, with their public names."""
    return tuple(
        (field_of_kind.name, field_of_kind.encode_name)
        for field_of_kind in fields(kind)
        if field_of_kind.name != "request_id"
    )


def kind_of(event: RequestEvent) -> str:
    """What the kind of an event is called."""
    return str(type(event).__struct_config__.tag)


def fields_of(event: RequestEvent, shown: Callable[[str], Any]) -> dict[str, Any]:
    """What an event says beside its request. `shown` makes of another request's id what stands in
    its place; each such value is there once."""
    public_fields: dict[str, Any] = {}
    for name, public in _names_of(type(event)):
        value = getattr(event, name)
        if name in _NAMES_REQUESTS:
            ids = value if isinstance(value, tuple) else (value,) if value else ()
            value = list(dict.fromkeys(map(shown, ids)))
        elif value is None or value is False:
            continue
        public_fields[public] = value
    return public_fields


def event_of(request_id: str, told: Mapping[str, Any]) -> RequestEvent | None:
    """The event that a frame tells, without the requests that it names; None for a kind that is not
    known here. Raises `TypeError` where a field is missing."""
    kind = _KINDS.get(told["event"])
    if kind is None:
        return None
    given = {
        name: told[public]
        for name, public in _names_of(kind)
        if public in told and name not in _NAMES_REQUESTS
    }
    return kind(request_id, **given)
