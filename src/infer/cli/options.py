"""Command-line options made from a dataclass of settings, such as `EngineConfig`: one a field.

Names, help and choices come from the dataclass. So a new setting is an option at once, and no
default is written twice. The dataclass itself checks the values. The result holds only the options
that were given. `ListedOptions` is the help of commands with many options: it shows those that many
people choose, and `--help-all` shows all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from infer.config import EngineConfig, Setting, settings_of
from infer.errors import ConfigError
from infer.private_files import secret_in

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def key_from(
    context: typer.Context, parameter: typer.CallbackParam, value: str | None
) -> str | None:
    """The key that an option gives: that of a variable, or what is in the file of `@FILE`. Raises
    `ConfigError` for a key itself, which everybody could read in the list of processes."""
    source = context.get_parameter_source(parameter.name or "")
    if not value or source is None or source.name != "COMMANDLINE":
        return value
    if not value.startswith("@"):
        message = "everybody on this machine can read a key in --api-key: give it as"
        raise ConfigError("api_key", f"{message} {parameter.envvar}, or a file as @FILE")
    try:
        return secret_in(value[1:])
    except (OSError, UnicodeDecodeError):
        raise ConfigError("api_key", f"{value[1:]!r} is no file with a key") from None


def key_option(variable: str, help: str) -> Any:
    """The option of a key; `variable`: that of the environment which may have it."""
    return typer.Option(envvar=variable, help=help, callback=key_from, metavar="@FILE")


Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder of a checkpoint, GGUF file, package:NAME or hub id; default: the model that"
        " ships."
    ),
]

_RARE = "rare_options"
"""Attribute of a command's function: names of its options that only `--help-all` shows."""
_HELP_ALL = "help_all"
_SHOWS_ALL = "infer.shows_all_options"
_METAVARS = {int: "N", float: "X"}


class ListedOptions(TyperCommand):
    """A command whose help is a list: every option with its whole name, then its text.

    typer's tables share the width of the terminal among names, values and texts. With many options
    and 80 columns they cut the names, which cannot be typed then.
    """

    @property
    def rare(self) -> frozenset[str]:
        """The names of the options that only `--help-all` shows."""
        return getattr(self.callback, _RARE, frozenset())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as a list; see click."""
        super(TyperCommand, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options below the headings of their panels; see click."""
        panels: dict[str, list[tuple[str, str]]] = {}
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        num_rare = 0 if shows_all else len(self.rare)
        for parameter in self.get_params(ctx):
            if not shows_all and parameter.name in self.rare:
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or kind
            if record := parameter.get_help_record(ctx):
                panels.setdefault(heading, []).append(record)
        for heading, records in panels.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        if num_rare:
            formatter.write_paragraph()
            formatter.write(f"{num_rare} more options: {ctx.command_path} --help-all\n")


def _show_all(context: typer.Context, is_given: bool) -> None:
    if is_given:
        context.meta[_SHOWS_ALL] = True
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


_HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        callback=_show_all,
        is_eager=True,
        show_default=False,
        help="Show every option and exit.",
    ),
]


def with_options(
    config: Any, parameter: str, panel: str, *, leave_out: tuple[str, ...] = ()
) -> Decorator:
    """Replaces a parameter of a typer command by one option for each field of a dataclass.

    The command gets the options that were given in that parameter, as a `dict[str, Any]`. `panel`
    is their heading in the help; the fields in `leave_out` become no options. Where some fields are
    common, the others are rare: see `ListedOptions`.
    """
    settings = [setting for setting in settings_of(config) if setting.name not in leave_out]
    has_common = any(setting.is_common for setting in settings)
    rare = frozenset(setting.name for setting in settings if has_common and not setting.is_common)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        # typer makes the options from the signature.
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        adds_help = bool(rare) and _HELP_ALL not in parameters

        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            if adds_help:
                del arguments[_HELP_ALL]
            options = {setting.name: arguments.pop(setting.name) for setting in settings}
            for name, value in options.items():
                if isinstance(value, list):
                    options[name] = ",".join(value) or None
            given = {name: value for name, value in options.items() if value is not None}
            command(**arguments, **{parameter: given})

        del parameters[parameter]
        kind = inspect.Parameter.KEYWORD_ONLY
        if adds_help:
            parameters[_HELP_ALL] = inspect.Parameter(
                _HELP_ALL, kind, default=False, annotation=_HelpAll
            )
        for setting in settings:
            option = _typer_option(setting, panel)
            parameters[setting.name] = inspect.Parameter(
                setting.name, kind, default=None, annotation=option
            )
        called.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        setattr(called, _RARE, rare | getattr(command, _RARE, frozenset()))
        called.__annotations__ = {name: kept.annotation for name, kept in parameters.items()}
        return called

    return decorate


with_engine_options = functools.partial(with_options, EngineConfig, "settings", "Engine")


def _typer_option(setting: Setting, panel: str) -> Any:
    help = setting.help
    if setting.names:
        help = f"{help} One of {', '.join(setting.names)}."
    if setting.default is not None:
        help = f"{help} (default: {setting.default})"
    metavar = _METAVARS.get(setting.kind, setting.name.rpartition("_")[2].upper())
    # typer 0.27 takes a metavar that equals the name for the name: the option would be --DEVICE.
    flag = setting.name.replace("_", "-")
    option = typer.Option(
        f"--{flag}/--no-{flag}" if setting.kind is bool else f"--{flag}",
        help=help,
        metavar=metavar if setting.kind is not bool else None,
        rich_help_panel=panel,
        show_default=False,
    )
    if setting.is_repeatable:
        return Annotated[list[str] | None, option]
    return Annotated[setting.kind | None, option]
