"""Every exception that `infer` raises on purpose.

    InferError
    ├── RequestError            the caller's fault; carries what an HTTP answer needs      400
    │   ├── UnprocessableError  well-formed, but a value is out of range or unknown        422
    │   ├── OverloadedError     nothing wrong with the request: there is no room for it    503
    │   ├── CancelledError      somebody who may has cancelled it                          499
    │   └── DeadlineError       it was not done in the time it had                         504
    ├── EngineError             our fault, while running                                   500
    │   ├── EngineDeadError     the engine is not there (closed, or died)                  503
    │   └── DeviceLostError     the device does not compute any more: the process must end 503
    └── LoadError               start-up: a checkpoint that cannot be used
        └── ConfigError         start-up: a setting that cannot be used; names the field

Messages say what was wrong, where, and what would be right. They are shown to callers as they
are, so they never contain paths of the server, addresses or tracebacks of it.
"""

from __future__ import annotations


class InferError(Exception):
    """Root of the tree; catch it to catch everything that is ours."""


class RequestError(InferError, ValueError):
    """A request that cannot be served as it was asked. Also a `ValueError` for Python callers.

    `status` is the HTTP status, `type`, `param` and `code` are the fields of OpenAI's error body;
    the same request may be sent again after `retry_after_s` seconds, if that is given.
    """

    status = 400
    type = "invalid_request_error"
    usual_code: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.usual_code


def too_long(max_seq_len: int, found: str, *, param: str) -> RequestError:
    """Prompt and output do not fit. OpenAI's status and words: clients that shorten a prompt, or
    go to another model, know it by them (LangChain, LiteLLM, Pydantic AI, aiperf)."""
    message = f"this model's maximum context length is {max_seq_len} tokens, input and output"
    return RequestError(f"{message} together; {found}", param=param, code="context_length_exceeded")


class UnprocessableError(RequestError):
    """The request can be read, but asks for something that does not exist or is out of range."""

    status = 422


class OverloadedError(RequestError):
    """No room right now; the same request may be sent again."""

    status = 503
    type = "overloaded_error"
    usual_code = "overloaded"
    retry_after_s = 1


class CancelledError(RequestError):
    """The request was cancelled by its owner."""

    status = 499


class DeadlineError(RequestError):
    """The request was not done in the time that it had."""

    status = 504
    type = "timeout_error"


class EngineError(InferError):
    """The engine failed while working on a request; the request is over, others may go on."""

    status = 500
    type = "server_error"


class EngineDeadError(EngineError):
    """The engine was closed or has died; nothing more will come from it."""

    status = 503


class DeviceLostError(EngineError):
    """The device is in a state that only a new process gets it out of (a fault on a GPU)."""

    status = 503


MAX_LOAD_MESSAGE_CHARS = 1800
"""a hostile file can make a library quote the whole of it"""


class LoadError(InferError):
    """A checkpoint cannot be loaded; the message lists everything that is wrong with it."""

    def __init__(self, message: str) -> None:
        if len(message) > MAX_LOAD_MESSAGE_CHARS:
            message = message[: MAX_LOAD_MESSAGE_CHARS - 1] + "…"
        super().__init__(message)


class ConfigError(LoadError, ValueError):
    """A setting is unknown, out of range or does not go with another one."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
