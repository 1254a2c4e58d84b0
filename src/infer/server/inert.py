"""Fields that clients know and we do not implement: accepted where they would change nothing.

Real clients send such fields at their defaults (`best_of: 1`, `tools: []`); refusing those would
break them, and ignoring other values would answer a question nobody asked. So each name has a
test for "no effect" and a sentence about what is accepted. Hints that never change an answer
(cache keys, end-user ids) are accepted at any value of their type. Used by `wire` while it reads;
a feature that is built moves from here into the wire models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Inert(NamedTuple):
    """One field without effect."""

    harmless: Callable[[Any], bool]
    accepted: str
    """what may be sent, for the error message"""


def _same(value: Any, allowed: Any) -> bool:
    if isinstance(allowed, float):  # a number field: 1 and 1.0 say the same
        return isinstance(value, int | float) and not isinstance(value, bool) and value == allowed
    return type(value) is type(allowed) and bool(value == allowed)


def _only(*allowed: Any) -> Inert:
    shown = " or ".join(json.dumps(value) for value in allowed)
    return Inert(lambda value: any(_same(value, one) for one in allowed), shown)


def _a(kind: type, shown: str) -> Inert:
    return Inert(lambda value: isinstance(value, kind), shown)


_ANY_STRING = _a(str, "a string")
_ANY_FLAG = _a(bool, "true or false")
_NOTHING = Inert(lambda value: False, "null")

REQUEST_FIELDS: dict[str, Inert] = {
    # OpenAI
    "audio": _NOTHING,
    "best_of": _only(1),
    "echo": _only(False),
    "function_call": _only("none", "auto"),
    "functions": _only([]),
    "modalities": _only(["text"]),
    "moderation": _NOTHING,
    "parallel_tool_calls": _ANY_FLAG,
    "prediction": _NOTHING,
    "prompt_cache_key": _ANY_STRING,
    "prompt_cache_options": _only({}),
    "prompt_cache_retention": _only("in_memory", "in-memory"),
    "reasoning_effort": _only("none"),
    "response_format": _only({"type": "text"}),
    "safety_identifier": _ANY_STRING,
    "service_tier": _only("auto", "default"),
    "store": _only(False),
    "suffix": _only(""),
    "tool_choice": _only("none", "auto"),
    "tools": _only([]),
    "verbosity": _only("medium"),
    "web_search_options": _NOTHING,
    # names that other servers have added
    "add_generation_prompt": _only(True),
    "add_special_tokens": _NOTHING,
    "allowed_token_ids": _NOTHING,
    "bad_words": _only([]),
    "cache_salt": _NOTHING,
    "chat_template": _NOTHING,
    "chat_template_kwargs": _only({}),
    "continue_final_message": _only(False),
    "documents": _only([]),
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "include_reasoning": _ANY_FLAG,
    "length_penalty": _only(1.0),
    "logits_processors": _only([]),
    "prompt_logprobs": _NOTHING,
    "return_token_ids": _only(False),
    "return_tokens_as_token_ids": _only(False),
    "spaces_between_special_tokens": _only(True),
    "structured_outputs": _NOTHING,
    "thinking": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "use_beam_search": _only(False),
}

MESSAGE_FIELDS: dict[str, Inert] = {
    "annotations": _only([]),
    "audio": _NOTHING,
    "function_call": _NOTHING,
    "reasoning": _NOTHING,
    "reasoning_content": _NOTHING,
    "refusal": _NOTHING,
    "tool_calls": _only([]),
}

TOKENIZE_CHAT_FIELDS: dict[str, Inert] = {
    "add_special_tokens": _only(False),  # the template writes them
    "chat_template": _NOTHING,
    "tool_choice": _only("none", "auto"),
}

STREAM_FIELDS: dict[str, Inert] = {"include_obfuscation": _only(False)}

NO_FIELDS: dict[str, Inert] = {}
