"""Makers of a façade over one engine and over two, for tests that both must pass alike."""

from __future__ import annotations

from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.replicas.launch import FleetSettings
from tests.support.doubles import launch_hash_llm, make_hash_llm

COMMANDS = pytest.mark.parametrize(
    "options", [[], ["--replicas", "2"]], ids=["one_engine", "two_engines"]
)
"""Runs a test with the options of a server with one engine, and of one with two."""


def launch_two_hash_llms(*, max_batch_size: int = 8, **settings: Any) -> AsyncLLM:
    """Two engines of a hash model, each with half of the seats, in a process of its own."""
    fleet = FleetSettings(replicas=2)
    return launch_hash_llm(fleet=fleet, max_batch_size=max_batch_size // 2, **settings)


ENGINES = (
    pytest.param(make_hash_llm, id="one_engine"),
    pytest.param(launch_two_hash_llms, id="two_engines", marks=pytest.mark.slow),
)
"""Parameters of tests and fixtures; two engines are slow."""
