"""`infer`: an inference engine and server for large language models.

The public names are imported on first use, so that `import infer` costs nothing and the parts
that need no torch (types, errors, the scheduler, the server) can be used without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infer.version import VERSION

if TYPE_CHECKING:
    from infer.config import EngineConfig
    from infer.engine.client.async_llm import AsyncLLM
    from infer.engine.core import EngineCore
    from infer.engine.llm import LLM
    from infer.errors import InferError, LoadError, RequestError
    from infer.types import FinishReason, RequestOutput, SamplingParams, TextDelta
    from infer.types.grammar import Grammar

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "EngineCore",
    "FinishReason",
    "Grammar",
    "InferError",
    "LoadError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TextDelta",
]

_LAZY = {
    "LLM": "infer.engine.llm",
    "AsyncLLM": "infer.engine.client.async_llm",
    "EngineConfig": "infer.config",
    "EngineCore": "infer.engine.core",
    "Grammar": "infer.types.grammar",
    **dict.fromkeys(("InferError", "LoadError", "RequestError"), "infer.errors"),
    **dict.fromkeys(
        ("FinishReason", "RequestOutput", "SamplingParams", "TextDelta"), "infer.types"
    ),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
