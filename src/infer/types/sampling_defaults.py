"""`SamplingDefaults`: what a checkpoint says about the fields that a request leaves out.

It travels with the checkpoint's text files, so whoever makes requests for a model knows its
defaults, wherever the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infer.types.sampling import DEFAULTED, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The fields of `DEFAULTED`, for requests without their own; None = the checkpoint does not
    say, and the field has its fixed default."""

    source: str = ""
    """What names the values, for people; empty where nothing does."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    """A limit that is cut where the context has less room."""
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    """Sentences about what could not be used, for the log."""

    @property
    def values(self) -> dict[str, Any]:
        """The values that there are, by the name of the field; in order."""
        names = (name for name in self.__slots__ if name in DEFAULTED)
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def as_dict(self) -> dict[str, Any]:
        """The values and `source`, for JSON."""
        return {**self.values, "source": self.source or None}

    def __str__(self) -> str:
        """One line for people: the values and where they are from."""
        if not self.values:
            return "the fixed ones of the API"
        shown = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{shown} (from {self.source})"

    def fill(self, params: SamplingParams) -> SamplingParams:
        """`params` with these values for the fields that it does not give. A default never
        contradicts what is given: limits of the length make room for each other."""
        filled = {name: value for name, value in self.values.items() if name not in params.given}
        least = max(params.min_tokens, filled.get("min_tokens", 0))
        if "max_tokens" in filled:
            filled["max_tokens"] = max(filled["max_tokens"], least)
        elif "min_tokens" in filled and "max_tokens" in params.given and params.max_tokens:
            filled["min_tokens"] = min(least, params.max_tokens)
        return params.replace(**filled) if filled else params


NO_DEFAULTS = SamplingDefaults()
"""Those of a model that says nothing: the fixed ones."""
