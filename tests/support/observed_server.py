"""A server with a route for its internal state: `infer serve` as the tests here use it.

`python observed_server.py OPTIONS` is `python -m infer.server OPTIONS` on the shipped model;
`python observed_server.py hash JSON OPTIONS` has a hash model made with the settings in JSON (which
answers in microseconds); with `fronts` in it, without the route. `GET /test/stats` returns counts,
memory, files, threads and tasks, and since the last call: the longest time for which the event loop
was blocked, how long its thread computed between two iterations (which the machine's load does not
change), and the time of each 503.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.cli.main import main
from infer.engine.client.async_llm import AsyncLLM
from infer.replicas.fleet import Fleet
from infer.server import address, app, early_listener, front_keeper, front_places, serve
from infer.server.settings import ServerSettings
from infer.server.turn_away import TurnAway
from tests.support.doubles import process_id, replicas_of

make_app = app.create_app


class Observer:
    """Measures the values of the route."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._lag_s = self._busy_s = 0.0
        self._watching: asyncio.Task[None] | None = None
        self.refused_s: list[float] = []

    async def _watch(self) -> None:
        while True:
            before_s, worked_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.002)
            self._busy_s = max(self._busy_s, time.thread_time() - worked_s)
            self._lag_s = max(self._lag_s, time.monotonic() - before_s - 0.002)

    async def stats(self, _: Request) -> JSONResponse:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        has_process = isinstance(self._engine.engine_client, Fleet)
        engine = process_id(replicas_of(self._engine)[0]) if has_process else None
        lag_s, self._lag_s = self._lag_s, 0.0
        busy_s, self._busy_s = self._busy_s, 0.0
        refused_s, self.refused_s = self.refused_s, []
        return JSONResponse(
            {
                **self._engine.stats(),
                "memory": memory("self"),
                "engine_memory": memory(engine) if engine else 0,
                "fds": len(list(Path("/proc/self/fd").iterdir())),
                "threads": len(list(Path("/proc/self/task").iterdir())),
                "tasks": len(asyncio.all_tasks()),
                "waiting_at": _waiting_at(),
                "lag_s": lag_s,
                "busy_s": busy_s,
                "refused_s": refused_s,
                "engine_pid": engine,
            }
        )


def _waiting_at() -> list[str]:
    """Where each task waits, if there are few: of 2,000 it would take a third of the event loop."""
    tasks = asyncio.all_tasks()
    return sorted(map(where, tasks)) if len(tasks) <= 100 else [f"{len(tasks)} tasks"]


def where(task: asyncio.Task[Any]) -> str:
    """The functions of a task, from the outermost to the one that waits."""
    names: list[str] = []
    found: Any = task.get_coro()
    while found is not None:
        frame = getattr(found, "cr_frame", None)
        line = f":{frame.f_lineno}" if frame else ""
        names.append(getattr(found, "__qualname__", type(found).__name__) + line)
        found = getattr(found, "cr_await", None)
    return " > ".join(names)


def memory(pid: object) -> int:
    """Bytes of a process that no file backs, swapped ones included."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    kinds = ("RssAnon:", "VmSwap:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.split()[0] in kinds)


class Timed:
    """A layer around the app that measures each 503, from the time the headers were read."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.monotonic()

        async def timed(message: Message) -> None:
            await send(message)
            if message.get("status") == 503:
                self._observer.refused_s.append(time.monotonic() - began_s)

        await self._app(scope, receive, timed)


class TimedTurnAway(TurnAway):
    """`TurnAway` that measures each refusal."""

    observers: ClassVar[list[Observer]] = []

    def __call__(self, scope: Scope) -> Response | None:
        began_s = time.monotonic()
        response = super().__call__(scope)
        if response is not None:
            for observer in self.observers:
                observer.refused_s.append(time.monotonic() - began_s)
        return response


def create_app(engine: AsyncLLM, *settings: Any, **how: Any) -> Starlette:
    app, observer = make_app(engine, *settings, **how), Observer(engine)
    TimedTurnAway.observers.append(observer)
    app.router.routes.insert(0, Route("/test/stats", observer.stats))
    app.add_middleware(Timed, observer=observer)
    return app


if __name__ == "__main__":
    vars(serve).update(create_app=create_app, TurnAway=TimedTurnAway)
    if sys.argv[1] != "hash":
        main(["serve", *sys.argv[1:]])
    from tests.support.doubles import launch_hash_llm, start_hash_engines

    how = json.loads(sys.argv[2])
    names = {field.name for field in dataclasses.fields(ServerSettings)}
    settings = ServerSettings(**{name: how.pop(name) for name in names & how.keys()})
    if settings.fronts > 1:
        with (
            early_listener.listening(settings, "127.0.0.1", 0, ["hash"]) as listener,
            front_places.front_places(listener, settings) as places,
        ):
            engines = start_hash_engines(num_replicas=settings.replicas, **how)
            front_keeper.run_fronts(engines, places, listener, settings)
        sys.exit()
    bound = address.bind(port=0, write_stall_s=settings.write_stall_s)
    with address.unix_socket(settings.uds) if settings.uds else bound as sock:
        serve.run(launch_hash_llm(**how), sock, settings)
