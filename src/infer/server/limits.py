"""What the server takes from a client at most; every count that a client chooses has a cap here.

Ranges of sampling values are not here but in `infer.types`, because they hold for Python callers
too. Lengths in tokens are the engine's business (`AsyncLLM.make_request`).
"""

from __future__ import annotations

MAX_BODY_BYTES = 2 * 1024 * 1024
LONG_BODY_BYTES = 32 * 1024
"""from here on the prompt is turned into tokens off the event loop, not to delay other streams"""
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 50_000
"""objects and arrays in one body: bounds the time the parser may keep the event loop"""
MAX_INTEGER_DIGITS = 20
"""2**64 has 20; longer integers are not numbers that any field could mean"""
MAX_NAME_CHARS = 64
"""of a client's field name or value quoted back in an error"""

MAX_CHOICES_PER_PROMPT = 8
MAX_CHOICES = 256
"""prompts x n of one request"""
MAX_MESSAGES = 1024
MAX_CHAT_STOP_STRINGS = 4
MAX_TOP_LOGPROBS = 20
MAX_METADATA_ENTRIES = 16
MAX_TOOLS = 128
"""OpenAI's limit too"""
MAX_PRIORITY = 2**31 - 1

BODY_TIMEOUT_S = 30.0
"""a body that is not there by then is answered with 408"""
WRITE_STALL_S = 30.0
"""a reader that takes nothing for so long has lost its stream"""
MAX_HEADER_BYTES = 16 * 1024
DEAD_RETRY_AFTER_S = 5
"""Retry-After of a 503 that says nothing about when"""
