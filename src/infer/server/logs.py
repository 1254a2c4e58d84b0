"""Structured logs: a line of JSON for each log record and, at its end, for each request.

Ids, sizes, times and names of keys; never the text of a prompt or an answer. JSON escapes control
characters, so nobody can forge a line. Made and installed by `serve` with `--log-format json`.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from infer.server.visit import Visit

access = logging.getLogger("infer.access")


class JsonLines(logging.Formatter):
    """One object a line; what is in a record's `fields` becomes members of it."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_visit(visit: Visit) -> None:
    """A request that has been answered, or whose client has left; and what became of it."""
    if not access.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": visit.id,
        "client_request_id": visit.client_id,
        "key": visit.key_name or None,
        "method": visit.method,
        "path": visit.path,
        "status": visit.status or 499,
        "ms": round(1000 * (time.monotonic() - visit.received_s), 3),
        **visit.told,
    }
    access.info("request", extra={"fields": fields})
