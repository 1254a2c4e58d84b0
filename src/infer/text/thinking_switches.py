"""Which variables of a chat template turn reasoning on and off, and say how long it may be

Templates have names of their own for the same thing: `enable_thinking` (Qwen, GLM, Nemotron),
`thinking` (DeepSeek, Granite, Kimi), `reasoning_effort` (gpt-oss, Mistral, Hunyuan), `low_effort`
(Nemotron 3), `thinking_budget` (Seed-OSS). A request says it once, and each template gets what it
reads, with a value that it knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_SWITCHES = ("enable_thinking", "thinking")
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_USUAL = ("low", "medium", "high")
_OFF = ("none", "no_think")
_KNOWN = re.compile(r"""["'](none|no_think|minimal|low|medium|high|xhigh|max)["']""")


def switches(given: Mapping[str, Any], source: str, words: Collection[str]) -> dict[str, Any]:
    """The variables `given` for a template, and those by which it calls what they say.

    `source`: the template's text; `words`: the identifiers in it. A variable that is given keeps
    its value, but an effort that the template does not know becomes the nearest one that it does.
    """
    made = dict(given)
    effort = next((given[name] for name in _EFFORTS if isinstance(given.get(name), str)), None)
    on = next((given[name] for name in _SWITCHES if isinstance(given.get(name), bool)), None)
    if on is None and effort is not None:
        on = effort not in _OFF
    if on is None:
        return made
    for name in _SWITCHES:
        if name in words:
            made.setdefault(name, on)
    if "thinking_mode" in words and "enabled" in words:  # MiniMax M3
        made.setdefault("thinking_mode", "enabled" if on else "disabled")
    if "thinking_budget" in words and not on:
        made.setdefault("thinking_budget", 0)
    for name in _EFFORTS:
        if name in words:
            value = _effort(effort, on, frozenset(_KNOWN.findall(source)))
            if value is not None and (name not in given or isinstance(given[name], str)):
                made[name] = value
    for level in ("low", "medium"):
        if f"{level}_effort" in words and effort is not None:
            levels = ("minimal", "low") if level == "low" else (level,)
            made.setdefault(f"{level}_effort", effort in levels)
    return made


def _effort(effort: str | None, on: bool, known: frozenset[str]) -> str | None:
    """The effort that a template gets; None: it is left to the template."""
    off = next((word for word in _OFF if word in known), None)
    if not on and off is not None:
        return off
    if effort is None:
        # Where no reasoning is a level, it is the usual one of some templates.
        return ("high" if "high" in known else None) if on and off is not None else None
    if not known or effort not in _LEVELS:
        return effort
    levels = [level for level in _LEVELS if level in known and level not in _OFF]
    if len(levels) < 2:  # the default of a template that prints what it gets
        levels = [*_USUAL]
    place = _LEVELS.index(effort)
    return min(levels, key=lambda level: (abs(_LEVELS.index(level) - place), -_LEVELS.index(level)))
