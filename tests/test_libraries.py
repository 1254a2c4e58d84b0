"""The parts of libraries that are used although nobody promises that they stay.

The server changes how uvicorn's protocol and h11's parser work. Those parts may be renamed in any
version, so `pyproject.toml` has upper bounds for the libraries, and these tests look for each part
in the versions that are installed. A part that is missing is named with its library. A bound is
raised when none is missing.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import h11
import pytest
import uvicorn.config
import uvicorn.server
from starlette.applications import Starlette
from uvicorn.protocols.http import flow_control, h11_impl

from infer.server import serve
from infer.server.http import bounded_protocol
from infer.server.http.uvicorn_config import uvicorn_config

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
BOUNDED = ("h11", "starlette", "uvicorn")


class Derived(NamedTuple):
    """A class of ours that is made from a library's."""

    ours: type[Any]
    base: type[Any]
    called: str
    """The methods that we replace, and that the library calls."""
    called_by_others: str = ""
    """The methods that we replace, and that asyncio calls."""
    read: str = ""
    """The attributes that we set, and that the library reads."""


DERIVED = [
    Derived(
        bounded_protocol.BoundedProtocol,
        h11_impl.H11Protocol,
        called="handle_events _should_upgrade handle_websocket_upgrade send_400_response"
        " on_response_complete",
        called_by_others="connection_made data_received eof_received connection_lost pause_writing"
        " resume_writing shutdown",
        read="app conn cycle logger",
    ),
    Derived(
        bounded_protocol.BoundedConnection,
        h11.Connection,
        called="",
        called_by_others="receive_data next_event",
    ),
    Derived(
        serve.Server,
        uvicorn.server.Server,
        called="startup shutdown on_tick capture_signals handle_exit",
        read="force_exit should_exit",
    ),
]
# What else is used of objects that a library makes.
ATTRIBUTES = [
    (h11_impl, "STATUS_PHRASES H11Protocol RequestResponseCycle"),
    (flow_control, "CLOSE_HEADER"),
    (flow_control.FlowControl, "read_paused"),
    (uvicorn.server.ServerState, "connections default_headers"),
    (
        h11_impl.RequestResponseCycle,
        "scope body disconnected message_event response_started response_complete",
    ),
]


def attributes_of(thing: Any) -> set[str]:
    """What a module has, or an object of a class: also what the class's methods assign."""
    found = set(dir(thing))
    for each in thing.__mro__[:-1] if isinstance(thing, type) else ():
        found |= set(re.findall(r"\bself\.(\w+)(?::[^=\n]+)? = ", inspect.getsource(each)))
    return found


def inherited_parts(ours: type[Any]) -> set[str]:
    """What the methods of a class use of `self` and `super()` and do not make themselves."""
    of_self: set[str] = set()
    of_super: set[str] = set()
    own = set(vars(ours))
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(ours)))):
        if isinstance(node, ast.Attribute):
            whose = ast.unparse(node.value)
            if whose == "super()":
                of_super.add(node.attr)
            elif whose == "self":
                (own if isinstance(node.ctx, ast.Store) else of_self).add(node.attr)
    return of_self - own | of_super


def missing_parts(derived: Derived) -> list[str]:
    """What a class of ours needs, and the library's class has not (any more)."""
    ours, base = derived.ours, derived.base
    has, source = attributes_of(base), inspect.getsource(base)
    found = sorted(inherited_parts(ours) - has)
    found += [name for name in derived.called_by_others.split() if name not in has]
    for name in derived.called.split():
        if name not in has or not re.search(rf"\.{name}\b", source):
            found.append(f"{name}, or does not call it")
    for name in derived.read.split():
        if not re.search(rf"\bself\.{name}\b(?!(?::[^=\n]+)? = )", source):
            found.append(f"{name}, or does not read it")
    return [f"{base.__module__}.{base.__qualname__} has no {each}" for each in found]


@pytest.mark.parametrize("derived", DERIVED, ids=lambda each: each.ours.__name__)
def test_what_our_classes_change_is_in_the_library(derived: Derived) -> None:
    assert missing_parts(derived) == []
    replaced = {*derived.called.split(), *derived.called_by_others.split()}
    assert replaced == {
        name
        for name, value in vars(derived.ours).items()
        if inspect.isfunction(value) and name in dir(derived.base) and not name.startswith("__")
    }, "each method that replaces one of the library's is in the table"


@pytest.mark.parametrize(("thing", "names"), ATTRIBUTES, ids=lambda each: str(each)[:40])
def test_what_is_used_of_a_library_is_there(thing: Any, names: str) -> None:
    missing = set(names.split()) - attributes_of(thing)
    assert not missing, f"{thing} has no {', '.join(sorted(missing))}"


def test_uvicorn_reads_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its configuration looks at are of the platform, or of other programs."""
    app = Starlette()

    def made() -> dict[str, Any]:
        config = uvicorn_config(app, h11_impl.H11Protocol, lifespan="off")
        config.load()
        assert config.loaded_app is app, "nothing lies between it and us"
        return vars(config)

    before = made()
    source = inspect.getsource(uvicorn.config)
    variables = set(re.findall(r'environ(?:\.get\(|\[)\s*"(\w+)"', source))
    assert {"WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS"} <= variables
    for variable in variables:
        monkeypatch.setenv(variable, "*")
    assert made() == before


def test_versions_have_upper_bounds() -> None:
    wanted = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    for name in BOUNDED:
        (line,) = (each for each in wanted if re.match(rf"{name}\b", each))
        assert "<" in line, f"{name}: private parts of it are used; give it an upper bound"


class _Library:
    """Stands for one whose next version has renamed things."""

    def __init__(self) -> None:
        self.kept = 1

    def run(self) -> None:
        self._hook_renamed()

    def _hook(self) -> None: ...

    def _hook_renamed(self) -> None: ...


class _Ours(_Library):
    def _hook(self) -> None:
        self.setting = self.kept + self.gone  # type: ignore[attr-defined]
        super().removed()  # type: ignore[misc]


def test_a_part_that_is_missing_is_named() -> None:
    derived = Derived(_Ours, _Library, called="_hook run", read="setting")
    where = f"{__name__}._Library has no "
    assert missing_parts(derived) == [
        where + "gone",
        where + "removed",
        where + "_hook, or does not call it",
        where + "run, or does not call it",
        where + "setting, or does not read it",
    ]
