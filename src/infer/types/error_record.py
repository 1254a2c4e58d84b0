"""`ErrorRecord`: an error as plain data, made an exception again where the caller is."""

from __future__ import annotations

from dataclasses import dataclass

import infer.errors as errors
from infer.errors import ConfigError, EngineError, InferError, RequestError


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as it crosses a boundary: exceptions stay on their side, plain data travels."""

    message: str
    kind: str = EngineError.__name__
    """The nearest class of `infer.errors`."""
    param: str | None = None
    """The field that is to blame, of a request or of the settings."""
    code: str | None = None

    @classmethod
    def of(cls, error: InferError) -> ErrorRecord:
        """What `exception` makes an equal error of on the other side."""
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        if isinstance(error, RequestError):
            return cls(error.message, kind.__name__, error.param, error.code)
        if isinstance(error, ConfigError):
            return cls(str(error).removeprefix(f"{error.field}: "), kind.__name__, error.field)
        return cls(str(error), kind.__name__)

    def exception(self) -> InferError:
        """The error, to be raised where the caller is."""
        kind: type[InferError] = getattr(errors, self.kind)
        if issubclass(kind, RequestError):
            return kind(self.message, param=self.param, code=self.code)
        if issubclass(kind, ConfigError):
            return kind(self.param or "", self.message)
        return kind(self.message)
