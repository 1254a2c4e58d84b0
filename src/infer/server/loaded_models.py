"""`LoadedModels`: which models a server has, and which of them are loaded"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import EngineDeadError, InferError, LoadError, OverloadedError
from infer.server.http.error_responses import HttpError
from infer.server.settings import ServerSettings
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

log = logging.getLogger("infer.server")

Launch = Callable[[], AsyncLLM]
"""Loads a model, in a thread; raises `LoadError`."""
Find = Callable[[], Mapping[str, Launch]]
"""What loads the models that are there now, by their names; called in a thread."""
Fits = Callable[[str, Sequence[str]], bool]
"""Whether a model fits into memory beside those that are loaded; called in a thread."""
RETRY_S = 5
"""Seconds after which a request may ask again for a model that is being loaded."""
REFRESH_S = 0.5
"""Seconds between two readings of the folder of models, whoever asks for an unknown model."""
_POLL_S = 0.02
"""Interval in seconds at which the requests of a model that is being unloaded are counted."""


@dataclass(eq=False)
class HeldModel:
    """A model's name, and its engine and app while they are loaded."""

    name: str
    launch: Launch
    is_found: bool = False
    """Whether it is there because it was found in the folder of models."""
    engine: AsyncLLM | None = None
    app: Starlette | None = None
    num_using: int = 0
    """HTTP requests that its app works on."""
    used_s: float = 0.0
    refused_until_s: float = 0.0
    reason: str = ""
    """Why it could not be loaded, without the folders of this machine; "" where it could or was not
    tried."""
    is_leaving: bool = False
    """Whether its running requests are its last ones."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The lock that loading and unloading hold."""

    @property
    def status(self) -> str:
        if self.is_leaving:
            return "unloading"
        if self.engine is not None:
            return "loaded" if self.engine.is_ready else "restarting"
        if self.changing.locked():
            return "loading"
        return "failed" if self.reason else "unloaded"

    @property
    def is_at_hand(self) -> bool:
        """Whether a request would be worked on at once."""
        return self.app is not None and not self.is_leaving

    @property
    def num_open(self) -> int:
        """The number of requests that use it."""
        return max(self.num_using, 0 if self.engine is None else self.engine.num_open)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request that its app works on: meanwhile it is not idle."""
        self.num_using += 1
        try:
            yield
        finally:
            self.num_using -= 1
            self.used_s = time.monotonic()

    def not_loaded(self) -> EngineDeadError:
        """The error of a request for a model that could not be loaded."""
        return EngineDeadError(f"the model {self.name!r} could not be loaded: {self.reason}")


class _Loader:
    """One thread that launches engines, one after the other.

    It lives as long as they do, because the system ends an engine's process with the thread that
    started it. The end of the program does not wait for it, because a load may hang.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[AsyncLLM], Launch]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="infer-load", daemon=True).start()

    def submit(self, launch: Launch) -> Future[AsyncLLM]:
        """The future result of `launch`, which is called in the thread when its turn comes."""
        future: Future[AsyncLLM] = Future()
        self._queue.put((future, launch))
        return future

    def _run(self) -> None:
        while True:
            future, launch = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(launch())
                except BaseException as error:
                    future.set_exception(error)
            del future, launch


class LoadedModels:
    """Engines are loaded one at a time, at the start, for their first request or when somebody asks
    for it, and unloaded when they are idle, when somebody asks for that, or, the one that was used
    least recently first, to make room for another one. A model in use is never unloaded for
    another. `multi_model.ModelRouter` answers requests with them. Lives on the event loop once it
    has begun."""

    def __init__(
        self,
        launches: Mapping[str, Launch],
        make_app: Callable[[AsyncLLM], Starlette],
        *,
        idle_unload_s: float | None = None,
        end_loads: Callable[[], None] = lambda: None,
        limits: ServerLimits = SERVER_LIMITS,
        find: Find | None = None,
        aliases: Mapping[str, str] | None = None,
        fits: Fits | None = None,
    ) -> None:
        """`launches` load the models by name, in a thread. `make_app` makes the app over an engine,
        without `RequestBoundary`. `idle_unload_s` is the time after which an idle model is
        unloaded; None: never. `end_loads` makes a launch that is running in another thread raise
        `LoadError`. `find`: the launches of further models, which are there now. `aliases`: names
        of models by other names of theirs. `fits`: whether a model fits beside others; None: all
        do."""
        self._models = {name: HeldModel(name, launch) for name, launch in launches.items()}
        self._settings: ServerSettings | None = None
        """Those that `apply` was given last."""
        self._make_app = make_app
        self._idle_unload_s = idle_unload_s
        self._loader = _Loader()
        self._end_loads = end_loads
        self.limits = limits
        self._ending = asyncio.Event()
        """Set when the server ends; from then on nothing is loaded."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._find = find
        self._aliases = aliases or {}
        self._fits = fits
        self._room = asyncio.Lock()
        """Held while room is made and used."""
        self._beginning: set[asyncio.Task[Starlette]] = set()
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_s = -REFRESH_S
        self.is_draining = False

    def all(self) -> Sequence[HeldModel]:
        """The models that are known, the default one first."""
        return list(self._models.values())

    def known(self, name: str) -> HeldModel | None:
        """The model that has this name or alias, if it is known."""
        return self._models.get(name) or self._models.get(self._aliases.get(name, ""))

    def aliases_of(self, model: HeldModel) -> list[str]:
        """The other names of a model."""
        return [alias for alias, name in self._aliases.items() if name == model.name]

    async def refresh(self) -> None:
        """Read the folder of models again. All who ask at a time wait for the same reading, and the
        next one is not before `REFRESH_S` have passed."""
        if self._find is None:
            return
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._find_new(self._find))
        await asyncio.shield(self._refreshing)

    async def _find_new(self, find: Find) -> None:
        try:
            await asyncio.sleep(self._refreshed_s + REFRESH_S - time.monotonic())
            launches = await asyncio.to_thread(find)
        finally:
            self._refreshing, self._refreshed_s = None, time.monotonic()
        for name, launch in launches.items():
            if name not in self._models:
                self._models[name] = HeldModel(name, launch, is_found=True)
        for model in self.all():
            is_held = model.engine is not None or model.changing.locked() or model.num_using
            if model.is_found and model.name not in launches and not is_held:
                del self._models[model.name]

    def engines(self) -> list[AsyncLLM]:
        """The engines that are loaded."""
        return [model.engine for model in self._models.values() if model.engine is not None]

    # ---- the server's life

    def load_all(self, note: Callable[[str, str], None] = lambda name, status: None) -> None:
        """Load all models before the server starts. Raises `LoadError` if none can be loaded.
        `note`: told the name and the status of each that has been tried."""
        errors = []
        for model in self._models.values():
            try:
                model.engine = self._loader.submit(model.launch).result()
            except LoadError as error:
                errors.append(error)
                self._note_failure(model, error)
            note(model.name, "loaded" if model.engine is not None else model.status)
        if errors and len(errors) == len(self._models):
            raise errors[0]

    async def begin(self) -> None:
        """Start the engines that are loaded, and the watch over idle ones."""
        self._loop = asyncio.get_running_loop()
        for model in self._models.values():
            if model.engine is not None:
                model.used_s = time.monotonic()
                await self._begin(model, model.engine)
        if self._idle_unload_s is not None:
            self._unloading = asyncio.create_task(self._unload_idle(self._idle_unload_s))

    async def end(self) -> None:
        """Close all, and save what keys have used."""
        if self._unloading is not None:
            self._unloading.cancel()
        await self.close()
        for model in self._models.values():
            _save_usage(model)

    def apply(self, settings: ServerSettings) -> None:
        """Take the live settings, for the models that are loaded later too."""
        self._settings = settings
        for model in self._models.values():
            if model.app is not None:
                model.app.state.apply(settings)

    def drain(self) -> None:
        """Let running requests finish, and refuse new ones."""
        self.is_draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
        for engine in self.engines():
            engine.drain()

    async def close(self) -> None:
        """End running requests with an error, then stop the engines."""
        self.is_draining = True
        self._ending.set()
        await asyncio.to_thread(self._end_loads)
        await asyncio.gather(*[engine.close() for engine in self.engines()])

    # ---- loading

    async def load(self, model: HeldModel) -> None:
        """Load a model that somebody asks for by name, even if that has just failed; nothing where
        it is loaded. Raises `EngineDeadError` with the reason where it cannot be loaded."""
        model.refused_until_s = 0.0
        await self.app_of(model)

    async def app_of(self, model: HeldModel) -> Starlette:
        """The app of a model, which is loaded if it is not. Raises `EngineDeadError` if it cannot
        be."""
        model.used_s = time.monotonic()
        if model.app is not None and not model.is_leaving:
            return model.app
        async with model.changing:
            if model.app is None:
                await self._load(model)
            model.used_s = time.monotonic()
            assert model.app is not None
            return model.app

    def begin_load(self, model: HeldModel) -> InferError:
        """Load a model for those who come later; returns the error of who came now."""
        if time.monotonic() < model.refused_until_s:
            return model.not_loaded()
        if not model.changing.locked():
            self.loading(model)
        message = f"the model {model.name!r} is being loaded; ask again"
        kind = OverloadedError.type
        return HttpError(503, message, code="model_loading", type=kind, retry_after_s=RETRY_S)

    def loading(self, model: HeldModel) -> asyncio.Task[Starlette]:
        """As `app_of`, in a task that goes on though nobody waits for it."""
        task = asyncio.create_task(self.app_of(model))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        task.add_done_callback(_forget)  # /v1/models has the reason
        return task

    async def _load(self, model: HeldModel) -> None:
        async with self._room:
            await self._make_room(model)
            await self._load_now(model)

    async def _make_room(self, model: HeldModel) -> None:
        """Unload what was used least recently until a model fits. Raises `OverloadedError` where
        all others are in use."""
        while self._fits is not None and not self.is_draining:
            held = [loaded for loaded in self.all() if loaded.engine is not None]
            names = [loaded.name for loaded in held]
            if not held or await asyncio.to_thread(self._fits, model.name, names):
                return
            idle = [loaded for loaded in held if not (loaded.num_open or loaded.changing.locked())]
            if not idle:
                raise OverloadedError(
                    f"the model {model.name!r} does not fit into memory beside those that are in"
                    " use now"
                )
            await self._unload(min(idle, key=lambda loaded: loaded.used_s))

    async def _load_now(self, model: HeldModel) -> None:
        if self.is_draining:
            raise EngineDeadError("the server is shutting down")
        if time.monotonic() < model.refused_until_s:
            raise model.not_loaded()
        loading = asyncio.wrap_future(self._loader.submit(model.launch))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((loading, ending), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                await asyncio.to_thread(self._end_loads)
                raise EngineDeadError("the server is shutting down")
            engine = loading.result()
        except LoadError as error:
            self._note_failure(model, error)
            raise model.not_loaded() from None
        finally:
            ending.cancel()
            if not loading.done():
                loading.add_done_callback(_forget)
        await self._begin(model, engine)

    def _note_failure(self, model: HeldModel, error: LoadError) -> None:
        log.error("the model %r cannot be loaded: %s", model.name, error)
        model.refused_until_s = time.monotonic() + self.limits.retry_load_s
        model.reason = public_reason(error)

    async def _begin(self, model: HeldModel, engine: AsyncLLM) -> None:
        engine.model_name = model.name
        # In a thread: an app renders the public prefixes with the model's chat template.
        app = await asyncio.to_thread(self._make_app, engine)
        await engine.start()
        if self.is_draining:
            await engine.close()
        if self._settings is not None:
            app.state.apply(self._settings)
        model.engine, model.app = engine, app
        model.reason = ""

    # ---- unloading

    async def unload(self, model: HeldModel, force: bool, drain_s: float) -> None:
        """Unload a model that somebody asks for by name; nothing where it is not loaded.

        Raises `HttpError` (409) while it is loaded or unloaded by somebody else, and while requests
        run on it, unless `force`: then these may finish for `drain_s` seconds, and get an error
        after that. New ones wait meanwhile, and have the model loaded again.
        """
        if model.changing.locked():
            raise _busy(f"the model {model.name!r} is {model.status} now")
        if model.num_open and not force:
            message = f"the model {model.name!r} works on {model.num_open} requests"
            raise _busy(f'{message}; with "force": true they may finish for {drain_s:g} s')
        await self._unload(model, drain_s)

    async def _unload(self, model: HeldModel, drain_s: float = 0.0) -> None:
        async with model.changing:
            engine = model.engine
            if engine is None:
                return
            model.is_leaving = True
            try:
                ends_s = time.monotonic() + drain_s
                while model.num_open and time.monotonic() < ends_s:
                    await asyncio.sleep(_POLL_S)
                _save_usage(model)
                await engine.close()
                _save_usage(model)
            finally:
                model.engine = model.app = None
                model.is_leaving = False
        log.info("the model %r is unloaded", model.name)

    async def _unload_idle(self, after_s: float) -> None:
        while True:
            await asyncio.sleep(min(1.0, after_s / 4))
            now_s = time.monotonic()
            for model in self.all():
                if model.engine is None or model.changing.locked():
                    continue
                if model.num_open:
                    model.used_s = now_s
                elif now_s - model.used_s >= after_s:
                    await self._unload(model)


def _busy(message: str) -> HttpError:
    return HttpError(409, message, code="model_busy", param="model", retry_after_s=1)


def _save_usage(model: HeldModel) -> None:
    if model.app is not None:
        model.app.state.metrics.save()


def public_reason(error: Exception) -> str:
    """The message of an error for callers: one line of at most 300 characters, in which paths have
    their last part only."""
    text = " ".join(str(error).split())
    text = re.sub(r"[^\s'\"(]*[\\/](?=[^\s\\/])", "", text.replace("owner/name", "owner\0name"))
    return text.replace("\0", "/")[:300]


def _forget(loading: asyncio.Future[Any]) -> None:
    """Take the result of a load that nobody waits for, so that its error is not logged."""
    if not loading.cancelled():
        loading.exception()
