"""Calls as FunctionGemma and Gemma 4 write them: `call:weather{city:<escape>Ulm<escape>,days:3}`.

Keys have no quotes. Strings have special tokens as quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from infer.text.tools.call import Parse, ToolCall, arguments_of
from infer.text.tools.json_calls import read_json

_CALL = re.compile(r"\s*call:([^\s{}]+)(\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r'([{,]\s*)([A-Za-z_][^\s:{}\[\],"]*)\s*:')


def gemma_parse(quote: str) -> Parse:
    """The parser of one call; `quote`: the mark before and after a string."""

    def parse(text: str) -> list[ToolCall] | None:
        match = _CALL.fullmatch(text)
        if match is None:
            return None
        plain, *rest = match[2].split(quote)
        if len(rest) % 2:
            return None
        pieces = [_KEY.sub(r'\1"\2":', plain)]
        for string, between in zip(rest[::2], rest[1::2], strict=True):
            pieces += [json.dumps(string), _KEY.sub(r'\1"\2":', between)]
        return read_json(f'{{"name": {json.dumps(match[1])}, "arguments": {"".join(pieces)}}}')

    return parse


def write_gemma(calls: Sequence[ToolCall], quote: str) -> list[str]:
    """The text of each call; `quote`: the mark before and after a string."""
    return [f"call:{call.name}{_written(arguments_of(call), quote)}" for call in calls]


def _written(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_written(item, quote) for item in value)}]"
    if isinstance(value, dict):
        members = (f"{key}:{_written(item, quote)}" for key, item in value.items())
        return f"{{{','.join(members)}}}"
    return json.dumps(value)
