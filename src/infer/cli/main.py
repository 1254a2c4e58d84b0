"""The `infer` command: its subcommands as short functions, which call other modules.

The options of the engine are made from `EngineConfig` (see `cli.options`). An error at the start is
one sentence on stderr and exit code 2. torch is imported when a model is needed, not before.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from infer.cli.options import ListedOptions, Model, key_option, with_engine_options
from infer.cli.plain import plain, print_line, visible, write_any_text
from infer.config import DEFAULT_HOST, DEFAULT_PORT, MAX_FRONTS, MAX_REPLICAS, EngineConfig
from infer.errors import ConfigError, InferError
from infer.version import VERSION

if TYPE_CHECKING:
    from infer.replicas.spawned import EarlyProcess
    from infer.types import SamplingParams

NO_WINDOWS = (
    "infer: does not run on Windows itself: the engine process needs sockets and signals that"
    " Windows does not have. Install WSL (`wsl --install`) and install infer inside of it."
)
COMMANDS = (
    *("serve", "generate", "chat", "run", "plan", "doctor"),
    *("explain", "top", "connect", "load", "unload", "ps", "models"),
    *("pull", "list", "rm", "bench", "keys", "config", "cluster"),
)
"""The subcommands, in the order of `infer --help`."""
GENERATE_MAX_TOKENS = 256
"""The limit of `infer generate` where neither its reader nor the model says one."""
Temperature = Annotated[
    float | None, typer.Option(help="0 = greedy; default: the model's own, or 1.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the most probable tokens with this total; default: the model's own, or 1."
    ),
]
LOCAL_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
Url = Annotated[str, typer.Option(help="Where the server is.")]
ApiKey = Annotated[
    str | None,
    key_option("INFER_API_KEY", "A file with a key of the server, as @FILE."),
]
OneModel = Annotated[str | None, typer.Option(help="Which of several models; default: the first.")]
_IN_MODULES = {
    "serve": "infer.cli.serving",
    "bench": "infer.cli.bench",
    "keys": "infer.cli.api_keys",
    "config": "infer.cli.config_command",
    "cluster": "infer.cli.cluster_file",
}


class _Commands(TyperGroup):
    """A group that imports the module of a subcommand when somebody asks for that subcommand.

    So `infer bench` does not import the server, and `infer serve` does not import the workloads.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _IN_MODULES:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_command(import_module(_IN_MODULES[cmd_name]).app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click; what is no command is told with what is near."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, 3, 0.5)
            hint = f" Do you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"There is no command {visible(args[0])!r}.{hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    name="infer",
    help="Serve and run large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(show: bool) -> None:
    if show:
        print(f"infer {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=ListedOptions)
@with_engine_options(leave_out=("model",))
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder of a checkpoint, GGUF file, package:NAME or hub id; default: the model"
            " that ships."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Most tokens to generate; default: {GENERATE_MAX_TOKENS}, or the model's own."
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Continue a text and stream it to the terminal."""
    from infer.cli.terminal import run_generate

    sampling = _sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    config = EngineConfig.from_kwargs(model=model, **settings)
    run_generate(config, prompt, sampling, GENERATE_MAX_TOKENS)


@app.command(cls=ListedOptions)
@with_engine_options(leave_out=("model",))
def chat(
    model: Model = None,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to the server at this address; MODEL is then one of its models."),
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer; default: no limit, or the model's own."),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Talk to a model in the terminal; /help lists the commands, Ctrl+D ends."""
    from infer.cli.chat_sources import ChatSource, EngineSource, ServerSource
    from infer.cli.terminal_chat import Chat

    chosen = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    sampling = {name: value for name, value in chosen.items() if value is not None}
    _sampling(**chosen)
    if url is not None and settings:
        name = next(iter(settings))
        raise ConfigError(name, "is a setting of an engine; the server at --url has its own")
    notes = Console(stderr=True)
    config = EngineConfig.from_kwargs(model=model, **settings)
    source: ChatSource
    source = EngineSource(config, notes) if url is None else ServerSource(url, model, api_key)
    with contextlib.closing(source):
        Chat(source, notes, system, sampling).run()


app.command(name="run", cls=ListedOptions, help="The same as chat.")(chat)


def _sampling(**chosen: float | None) -> SamplingParams:
    """The sampling of which only the options that are given are chosen."""
    from infer.types import SamplingParams

    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    return SamplingParams(**given)


@app.command(cls=ListedOptions)
@with_engine_options(leave_out=("model",))
def plan(
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
    free_gib: Annotated[
        float | None, typer.Option(help="Plan for this much free memory instead of the machine's.")
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(min=1, max=MAX_REPLICAS, help="Engines between which the machine is divided."),
    ] = 1,
    fronts: Annotated[
        int, typer.Option(min=1, max=MAX_FRONTS, help="Processes that answer HTTP.")
    ] = 1,
    agent: Annotated[
        bool, typer.Option("--agent", help="Also what the contexts of a coding agent take.")
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Say what a model needs and what fits, without loading it. Exit code 1 if it does not fit."""
    from infer.cli.planning import run_plan

    config = EngineConfig.from_kwargs(model=model, **settings)
    if not run_plan(config, as_json, free_gib, replicas, agent, fronts):
        raise typer.Exit(1)


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    numa: Annotated[
        str, typer.Option(help="auto, one or all: which NUMA nodes are used.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """Say what this machine has, what will be used of it, and what would be faster."""
    from infer.cli.doctor import run_doctor

    run_doctor(EngineConfig.from_kwargs(device=device, numa=numa), as_json)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="The `id` of an answer.")],
    url: Url = LOCAL_URL,
    api_key: ApiKey = None,
) -> None:
    """Say what happened to a request, and why it took as long as it did."""
    from infer.cli.explain import run_explain

    run_explain(url, request_id, api_key)


@app.command()
def connect(
    agent: Annotated[str, typer.Argument(help="codex, claude, qwen or opencode.")],
    url: Url = LOCAL_URL,
    model: OneModel = None,
    api_key: ApiKey = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start the agent; without it, print how.")
    ] = False,
) -> None:
    """Print the lines that start a coding agent with the server's model, or start it."""
    from infer.cli.connect import run_connect

    run_connect(agent, url, model, api_key, start)


@app.command()
def top(
    address: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="The same as --url.")
    ] = None,
    url: Url = LOCAL_URL,
    model: OneModel = None,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Show what an engine does, live: seats, queue, pages, speed and each request. q ends it."""
    from infer.cli.top import run_top

    if address not in (None, url) and url != LOCAL_URL:
        raise ConfigError("url", "is given twice: as an argument and with --url")
    run_top(address or url, model, api_key, once=once)


@app.command()
def load(
    model: Annotated[str, typer.Argument(help="As ps shows it.")],
    url: Url = LOCAL_URL,
    api_key: ApiKey = None,
) -> None:
    """Have a running server load one of its models; returns when it is loaded."""
    from infer.cli.running_models import run_load

    run_load(url, model, api_key)


@app.command()
def unload(
    model: Annotated[str, typer.Argument(help="As ps shows it.")],
    url: Url = LOCAL_URL,
    api_key: ApiKey = None,
    force: Annotated[
        bool, typer.Option("--force", help="Though requests run: they may finish for some time.")
    ] = False,
) -> None:
    """Have a running server unload a model; the next request for it loads it again."""
    from infer.cli.running_models import run_unload

    run_unload(url, model, api_key, force=force)


@app.command()
def ps(url: Url = LOCAL_URL, api_key: ApiKey = None) -> None:
    """List the models of a running server, and which are loaded."""
    from infer.cli.running_models import run_ps

    run_ps(url, api_key)


@app.command()
def models() -> None:
    """List the model families that can be loaded, and the checkpoints in the local hub cache."""
    from infer.cli.planning import run_models

    run_models()


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="OWNER/NAME, or OWNER/NAME:Q4_K_M for a GGUF file.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
) -> None:
    """Download a checkpoint into the local hub cache, and print where it is."""
    from infer.cli.hub_cache import run_pull

    run_pull(model, revision)


@app.command(name="list")
def list_cached() -> None:
    """List the checkpoints in the local hub cache."""
    from infer.cli.hub_cache import run_list

    run_list()


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="MODEL...", help="As list shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove checkpoints from the local hub cache."""
    from infer.cli.hub_cache import run_rm

    run_rm(names, is_sure=yes)


def main(arguments: list[str] | None = None, early: EarlyProcess | None = None) -> None:
    """Run the command; see `cli.entry`. `early`: the process of a server's first engine, where it
    has been started before."""
    if sys.platform == "win32":
        print(NO_WINDOWS, file=sys.stderr)
        sys.exit(2)
    write_any_text()
    try:
        app(arguments, prog_name="infer", obj=early)
    except InferError as error:
        _end_with(str(error))
    except UnicodeError as error:  # what an argument becomes in such a locale is no text
        encoding = sys.getfilesystemencoding()
        _end_with(
            f"{error}; the locale's encoding here is {encoding}: start it with LC_ALL=C.UTF-8, or"
            " with PYTHONUTF8=1"
        )


def _end_with(message: str) -> None:
    line = Text.assemble(("infer:", "bold red"), " ", plain(message))
    print_line(Console(stderr=True), line)
    sys.exit(2)


if __name__ == "__main__":
    main()
