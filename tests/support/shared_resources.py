"""`SHARED_RESOURCES`: what callers share, where it is made, what keeps one key from taking it"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KeyLimit(NamedTuple):
    """The setting or constant that says how much of a resource one key may have."""

    where: str
    """`module:name.attribute`, without `infer.`."""
    value: int | None
    """None: there is no limit unless the operator sets one."""


@dataclass(frozen=True, kw_only=True)
class SharedResource:
    """A row that has no limit of a key says why it needs none.
    `tests/server/test_shared_resources.py` finds in the source what is made and refused, so a pool,
    queue, lock or refusal without a row fails; it looks up each limit, and floods each resource
    that has one. docs/modules.md shows the table."""

    name: str
    made_at: tuple[str, ...] = ()
    """`file:where:call` of what makes it; `#2` is a second such call in one place."""
    refused_at: tuple[str, ...] = ()
    """The same of what makes the error for a caller who finds no room."""
    limits: tuple[KeyLimit, ...] = ()
    status: int | None = None
    """Status of what is beyond a key's limit; None: nothing is refused, see `why`."""
    why: str
    """What else holds; without limits: why no key can take it from others."""


def _at(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{file}:{name}" for name in names)


def _server_limit(name: str, value: int) -> KeyLimit:
    return KeyLimit(f"types.server_limits:ServerLimits.{name}", value)


def _of_keys(name: str, value: int | None) -> KeyLimit:
    return KeyLimit(f"server.tenancy.keys:KeyLimits.{name}", value)


LIMITED = (
    SharedResource(
        name="open requests",
        made_at=(
            *_at("server/http/connections.py", "Connections._placed:_Group"),
            *_at("server/http/connections.py", "Connections._for_probes:_Group"),
            *_at("server/http/connections.py", "_Group._by_use:OrderedDict"),
            *_at("server/http/connections.py", "connections_of:Connections"),
            *_at("server/serve.py", "Server._places:Connections"),
            *_at("server/early_listener.py", "EarlyListener._places:Connections"),
        ),
        refused_at=(
            *_at("server/tenancy/limits.py", "Tenant._take:too_many"),
            *_at(
                "server/http/bounded_protocol.py", "BoundedProtocol._answer.error:OverloadedError"
            ),
            *_at(
                "server/http/bounded_protocol.py", "BoundedProtocol.connection_made:OverloadedError"
            ),
            *_at(
                "server/http/bounded_protocol.py", "BoundedProtocol.give_way.error:OverloadedError"
            ),
            *_at("server/early_listener.py", "EarlyConnection.give_way.error:OverloadedError"),
        ),
        limits=(_of_keys("max_concurrent", 32),),
        status=429,
        why="A connection without a request gives way to a new one, and 8 places are for probes.",
    ),
    SharedResource(
        name="requests and tokens a minute",
        refused_at=_at("server/tenancy/limits.py", "Tenant._take:too_many#2"),
        limits=(_of_keys("requests_per_minute", None), _of_keys("tokens_per_minute", None)),
        status=429,
        why="CPU time of templates and grammars is charged as tokens.",
    ),
    SharedResource(
        name="bytes of bodies that are read",
        made_at=_at("server/offload.py", "Offload._budget:BodyBudget"),
        refused_at=_at(
            "server/http/body_budget.py",
            "BodyBudget.body.grow_to:too_many",
            "BodyBudget.body.grow_to:OverloadedError",
        ),
        limits=(KeyLimit("server.http.body_budget:MAX_BYTES_OF_KEY", 18 << 20),),
        status=429,
        why="When all bytes are used, each key still may have 256 KiB.",
    ),
    SharedResource(
        name="parser of long bodies",
        made_at=_at(
            "server/offload.py", "Offload._parser:FairThreads", "Offload._places:KeyPlaces"
        ),
        refused_at=(
            *_at("server/offload.py", "Offload._check_room:OverloadedError"),
            *_at("server/tenancy/key_places.py", "KeyPlaces.has_room:too_many"),
        ),
        limits=(_server_limit("max_long_bodies_of_key", 16),),
        status=429,
        why="It has one thread, at which keys take turns.",
    ),
    SharedResource(
        name="threads for texts",
        made_at=(
            *_at("server/offload.py", "Offload._threads:FairThreads"),
            *_at("server/app.py", "create_app.offload:Offload"),
            *_at("server/multi_model.py", "ModelRouter._pool:Offload"),
        ),
        limits=(_server_limit("max_long_bodies_of_key", 16),),
        status=429,
        why="Keys take turns, and no key has all threads.",
    ),
    SharedResource(
        name="processes for untrusted text",
        made_at=(
            *_at("server/offload.py", "Offload._jobs:KeyPlaces"),
            *_at("text/chat_template.py", "_compiling_workers.workers:UntrustedWorkers"),
            *_at(
                "text/untrusted/grammar_checker.py",
                "GrammarChecker.__init__.workers:UntrustedWorkers",
            ),
            *_at("engine/client/input.py", "InputProcessor.__init__.grammars:GrammarChecker"),
            *_at(
                "text/untrusted/workers.py",
                "UntrustedWorkers._lock:Lock",
                "UntrustedWorkers._prepared.process:WorkerProcess",
                "UntrustedWorkers._queue:FairQueue",
                "UntrustedWorkers._threads:ThreadPoolExecutor",
                "UntrustedWorkers.warm.process:WorkerProcess",
            ),
            *_at("text/untrusted/process.py", "WorkerProcess._process:Popen"),
        ),
        refused_at=(
            *_at("server/offload.py", "Offload._answer_to:OverloadedError"),
            *_at("text/untrusted/workers.py", "_overloaded:OverloadedError"),
        ),
        limits=(_server_limit("max_jobs_of_key", 128),),
        status=429,
        why="Keys take turns, and no key has both processes.",
    ),
    SharedResource(
        name="places in the queue of an engine",
        made_at=_at("engine/client/async_llm.py", "AsyncLLM._messages:deque"),
        refused_at=(
            *_at(
                "server/tenancy/limits.py", "Tenant.queueing:too_many", "Tenant.queueing:too_many#2"
            ),
            *_at("engine/client/async_llm.py", "AsyncLLM._capacity_error:OverloadedError"),
            *_at("schedule/waiting_queue.py", "WaitingQueue._overload:OverloadedError"),
            *_at("errors.py", "too_many_tokens:OverloadedError"),
        ),
        limits=(_of_keys("max_queued", 32),),
        status=429,
        why="An eighth of them is for keys that have none; `max_waiting_tokens` is for all keys.",
    ),
    SharedResource(
        name="seats and pages of an engine",
        made_at=(
            *_at(
                "schedule/page_allocator.py",
                "PageAllocator._cached:OrderedDict",
                "PageAllocator._missed:OrderedDict",
            ),
            *_at("schedule/static_batches.py", "StaticBatches._recent:deque"),
            *_at("engine/build/assemble.py", "_build.pool:Pool", "_drafter:Pool"),
        ),
        limits=(KeyLimit("schedule.fair_share:FairShare.next_of", None),),
        why="Who has had the fewest tokens is next; who has the most gives up seats and pages.",
    ),
    SharedResource(
        name="memory of compiled grammars",
        made_at=(
            *_at("server/tenancy/open_grammars.py", "OpenGrammars._mib:KeyPlaces"),
            *_at("server/app.py", "create_app.pipeline:OpenGrammars"),
        ),
        refused_at=_at("server/tenancy/open_grammars.py", "OpenGrammars.enter:OverloadedError"),
        limits=(_server_limit("max_grammar_mib_of_key", 128),),
        status=429,
        why="Each key always gets one; a grammar takes at most 96 MiB, most take less than 1.",
    ),
    SharedResource(
        name="threads of the sessions' database",
        made_at=(
            *_at("server/sessions/routes.py", "SessionRoutes._threads:DatabaseThreads"),
            *_at(
                "server/sessions/database_threads.py",
                "DatabaseThreads._threads:FairThreads",
                "DatabaseThreads._places:KeyPlaces",
            ),
            *_at(
                "server/sessions/store.py",
                "SessionStore._engine:create_engine",
                "SessionStore._turns:_Turns",
                "_Turns._changed:Condition",
                "_Turns._line:deque",
            ),
        ),
        limits=(_server_limit("max_database_calls_of_key", 16),),
        status=429,
        why="Keys take turns, and no key has all threads.",
    ),
    SharedResource(
        name="stored sessions",
        made_at=_at("server/sessions/routes.py", "SessionRoutes._sessions:SessionStore"),
        refused_at=_at("server/sessions/store.py", "SessionStore._check_quota:HttpError"),
        limits=(KeyLimit("server.settings:ServerSettings.max_sessions", 1000),),
        status=429,
        why="Messages and bytes of a key's sessions have limits, too (413).",
    ),
    SharedResource(
        name="viewers of an engine",
        refused_at=_at(
            "server/viewers.py", "EngineViewers.join:too_many", "EngineViewers.join:HttpError"
        ),
        limits=(KeyLimit("server.viewers:MAX_VIEWERS_A_KEY", 4),),
        status=429,
        why="Who has most gives one up for a key that has fewer; keys with one each take turns.",
    ),
    SharedResource(
        name="comparisons of the modes",
        made_at=(
            *_at("server/model_endpoints.py", "ModelEndpoints._comparisons:Comparisons"),
            *_at(
                "server/comparisons.py",
                "Comparisons._computed.process:create_subprocess_exec",
                "Comparisons._turns:FairQueue",
            ),
        ),
        refused_at=_at("server/comparisons.py", "Comparisons.pieces:too_many", "_busy:HttpError"),
        limits=(KeyLimit("server.comparisons:MAX_OF_KEY", 1),),
        status=429,
        why="Two run, never both of one key; those of further keys wait for their turn.",
    ),
    SharedResource(
        name="calls of MCP servers",
        made_at=(
            *_at("server/mcp/mcp_endpoints.py", "McpCalls._names:FairThreads"),
            *_at("server/mcp/mcp_endpoints.py", "McpCalls._places:KeyPlaces"),
            *_at("server/mcp/mcp_endpoints.py", "McpEndpoints._calls:McpCalls"),
            *_at("server/app.py", "create_app.mcp:McpEndpoints"),
        ),
        refused_at=_at("server/mcp/mcp_endpoints.py", "McpCalls.place:OverloadedError"),
        limits=(_server_limit("max_mcp_calls_of_key", 4),),
        status=429,
        why="A call ends after a minute, whatever the MCP server does.",
    ),
    SharedResource(
        name="questions to other fronts",
        made_at=(
            *_at(
                "server/fronts.py",
                "FrontQueries._ask_in_turn.place:Semaphore",
                "FrontQueries._places:Semaphore",
                "FrontQueries._places_of:WeakValueDictionary",
            ),
            *_at("server/app.py", "create_app.views:FrontQueries"),
            *_at(
                "server/front_relay.py",
                "FrontRelay.next_question.known:_Known",
                "_Known.questions:Queue",
            ),
            *_at("server/front_exchange.py", "FrontExchange._relay:FrontRelay"),
            *_at("server/front_keeper.py", "FrontKeeper._exchange:FrontExchange"),
        ),
        refused_at=(
            *_at("server/fronts.py", "FrontQueries._ask_in_turn:OverloadedError"),
            *_at("server/distant_reader.py", "piece_of:HttpError"),
        ),
        limits=(KeyLimit("server.fronts:MAX_QUESTIONS_OF_KEY", 4),),
        status=503,
        why="Further ones wait for half a second; the first of a key needs no place of all.",
    ),
    SharedResource(
        name="traces of requests that have ended",
        made_at=(
            *_at("server/observe/request_trace.py", "RequestTraces._steps:deque"),
            *_at("server/app.py", "_traces.traces:RequestTraces"),
        ),
        limits=(_server_limit("max_traces_of_owner", 256),),
        why="The oldest of the key is forgotten.",
    ),
    SharedResource(
        name="answers that are kept",
        made_at=(
            *_at("server/app.py", "create_app.kept:KeptAnswers"),
            *_at(
                "server/kept_answers.py",
                "KeptAnswers.begin.owned:_Owned",
                "_Owned.__init__.ended:OrderedDict",
            ),
        ),
        limits=(
            _server_limit("max_kept_bytes_of_key", 16 * 1024 * 1024),
            KeyLimit("server.tenancy.reader_places:MAX_READERS_OF_KEY", 64),
        ),
        why="The oldest of the key that have ended are forgotten; the first reader gives way.",
    ),
)
"""Resources of which each key may have a part."""

UNLIMITED = (
    SharedResource(
        name="turns of owners",
        made_at=(
            *_at("fair_queue.py", "FairQueue.put:deque", "FairQueue.remove.items:deque"),
            *_at(
                "server/http/fair_threads.py",
                "FairThreads._queue:FairQueue",
                "FairThreads._start_jobs.running:run_in_executor",
                "FairThreads._threads:ThreadPoolExecutor",
            ),
        ),
        why="They are parts of the resources above, which bound them.",
    ),
    SharedResource(
        name="grammars that are remembered",
        made_at=(
            *_at(
                "text/untrusted/grammar_checker.py",
                "GrammarChecker._lock:Lock",
                "GrammarChecker._verdicts:OrderedDict",
            ),
            *_at(
                "runner/compiling_threads.py",
                "CompilingThreads._lock:Lock",
                "CompilingThreads._queue:FairQueue",
            ),
            *_at(
                "text/grammars/compiler.py",
                "CompiledGrammars._kept:OrderedDict",
                "Compiler.__init__.cache:CompiledGrammars",
                "CompiledGrammars._changed:Condition",
                "compiling_thread.thread:ThreadPoolExecutor",
            ),
            *_at("text/untrusted/grammar_verdicts.py", "prepare.compiler:Compiler"),
            *_at("engine/build/assemble.py", "_grammar_compiler.compiler:Compiler"),
            *_at("text/stop.py", "_beginnings_of:lru_cache"),
        ),
        why="What is forgotten is only checked again, in the key's turn, which pays for it.",
    ),
    SharedResource(
        name="parts of a worker for untrusted text",
        made_at=(
            *_at("text/untrusted/pattern_trial.py", "try_patterns.workers:UntrustedWorkers"),
            *_at("text/untrusted/worker.py", "main.thread:Thread"),
        ),
        why="A worker has one job; patterns are those of a checkpoint, tried when it is loaded.",
    ),
    SharedResource(
        name="loading of models",
        made_at=(
            *_at(
                "server/loaded_models.py",
                "LoadedModels._begin.app:to_thread",
                "LoadedModels._load_now:to_thread",
                "LoadedModels._find_new.launches:to_thread",
                "LoadedModels._make_room:to_thread",
                "LoadedModels._room:Lock",
                "LoadedModels._loader:_Loader",
                "LoadedModels.close:to_thread",
                "_Loader.__init__:Thread",
                "_Loader._queue:SimpleQueue",
            ),
            *_at("server/serve.py", "_router.models:LoadedModels"),
            *_at("replicas/launch.py", "Loads._lock:Lock"),
            *_at("models/weights.py", "TensorFiles._recent:deque"),
            *_at("kernels/arena.py", "Arena._lock:Lock"),
            *_at(
                "kernels/cuda/launch.py",
                *("compiled_together:ThreadPoolExecutor", "_parsed_in_turn:Lock"),
            ),
            *_at("runner/kv_storage.py", "KVStorage.__init__.preparing:BackgroundThread"),
        ),
        refused_at=(
            *_at("server/multi_model.py", "ModelRouter._find:HttpError"),
            *_at(
                "server/loaded_models.py",
                "LoadedModels._make_room:OverloadedError",
                "LoadedModels.begin_load:HttpError",
            ),
            *_at("server/body_reader.py", "BodyReader._validated:HttpError"),
        ),
        why="There is one load for each model of the server, whoever asks for it.",
    ),
    SharedResource(
        name="parts of one request",
        made_at=(
            *_at("server/openai/streaming.py", "EventStream._writing:Lock"),
            *_at("server/generation.py", "GenerationCall._stream:EventStream"),
            *_at("server/generation.py", "GenerationPipeline.route.endpoint:GenerationCall"),
        ),
        why="No other request has them.",
    ),
    SharedResource(
        name="parts of a server",
        made_at=(
            *_at(
                "server/app.py",
                "create_app.pipeline:GenerationPipeline",
                "create_app.of_model:ModelEndpoints",
                "_sessions:SessionRoutes",
            ),
            *_at("server/sessions/routes.py", "SessionRoutes._opening:Lock"),
            *_at(
                "server/serve.py",
                "_check_stores:SessionStore",
                "_check_stores:SessionStore#2",
                "_router.router:ModelRouter",
                "run.server:Server",
            ),
            *_at(
                "server/early_listener.py",
                "EarlyListener._thread:BackgroundThread",
                "_listening_for_probes.listener:EarlyListener",
                "listening.listener:EarlyListener",
            ),
            *_at("server/serve.py", "Server._reload:Reload", "_probes_of:ProbeServer"),
            *_at("server/reload.py", "Reload._run:to_thread", "Reload._run:to_thread#2"),
            *_at(
                "server/front_keeper.py",
                "FrontKeeper._keep.code:to_thread",
                "FrontKeeper._let_listen:to_thread",
                "FrontKeeper._read.settings_and_others:to_thread",
                "run_fronts.keeper:FrontKeeper",
                "run_fronts:ThreadPoolExecutor",
            ),
            *_at(
                "server/front_places.py",
                "FrontPlace.start.front:FrontProcess",
                "FrontProcess.__init__.popen:start_module",
                "front_places.place:FrontPlace",
                "front_places.places:FrontPlace",
            ),
            *_at(
                "server/front_process.py",
                "FrontServer._probes:ProbeServer",
                "_server:FrontServer",
            ),
            *_at("signals.py", "write_stacks_at:Thread"),
            *_at("cli/api_keys.py", "purge.store:SessionStore"),
            *_at("cli/pressed_keys.py", "pressed_keys.reader:BackgroundThread"),
            *_at("cli/serve_screen.py", "Spinner._thread:BackgroundThread"),
        ),
        refused_at=(
            *_at("server/http/error_responses.py", "too_many:HttpError"),
            *_at("server/tenancy/limits.py", "AuthMiddleware.__call__.error:HttpError"),
            *_at("server/fronts.py", "_silent:HttpError"),
        ),
        why="They are made once; what callers share of them has rows of its own.",
    ),
    SharedResource(
        name="health and metrics on a port of their own",
        made_at=_at(
            "server/probe_server.py",
            "ProbeServer._config:Connections",
            "ProbeServer._offload:Offload",
            "ProbeServer._server:create_server",
        ),
        why="It has places of its own, where the oldest unused one gives way; no key comes here.",
    ),
    SharedResource(
        name="texts of metrics",
        made_at=(
            *_at("server/request_views.py", "RequestViews.metrics:to_thread"),
            *_at(
                "server/fronts.py",
                "FrontQueries.metrics.lines:to_thread",
                "FrontQueries.metrics.text:to_thread",
            ),
        ),
        why="One takes 2 ms of a thread with 10,000 keys, and a key's open requests are limited.",
    ),
    SharedResource(
        name="the OpenAPI document",
        made_at=_at("server/model_endpoints.py", "ModelEndpoints.openapi.making:to_thread"),
        why="It is made once, and then it is a constant.",
    ),
    SharedResource(
        name="lines of the log",
        made_at=(
            *_at(
                "server/observe/logs.py",
                "LogWriter._lines:deque",
                "LogWriter._thread:BackgroundThread",
                "LogWriter._wake:Condition",
            ),
            *_at("server/observe/logs.py", "log_on_stderr.handler:LogWriter"),
        ),
        why="Lines that do not fit are dropped and counted; no request waits for them.",
    ),
    SharedResource(
        name="an engine and its process",
        made_at=(
            *_at("threads.py", "BackgroundThread._thread:Thread"),
            *_at(
                "engine/client/async_llm.py",
                "AsyncLLM.close:to_thread",
                "AsyncLLM.close:to_thread#2",
            ),
            *_at("replicas/fleet.py", "Fleet._lock:RLock", "Fleet._watcher:BackgroundThread"),
            *_at("replicas/fleet.py", "Fleet.stop:ThreadPoolExecutor"),
            *_at("engine/llm.py", "LLM._add:deque", "LLM._run.to_add:deque"),
            *_at("engine/loop.py", "EngineThread._commands:SimpleQueue"),
            *_at("engine/loop.py", "EngineThread._thread:BackgroundThread"),
            *_at("replicas/child.py", "_prepare.thread:Thread", "main.commands:SimpleQueue"),
            *_at("replicas/child.py", "main:Thread", "main:Thread#2"),
            *_at(
                "replicas/engine_run.py",
                "EngineRun._begins:SimpleQueue",
                "EngineRun._commands:SimpleQueue",
                "EngineRun._listener:Thread",
                "EngineRun._writer:Thread",
            ),
            *_at("replicas/messages.py", "Channel._sending:Lock"),
            *_at("engine/build/checkpoint.py", "verified:ThreadPoolExecutor"),
            *_at(
                "runner/step_thread.py",
                "HostFlight.__init__:Lock",
                "HostFlight.__init__:Lock#2",
                "StepThread._flights:SimpleQueue",
                "StepThread._thread:BackgroundThread",
            ),
            *_at("replicas/spawned.py", "EarlyProcess._lock:Lock"),
            *_at("replicas/spawned.py", "start_module:Popen"),
            *_at("replicas/spawned.py", "Spawned.__init__.popen:start_module"),
            *_at("replicas/standby.py", "Standby._changed:Condition"),
            *_at("replicas/standby.py", "Standby._thread:BackgroundThread"),
            *_at("replicas/process_transport.py", "ProcessTransport._lock:Lock"),
            *_at("replicas/replica.py", "Replica._lock:Lock"),
            *_at("replicas/replica.py", "Replica._thread:BackgroundThread"),
            *_at("replicas/supervisor_state.py", "Lifecycle._changed:Condition"),
        ),
        why="Only requests that have a place in the queue of the engine come here.",
    ),
    SharedResource(
        name="links between fronts and engines",
        made_at=(
            *_at(
                "cluster/deployments.py",
                "EngineActor._keeper:Thread",
                "EngineActor.stop:to_thread",
                "EnginesOfModel._describe.actors:to_thread",
                "EnginesOfModel._find:to_thread",
                "EnginesOfModel.serve.tokenizer:to_thread",
                "Front.__serve_build_asgi_app__:to_thread",
                "Front._router.models:LoadedModels",
                "Front._router.models:ModelRouter",
                "RayLink._lock:Lock",
            ),
            *_at(
                "replicas/host.py",
                "ReplicaHost._lock:RLock",
                "FrontLink._lock:Lock",
            ),
            *_at("cluster/ordered_stream.py", "CommandOrder._lock:Lock"),
            *_at("replicas/link_transport.py", "LinkTransport._heart:BackgroundThread"),
            *_at("replicas/socket_link.py", "SocketLink._sending:Lock"),
            *_at("cluster/shared_fronts.py", "SharedFronts._finding:to_thread"),
        ),
        why="One belongs to a front and an engine; no caller makes one.",
    ),
    SharedResource(
        name="programs that are no server",
        made_at=(
            *_at("bench/drive.py", "Drive._places:Semaphore"),
            *_at(
                "cli/engine_state.py",
                "EngineState.first_token_ms:deque",
                "EngineState.gaps:deque",
                "EngineState.output:deque",
                "EngineState.steps:deque",
            ),
        ),
        refused_at=_at("cells/decode_context.py", "Context._try:OverloadedError"),
        why="They have one user.",
    ),
)
"""What needs no limit of a key, because no caller can take it from others."""

SHARED_RESOURCES = LIMITED + UNLIMITED


def as_markdown() -> str:
    """The table as docs/modules.md shows it."""
    lines = ["| callers share | one key may have | beyond it | and |", "|---|---|---|---|"]
    for row in SHARED_RESOURCES:
        limits = ", ".join(map(_shown, row.limits)) or "–"
        lines.append(f"| {row.name} | {limits} | {row.status or '–'} | {row.why} |")
    return "\n".join(lines)


def _shown(limit: KeyLimit) -> str:
    name = limit.where.partition(":")[2]
    return f"`{name}`" if limit.value is None else f"`{name}` = {limit.value:,}"
