"""`tests.support.hash_engine` as a client or a server sees it: in a thread, or in processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.engine.client.mailbox import MailboxLimits
from infer.engine.core import EngineCore
from infer.engine.loop import EngineThread
from infer.replicas.fleet import Fleet
from infer.replicas.launch import FleetSettings, LaunchedEngines, start_engines
from infer.replicas.process_transport import ProcessTransport
from infer.replicas.replica import Replica
from infer.schedule.sequence import Plan
from infer.text.tokenizer import Tokenizer
from infer.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from tests.support.hash_engine import (
    HashRunner,
    limits_of,
    make_hash_core,
    small_text_files,
)

FACTORY = "tests.support.hash_engine:hash_blueprint"
"""Of an engine in a process, which then imports nothing of texts and servers."""


class LastingTokenizer(Tokenizer):
    """A tokenizer that many tests share: the processes that render its template outlast an engine,
    as starting one takes longer than most tests. Servers that tests start end theirs as usual."""

    def rest(self) -> None:
        """End the processes, unless the next test needs them."""
        if "pytest" not in sys.modules:
            super().rest()


@lru_cache
def small_tokenizer() -> Tokenizer:
    """The tokenizer of `small_text_files`."""
    return LastingTokenizer(small_text_files())


def make_hash_llm(
    *,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    mailbox_limits: MailboxLimits | None = None,
    defaults: SamplingDefaults = NO_DEFAULTS,
    **settings: Any,
) -> AsyncLLM:
    """The real asyncio façade over a hash core; `settings` go to `make_hash_core`."""
    core = make_hash_core(**settings)
    tokenizer = tokenizer or small_tokenizer()
    input_processor = InputProcessor(tokenizer, limits_of(core), seed, defaults)
    return AsyncLLM(EngineThread(core), input_processor, "hash-model", mailbox_limits)


def held_runner() -> tuple[type[HashRunner], threading.Event, threading.Event]:
    """A runner whose steps wait; an event that is set in the first step, and one that ends the
    waiting."""
    arrived, opened = threading.Event(), threading.Event()

    class Held(HashRunner):
        def execute(self, plan: Plan) -> Any:
            arrived.set()
            assert opened.wait(30)
            return super().execute(plan)

    return Held, arrived, opened


def thread_of(llm: AsyncLLM) -> EngineThread:
    """The thread of an engine that has one in this process."""
    assert isinstance(llm.engine_client, EngineThread)
    return llm.engine_client


def core_of(llm: AsyncLLM) -> EngineCore:
    """The core of an engine in a thread of this process."""
    return thread_of(llm).core


def replica_of(llm: AsyncLLM) -> Replica:
    """An engine that has a process of its own."""
    (replica,) = replicas_of(llm)
    return replica


def replicas_of(llm: AsyncLLM) -> list[Replica]:
    """All engines of a façade, each with a process of its own."""
    assert isinstance(llm.engine_client, Fleet)
    found = []
    for replica in llm.engine_client.replicas.values():
        assert isinstance(replica, Replica)
        found.append(replica)
    return found


def process_id(replica: Replica) -> int | None:
    """The id of the process of an engine, if it takes commands."""
    assert isinstance(replica.transport, ProcessTransport)
    return replica.transport.pid


def pid_of(llm: AsyncLLM) -> int:
    """The id of the running engine process."""
    pid = process_id(replica_of(llm))
    assert pid is not None
    return pid


def launch_factory(
    factory: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    fleet: FleetSettings | None = None,
    **how: Any,
) -> AsyncLLM:
    """`launch` for any `module:function` that makes a `Blueprint` of `settings`; `how`: see
    `start_engines`."""
    fleet = fleet or FleetSettings()
    return start_engines(factory, settings, num_replicas=fleet.replicas, **how).llm(fleet, seed)


def launch_hash_llm(factory: str = FACTORY, **settings: Any) -> AsyncLLM:
    """`make_hash_llm` with the engine in a process of its own."""
    how = _how_to_launch(settings, "seed", "fleet")
    return launch_factory(factory, settings, **how)


def start_hash_engines(factory: str = FACTORY, **settings: Any) -> LaunchedEngines:
    """The engines of `launch_hash_llm` without their façade."""
    how = _how_to_launch(settings, "num_replicas")
    return start_engines(factory, settings, **how)


def _how_to_launch(settings: dict[str, Any], *more: str) -> dict[str, Any]:
    """What says how to launch, taken out of settings."""
    limits = ("hang_s", "soft_limit_s", "max_pause_s", "standby_answer_s")
    names = (*limits, "standby", "early", *more)
    return {name: settings.pop(name) for name in names if name in settings}
