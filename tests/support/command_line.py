"""Typer's runner for tests, which makes a program's commands once.

Of `infer` it takes 20 ms or more, each time that a test calls it.
"""

from __future__ import annotations

import functools
from typing import Any

from typer import testing
from typer.testing import CliRunner

__all__ = ["CliRunner"]

made: Any = testing
made._get_command = functools.cache(made._get_command)
