"""`LOG_FIELDS`: what every line carries that a thread or task writes to the log, such as the model

With several models in one server, the threads that follow an engine set it. The formatter of JSON
lines reads it in the thread that logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

LOG_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default=MappingProxyType({}))
"""Names and values; its owner may add to it while it is set."""
