"""Rules of an answer that may be text, and behind it calls: the calls are enforced, the text is not

Where the model may choose whether it calls a tool, a grammar can hold it to a schema only if a mark
says where calls begin. Text is anything without such a mark; from the mark on the grammar of calls
holds. Special tokens that are no marks of calls may stand in the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from infer.text.tools.formats import HARMONY, ToolFormat
from infer.text.tools.value_rules import NotExpressibleError, escaped

TEXT, OPENED = "free", "opened"
"""Rules: a text without calls; a text up to the first mark of calls, and the mark."""


class TextRules(NamedTuple):
    """What comes before calls."""

    rules: tuple[str, ...]
    """`TEXT` and `OPENED`."""
    rest: str
    """What follows the mark before the name of the first call."""


def text_before_calls(
    way: ToolFormat, begin: str, special: Mapping[str, int], ends: Iterable[str]
) -> TextRules:
    """The rules. Raises `NotExpressibleError` if no mark says where a call begins.

    `begin`: the text before the name of a first call. `special`: ids of the special tokens;
    `ends`: those that end an answer.
    """
    begun = begin.lstrip()
    mark = max((m for m in way.openings if m and begun.startswith(m)), key=len, default="")
    # harmony's text has marks of its own, which a call begins with, too.
    if not mark or way is HARMONY:
        raise NotExpressibleError
    others = sorted({m for m in way.openings if m and m not in special})
    without = f" & ~/(?s:.*)({'|'.join(map(escaped, others))})(?s:.*)/" if others else ""
    allowed = special.keys() - {*way.openings, *ends}
    ids = _ranges({special[name] for name in allowed})
    text = f"FREE? (<[{ids}]> FREE?)*" if ids else "FREE?"
    rules = [f"FREE: /(?s:.+)/{without}", f"{TEXT}: {text}"]
    if mark in special:
        rules.append(f"{OPENED}: {TEXT} <[{special[mark]}]>")
    else:
        before = f"(FREE? <[{ids}]>)* " if ids else ""
        rules += [f"{OPENED}: {before}mark", f"mark[lazy]: /(?s:.*)/ {json.dumps(mark)}"]
    return TextRules(tuple(rules), begun.removeprefix(mark))


def _ranges(ids: Collection[int]) -> str:
    """Numbers as llguidance writes a set of tokens."""
    ranges = list[list[int]]()
    for token_id in sorted(ids):
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)
