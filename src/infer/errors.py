"""Every exception that `infer` raises on purpose.

    InferError
    ├── RequestError            the caller's fault; has the fields of an HTTP answer       400
    │   ├── UnprocessableError  well-formed, but a value is out of range or unknown        422
    │   ├── OverloadedError     the request is right, but there is no room for it          503
    │   ├── RevokedKeyError     its key was revoked while it ran                           401
    │   ├── CancelledError      its owner or an administrator cancelled it                 499
    │   └── DeadlineError       it took longer than it was allowed to                      504
    ├── EngineError             our fault, while running                                   500
    │   ├── EngineDeadError     there is no engine: it was closed, or it died              503
    │   ├── MovedStreamError    no engine is left that computes a stream's next bits       503
    │   └── DeviceLostError     the device has stopped computing: the process must end     503
    └── LoadError               at start-up: a checkpoint that cannot be used
        └── ConfigError         at start-up: a setting that cannot be used; names the field

A message says what was wrong, where, and what would be right. Callers see it unchanged, so it never
contains a path, an address or a traceback of the server.
"""

from __future__ import annotations


class InferError(Exception):
    """The root of the tree; whoever catches it catches every exception of `infer`."""


class RequestError(InferError, ValueError):
    """A request that cannot be served as it was asked. Also a `ValueError` for Python callers.

    `status` is the HTTP status. `type`, `param` and `code` are the fields of OpenAI's error body.
    Where `retry_after_s` is given, the same request may be sent again after so many seconds.
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


def too_long(max_seq_len: int, excess: str, *, param: str) -> RequestError:
    """The error for a prompt and an output that do not fit into `max_seq_len` tokens together.

    It has OpenAI's status and words, because clients look for them to shorten a prompt or to go to
    another model (LangChain, LiteLLM, Pydantic AI, aiperf).
    """
    message = f"this model's maximum context length is {max_seq_len} tokens, input and output"
    return RequestError(
        f"{message} together; {excess}", param=param, code="context_length_exceeded"
    )


class UnprocessableError(RequestError):
    """The request can be read, but it asks for something unknown or out of range."""

    status = 422


class OverloadedError(RequestError):
    """There is no room now; the same request may be sent again."""

    status = 503
    type = "overloaded_error"
    usual_code = "overloaded"
    retry_after_s = 1


def too_many_tokens(num_waiting: int, num_added: int, limit: int) -> OverloadedError:
    """The error for prompts of `num_added` tokens where prompts of `num_waiting` wait for a seat
    and at most `limit` may."""
    excess = f"{num_waiting} prompt tokens wait for a seat, and {num_added} more would exceed"
    return OverloadedError(f"the server is busy: {excess} max_waiting_tokens, which is {limit}")


class RevokedKeyError(RequestError):
    """The key of the request was revoked while it ran."""

    status = 401
    usual_code = "invalid_api_key"


class CancelledError(RequestError):
    """The request was cancelled by its owner or by an administrator."""

    status = 499


class DeadlineError(RequestError):
    """The request took longer than it was allowed to."""

    status = 504
    type = "timeout_error"


class EngineError(InferError):
    """The engine failed in a request. That request is over; others may go on."""

    status = 500
    type = "server_error"


class EngineDeadError(EngineError):
    """The engine was closed or has died; it produces nothing more."""

    status = 503


class MovedStreamError(EngineError):
    """The engine that computed a stream has gone, and no other one computes the same bits."""

    status = 503


class DeviceLostError(EngineError):
    """The device is in a state that only a new process can leave, as after a fault on a GPU."""

    status = 503


MAX_LOAD_MESSAGE_CHARS = 1800
"""A hostile file can make a library quote the whole of it."""


class LoadError(InferError):
    """A checkpoint cannot be loaded. The message lists everything that is wrong with it."""

    def __init__(self, message: str) -> None:
        if len(message) > MAX_LOAD_MESSAGE_CHARS:
            message = message[: MAX_LOAD_MESSAGE_CHARS - 1] + "…"
        super().__init__(message)


class ConfigError(LoadError, ValueError):
    """A setting is unknown, is out of range, or conflicts with another one."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
