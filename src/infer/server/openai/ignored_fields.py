"""Fields of other APIs that are not implemented, with the values for which they are accepted

Real clients send such fields with their defaults (`best_of: 1`, `tools: []`). Refusing those would
break the clients; ignoring other values would give an answer that was not asked for. So each name
has a list of values that have no effect. A type stands for all of its values, for hints that never
change an answer (cache keys, ids of end users). A field that gets implemented moves to the models.

Some of these fields only ask for another price, speed, style or storage (`HINTS`). An answer
without them is still what was asked for. So they count as unknown fields do: unless the server is
strict they are left out and named in a header of the answer (`note`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

IgnoredValues = Mapping[str, tuple[Any, ...]]
"""Field name → values without effect; a type stands for all of its values."""

REQUEST_FIELDS: IgnoredValues = {
    # OpenAI
    **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier"), (str,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("functions", "tools"), ([],)),
    **dict.fromkeys(("echo", "store"), (False,)),
    "best_of": (1,),
    "modalities": (["text"],),
    **dict.fromkeys(("include_reasoning", "parallel_tool_calls"), (bool,)),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": (str,),  # a chat passes it to the template
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "truncation": ("disabled",),  # a chat has turns that can be left out
    "verbosity": ("medium",),
    # other servers' extensions
    **dict.fromkeys(("add_special_tokens", "cache_salt", "chat_template"), ()),
    **dict.fromkeys(("thinking", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("documents", "logits_processors"), ([],)),
    "continue_final_message": (False,),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "spaces_between_special_tokens"), (True,)),
    "chat_template_kwargs": ({},),
    "length_penalty": (1.0,),
}
MESSAGE_FIELDS: IgnoredValues = {
    **dict.fromkeys(("audio", "function_call"), ()),
    "annotations": (list,),  # OpenAI's answers have them, and clients send them back
    "refusal": (str,),  # `Message` reads it where there is no content
    "provider_specific_fields": (dict,),  # LiteLLM adds it to answers, and clients send it back
}
TOKENIZE_CHAT_FIELDS: IgnoredValues = {
    "add_special_tokens": (False,),  # the template adds them
    "chat_template": (),
    "truncation": ("disabled",),
}
STREAM_FIELDS: IgnoredValues = {"include_obfuscation": (False,)}
HINTS = frozenset(
    ("include_obfuscation", "length_penalty", "prompt_cache_options", "prompt_cache_retention",
     "service_tier", "spaces_between_special_tokens", "store", "thinking", "verbosity")
)  # fmt: skip
"""Those of the fields above that may be left out whatever their value is."""
_TYPES: Mapping[type, tuple[str, str]] = {
    str: ("a string", "string"),
    bool: ("true or false", "boolean"),
    int: ("a number", "integer"),
    dict: ("an object", "object"),
    list: ("a list", "array"),
}
"""Names of types in an error message and in JSON Schema."""
MAX_NOTED = 32
"""Maximum number of ignored names that an answer tells."""


def note(names: list[str], name: str) -> None:
    """Add the name of a field that is ignored, once, unless `MAX_NOTED` are there already."""
    if len(names) < MAX_NOTED and name not in names:
        names.append(name)


def has_no_effect(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether `value` is one of the accepted ones. 1 and 1.0 are the same number."""
    return any(_fits(value, form) for form in accepted)


def _fits(value: Any, accepted: Any) -> bool:
    if isinstance(accepted, type):
        return isinstance(value, accepted)
    is_number = type(accepted) in (int, float)
    kinds = (int, float) if is_number else (type(accepted),)
    return type(value) in kinds and bool(value == accepted)


def shown(accepted: tuple[Any, ...]) -> str:
    """The accepted values as text, for an error message."""
    words = [_TYPES[form][0] if isinstance(form, type) else json.dumps(form) for form in accepted]
    return " or ".join(words) or "null"


def schema(accepted: tuple[Any, ...]) -> dict[str, Any]:
    """The accepted values as JSON Schema, for the OpenAPI document."""
    kinds = [
        {"type": _TYPES[form][1]} if isinstance(form, type) else {"const": form}
        for form in accepted
    ]
    return {"anyOf": [*kinds, {"type": "null"}]}
