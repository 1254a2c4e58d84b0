"""The shape of a plot.

Owns the Plot record that the plot files fill with text and stories.py tells. A paragraph
is a tuple of beats in the language of templates.py; a beat that begins with "?" may be left
out. A fact is a question and its answer; "|" separates ways to ask the same question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from words import THINGS


@dataclass(frozen=True)
class Plot:
    """One story skeleton with its own word choices and the questions it can answer."""

    themes: tuple[str, ...]
    """What the story can be said to be about, when somebody asks for one."""
    paragraphs: tuple[tuple[str, ...], ...]
    facts: tuple[tuple[str, str], ...]
    things: tuple[str, ...] = THINGS
    """The things that make sense in this plot."""
    picks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Plot-specific slots. A key such as "skill/skilled" takes values such as "swim/swam"."""
