"""Bodies as agents send them, with many fields in them."""

from __future__ import annotations

from typing import Any

Json = Any

SCHEMA: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION: Json = {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL: Json = {"type": "function", "function": FUNCTION}
NAMED: Json = {"type": "function", "function": {"name": "weather"}}
FLAT_TOOL: Json = {"type": "function", **FUNCTION}
TEXT: Json = {"type": "text", "text": "t"}
CACHED: Json = {**TEXT, "cache_control": {"type": "ephemeral"}}


def _call(call_id: str, arguments: str) -> Json:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


HISTORY: list[Json] = [
    {"role": "system", "content": [TEXT]},
    {"role": "user", "content": [TEXT]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [_call("a", '{"city": 1.50}'), _call("b", "{}")],
    },
    {"role": "tool", "tool_call_id": "a", "content": [TEXT], "name": "weather"},
    {"role": "tool", "tool_call_id": "b", "content": "x"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "w", "refusal": None},
    {"role": "user", "content": "z", "name": "n"},
]
CHAT: Json = {
    "messages": HISTORY,
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_completion_tokens": 4,
    "stop": ["a"],
    "logit_bias": {"5": 1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 1,
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"x": 1},
    "reasoning_effort": "low",
    "temperature": 1,
    "seed": 1,
    "user": "u",
}
STREAMED: Json = {
    "messages": [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [TEXT, TEXT]},
        {
            "role": "assistant",
            "content": [TEXT, {"type": "refusal", "refusal": "b"}, {"type": "thinking"}],
        },
        {"role": "user", "content": "q"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
    },
    "max_tokens": 4,
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "prediction": {"type": "content", "content": "abc"},
}
ALLOWED: Json = {
    "messages": [{"role": "user", "content": "u"}],
    "tools": [TOOL],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [NAMED]},
    },
    "max_tokens": 4,
}
FORCED: Json = {**ALLOWED, "tool_choice": NAMED, "stream": True}
SAMPLED: Json = {
    "messages": [{"role": "user", "content": "u"}],
    "structured_outputs": {"json": SCHEMA},
    "max_tokens": 4,
    "prompt_logprobs": 1,
    "top_k": 3,
    "min_p": 0.1,
    "stop_token_ids": [5],
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["a"],
}
BLOCKS: list[Json] = [
    {"role": "user", "content": [TEXT]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            TEXT,
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": 1.5}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT], "is_error": False},
            {"type": "tool_result", "tool_use_id": "t2", "content": "x"},
            TEXT,
        ],
    },
]
COUNTED: Json = {
    "system": [CACHED],
    "messages": BLOCKS,
    "tools": [
        {
            "name": "weather",
            "description": "d",
            "input_schema": SCHEMA,
            "cache_control": {"type": "ephemeral"},
        }
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
MESSAGES: Json = {
    **COUNTED,
    "max_tokens": 4,
    "stop_sequences": ["q"],
    "temperature": 1,
    "top_k": 3,
    "stream": True,
    "metadata": {"user_id": "u"},
}
DOCUMENTS: Json = {
    "max_tokens": 4,
    "thinking": {"type": "adaptive"},
    "output_config": {
        "effort": "low",
        "format": {"type": "json_schema", "schema": SCHEMA},
    },
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                    "title": "t",
                    "context": "c",
                },
                {"type": "search_result", "source": "s", "title": "t", "content": [TEXT]},
                {"type": "image", "source": {"type": "url", "url": "u"}},
                CACHED,
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x"}, TEXT],
        },
        {"role": "system", "content": "l"},
        {"role": "user", "content": "z"},
    ],
}
INPUT: Json = {
    "instructions": "i",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "d"}],
        },
        {"role": "user", "content": "u"},
        {
            "type": "reasoning",
            "id": "r1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "id": "f1",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city":1.50}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "o"}],
        },
        {"type": "function_call_output", "call_id": "c2", "output": "o2"},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "z"}]},
    ],
    "tools": [FLAT_TOOL, {"type": "custom", "name": "p", "format": {"type": "text"}}],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "truncation": "auto",
}
RESPONSE: Json = {
    **INPUT,
    "max_output_tokens": 16,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
NAMESPACES: Json = {
    "max_output_tokens": 16,
    "tools": [
        {
            "type": "namespace",
            "name": "ns",
            "tools": [{"type": "function", "name": "g", "parameters": SCHEMA}],
        },
        {
            "type": "custom",
            "name": "p",
            "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
        },
        {"type": "web_search"},
    ],
    "input": [
        {"role": "user", "content": "u"},
        {
            "type": "additional_tools",
            "tools": [{"type": "function", "name": "h", "parameters": SCHEMA}],
        },
        {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "aa"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "r"},
        {
            "type": "function_call",
            "namespace": "ns",
            "call_id": "d",
            "name": "g",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "d", "output": "r"},
        {"type": "web_search_call", "id": "w"},
    ],
    "text": {
        "format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True},
    },
    "tool_choice": "none",
}
COMPLETION: Json = {
    "prompt": ["a", "b"],
    "max_tokens": 4,
    "n": 2,
    "logprobs": 2,
    "echo": True,
    "stop": ["x"],
    "logit_bias": {"3": 2},
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 1,
}
BODIES: dict[str, tuple[Json, ...]] = {
    "/v1/chat/completions": (CHAT, STREAMED, ALLOWED, FORCED, SAMPLED),
    "/v1/chat/completions/render": (CHAT,),
    "/v1/completions": (COMPLETION, {**COMPLETION, "prompt": [[1, 2], [3]]}),
    "/v1/messages": (MESSAGES, DOCUMENTS),
    "/v1/messages/count_tokens": (COUNTED,),
    "/v1/responses": (RESPONSE, NAMESPACES),
    "/v1/responses/input_tokens": (INPUT,),
    "/tokenize": (
        {"messages": HISTORY, "tools": [TOOL], "add_generation_prompt": True},
        {"prompt": "a", "return_token_strs": True},
    ),
    "/detokenize": ({"tokens": [1, 2]},),
    "/v1/models/load": ({"model": "other"},),
    "/v1/models/unload": ({"model": "other", "force": True},),
    "/v1/sessions": ({"title": "t", "messages": HISTORY},),
    "/v1/sessions/{id}": ({"title": "t"},),
    "/v1/sessions/{id}/fork": ({"at": 1},),
    "/v1/mcp/call": ({"server": "s", "tool": "t", "arguments": {"a": [1]}},),
}
"""Path → bodies that it takes."""
