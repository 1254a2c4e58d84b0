"""Fields that clients know and we do not implement: accepted where they would change nothing.

Real clients send such fields at their defaults (`best_of: 1`, `tools: []`); refusing those would
break them, and ignoring other values would answer a question nobody asked. So each name has the
values that have no effect; a type stands for all of its values (hints that never change an answer:
cache keys, end-user ids). A feature that is built moves from here into the wire models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Inert = Mapping[str, tuple[Any, ...]]

REQUEST_FIELDS: Inert = {
    # OpenAI
    **dict.fromkeys(("audio", "moderation", "prediction", "web_search_options"), ()),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier"), (str,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("functions", "tools"), ([],)),
    **dict.fromkeys(("echo", "store"), (False,)),
    "best_of": (1,),
    "modalities": (["text"],),
    **dict.fromkeys(("include_reasoning", "parallel_tool_calls"), (bool,)),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": (str,),  # of a chat it goes to the template
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "verbosity": ("medium",),
    # names that other servers have added
    **dict.fromkeys(("add_special_tokens", "cache_salt", "chat_template"), ()),
    **dict.fromkeys(("thinking", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("documents", "logits_processors"), ([],)),
    "continue_final_message": (False,),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "spaces_between_special_tokens"), (True,)),
    "chat_template_kwargs": ({},),
    "length_penalty": (1.0,),
}
MESSAGE_FIELDS: Inert = {
    **dict.fromkeys(("audio", "function_call", "refusal"), ()),
    "annotations": ([],),
    "provider_specific_fields": (dict,),  # LiteLLM puts it into answers that it hands out
}
TOKENIZE_CHAT_FIELDS: Inert = {
    "add_special_tokens": (False,),  # the template writes them
    "chat_template": (),
}
STREAM_FIELDS: Inert = {"include_obfuscation": (False,)}


def has_no_effect(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether `value` is one of the accepted ones; 1 and 1.0 are the same only to a number."""
    return any(_fits(value, one) for one in accepted)


def _fits(value: Any, accepted: Any) -> bool:
    if isinstance(accepted, type):
        return isinstance(value, accepted)
    kinds = (int, float) if isinstance(accepted, float) else (type(accepted),)
    return type(value) in kinds and bool(value == accepted)


def shown(accepted: tuple[Any, ...]) -> str:
    """What may be sent, for the error message."""
    types = {str: "a string", bool: "true or false", dict: "an object"}
    words = [types[one] if isinstance(one, type) else json.dumps(one) for one in accepted]
    return " or ".join(words) or "null"


def schema(accepted: tuple[Any, ...]) -> dict[str, Any]:
    """The same for the OpenAPI document."""
    types = {str: "string", bool: "boolean", dict: "object"}
    kinds = [{"type": types[one]} if isinstance(one, type) else {"const": one} for one in accepted]
    return {"anyOf": [*kinds, {"type": "null"}]}
