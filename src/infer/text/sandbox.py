"""`BoundedEnvironment`: Jinja's immutable sandbox with a budget of work for each rendering.

Templates come with checkpoints and are not trusted, and Jinja's own sandbox limits neither time nor
memory. Here every iteration of a loop, every call, every filter, and every operator that makes a
value spends a part of a budget. It is spent before the value is made, if its size is known then. A
rendering that has used up its budget or its CPU time ends with a `WorkError`. `chat_template` uses
this module, which knows no messages and no tokens.
"""

from __future__ import annotations

import contextlib
import functools
import re
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED_CHARS = 16_000_000
"""Maximum length of a rendered prompt in characters, which is longer than any context."""
MAX_RANGE = 10_000
"""Maximum length of a range, and maximum of any width or count that a template gives."""
_MAX_BITS = 4096
"""Maximum size of an integer that a template computes, in bits."""
ROUND_UNITS, NODE_UNITS, LIST_UNITS = 20, 8, 16
"""Units of work of an iteration or call, of a value in a container, and of a listed character.

The last is for each character of a text that becomes a list. Each character that is made takes one
unit.
"""
_WIDE = frozenset({"center", "indent", "batch", "slice", "round", "tojson", "wordwrap", "truncate"})
_PADDING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_REFUSED_METHODS = frozenset({"translate", "maketrans", "to_bytes"})
_REFUSED_FILTERS = frozenset({"urlize", "xmlattr"})
_MAKING_LISTS = frozenset({"split", "rsplit", "splitlines", "list", "sort", "unique", "fromkeys",
                           "batch", "slice", "groupby", "reverse", "wordwrap"})  # fmt: skip
_PERCENT = re.compile(r"%(?:\(\w*\))?[-+ #0-9.*]*")


class WorkError(SecurityError):
    """A rendering has taken too much time or memory, or would take too much."""


class _Budget(threading.local):
    """The budget of the rendering in this thread."""

    units = 0.0
    """Units of work that are left."""
    ends_s = float("inf")
    """CPU time of the thread at which the rendering must have ended, in seconds."""
    unchecked = 0.0
    """Units of work that were spent since the CPU time was last checked."""


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore; such names have broken sandboxes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _Generator(CodeGenerator):
    """Generates code in which the environment counts containers and joined texts."""

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "store":
            super().visit_Tuple(node, frame)
        else:
            self._counted(super().visit_Tuple, node, frame)

    def _counted(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.counted(")
        visit(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with a budget; see the module's docstring.

    Rendering outside `limited` has no budget and fails.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._finalized, **options)
        self._budget = _Budget()
        self.concat = self._concatenated  # type: ignore[method-assign]
        self.globals["range"] = _limited_range
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # random text of any length
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._bounded(name, each) for name, each in self.filters.items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter of the caller's, which is counted like Jinja's own filters."""
        self.filters[name] = self._bounded(name, function)

    @contextlib.contextmanager
    def limited(self, units: float, cpu_s: float) -> Iterator[None]:
        """A context in which this thread's renderings have a budget.

        `units`: units of work; `cpu_s`: CPU time in seconds.
        """
        budget = self._budget
        before = budget.units, budget.ends_s, budget.unchecked
        budget.units, budget.unchecked = units, 0.0
        budget.ends_s = time.thread_time() + cpu_s
        try:
            yield
        finally:
            budget.units, budget.ends_s, budget.unchecked = before

    def spend(self, units: float) -> None:
        """Spend units of work; `WorkError` if the budget or the CPU time is used up."""
        budget = self._budget
        budget.units -= units
        budget.unchecked += units
        if budget.units < 0:
            raise WorkError("the template does too much work")
        if budget.unchecked > 1000:
            budget.unchecked = 0.0
            if time.thread_time() > budget.ends_s:
                raise WorkError("the template takes too long")

    @property
    def tick(self) -> bool:
        """True; reading it spends the units of one iteration. The body of every loop reads it."""
        self.spend(ROUND_UNITS)
        return True

    def counted(self, container: Any) -> Any:
        """The container, after spending units for all values in it."""
        self._walk(container, chars=0)
        return container

    def joined(self, parts: Sequence[Any]) -> str:
        """The parts as one text, which the operator `~` makes."""
        for part in parts:
            self._walk(part, chars=1)
        return "".join(map(str, parts))

    def _walk(self, value: Any, chars: float) -> None:
        """Spend units for a value and all values in it, however often each occurs.

        `chars`: units per character. So a container that holds itself many times costs as much as
        its text would.
        """
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self.spend(NODE_UNITS + chars * len(one))
            elif isinstance(one, Mapping):
                self.spend(NODE_UNITS * (1 + len(one)))
                waiting += one.keys()
                waiting += one.values()
            elif isinstance(one, (list, tuple, set)):
                self.spend(NODE_UNITS * (1 + len(one)))
                waiting += one
            elif isinstance(one, Namespace):
                raise WorkError("the template uses a namespace as a value")
            else:
                self.spend(NODE_UNITS)

    def _finalized(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._walk(value, chars=1)
        return value

    def _concatenated(self, pieces: Any) -> str:
        kept = list(pieces)
        self.spend(sum(map(len, kept)))
        return "".join(kept)

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        for loop in list(source.find_all(nodes.For)):
            tick = nodes.EnvironmentAttribute("tick")
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(tick, loop.test, lineno=loop.lineno)
        return super()._generate(source, name, filename, defer_init)

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        if isinstance(argument, slice):
            self.spend(_length(found) * (1 if isinstance(found, str) else NODE_UNITS))
        return found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, after spending units for its result."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and (not numbers or abs(left) > 10_000 or abs(right) > 100):
            raise WorkError("the template computes a number too large")
        if operator == "*":
            bits = [x.bit_length() for x in (left, right) if isinstance(x, int)]
            if numbers and sum(bits) > _MAX_BITS:
                raise WorkError("the template computes a number too large")
            for many, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(many, (str, bytes, list, tuple)):
                    each = 1 if isinstance(many, (str, bytes)) else NODE_UNITS
                    self.spend(len(many) * max(0, count) * each)
        elif operator == "+" and not numbers:
            each = 1 if isinstance(left, str) else NODE_UNITS
            self.spend((_length(left) + _length(right)) * each)
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._check_percent(str(left), right)
        made = super().call_binop(context, operator, left, right)
        return self.counted(made) if isinstance(made, (list, tuple)) else made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = str(value.__self__)

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_format(template, (args, kwargs))
            made = wrapped(*args, **kwargs)
            self.spend(len(made))
            return made

        return functools.update_wrapper(bounded, value)

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __self.spend(ROUND_UNITS)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple, dict)):
            args = __self._check_method(owner, __obj.__name__, args, kwargs)
        made = super().call(__context, __obj, *args, **kwargs)
        return __self._counted_result(made)

    def _counted_result(self, made: Any) -> Any:
        if isinstance(made, (str, bytes)):
            self.spend(len(made))
        elif isinstance(made, (list, tuple, dict)):
            self.counted(made)
        return made

    def _check_method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Spend units for a method of a built-in type before it is called; returns its arguments.

        `join` gets a list instead of an iterator, since counting consumes an iterator.
        """
        if name in _REFUSED_METHODS:
            raise WorkError(f"the template calls {name}")
        if name in _PADDING:
            _check_widths((*args, *kwargs.values()))
            if name == "expandtabs":
                self.spend(_length(owner) * 8 * MAX_RANGE if args or kwargs else 8 * len(owner))
        elif name == "join" and args:
            args = (self._counted_parts(owner, args[0]), *args[1:])
        elif name == "replace" and len(args) > 1:
            self._spend_replacing(owner, args[0], args[1])
        inputs = (_length(owner), *map(_length, args))
        self.spend(sum(inputs) * (LIST_UNITS if name in _MAKING_LISTS else 0.125))
        return args

    def _counted_parts(self, separator: Any, parts: Any) -> list[Any]:
        kept = []
        for part in parts:
            self._walk(part, chars=1)
            self.spend(_length(separator))
            kept.append(part)
        return kept

    def _spend_replacing(self, text: Any, old: Any, new: Any) -> None:
        if isinstance(text, str) and isinstance(old, str):
            self.spend(len(text) + text.count(old) * _length(new))

    def _check_percent(self, template: str, values: Any) -> None:
        for part in _PERCENT.findall(template):
            if "*" in part:
                raise WorkError("the template formats with a width that is a variable")
            self._check_numbers(part)
        self._walk(values, chars=1 + template.count("%"))

    def _check_format(self, template: str, values: Any) -> None:
        with contextlib.suppress(ValueError):  # formatting will raise the same error
            for _, _, spec, _ in string.Formatter().parse(template):
                if spec and "{" in spec:
                    raise WorkError("the template formats with a width that is a variable")
                self._check_numbers(spec or "")
        self._walk(values, chars=1 + template.count("{"))

    def _check_numbers(self, spec: str) -> None:
        for digits in re.findall(r"\d+", spec):
            if len(digits) > 5 or int(digits) > MAX_RANGE:
                raise WorkError(f"the template pads a text to more than {MAX_RANGE} characters")
            self.spend(int(digits))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            # Some filters get one of these objects from Jinja as their first argument.
            first = int(bool(given) and isinstance(given[0], _PASSED))
            self._check_filter(name, given, first, kwargs)
            return self._counted_result(function(*given, **kwargs))

        return bounded

    def _check_filter(
        self, name: str, given: list[Any], first: int, kwargs: Mapping[str, Any]
    ) -> None:
        value = given[first] if len(given) > first else None
        others = [*given[first + 1 :], *kwargs.values()]
        self.spend(ROUND_UNITS + sum(map(_length, [value, *others])) * 0.125)
        if name in _WIDE:
            _check_widths(others, 100 if name in ("round", "tojson") else MAX_RANGE)
        if name in ("list", "sort", "unique", "groupby", "batch", "slice", "reverse", "wordwrap"):
            self.spend(_length(value) * LIST_UNITS)
        if name == "join":
            separator = next((each for each in others if isinstance(each, str)), "")
            if value is not None and not isinstance(value, str):
                given[first] = self._counted_parts(separator, value)
            else:
                self.spend(_length(value) * (1 + len(separator)))
        elif name in ("string", "tojson", "pprint", "trim", "lower", "upper", "capitalize", "title",
                      "e", "escape", "forceescape", "safe", "striptags", "urlencode",
                      "wordcount"):  # fmt: skip
            self._walk(value, chars=0.25)
            if any(_length(each) > 100 for each in _texts(others)):
                raise WorkError(f"the template gives `{name}` a text of more than 100 characters")
        elif name == "replace" and len(others) > 1:
            self._walk(value, chars=0)
            self._spend_replacing(str(value), others[0], others[1])
        elif name == "format":
            self._check_percent(str(value), others)
        elif name == "sum" and any(not isinstance(each, (int, float, str)) for each in others):
            raise WorkError("the template uses the filter `sum` on lists")
        elif name in ("indent", "wordwrap") and isinstance(value, str):
            width = max([4, *(each for each in others if isinstance(each, int)),
                         *map(_length, others)])  # fmt: skip
            lines = value.count("\n") + 1 if name == "indent" else len(value)
            self.spend(len(value) + lines * width)


_PASSED = (Environment, Context, nodes.EvalContext)


def _limited_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise WorkError(f"the template loops more than {MAX_RANGE} times")
    return numbers


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 0


def _texts(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, str))
        elif isinstance(value, str):
            yield value


def _check_widths(values: Sequence[Any], most: int = MAX_RANGE) -> None:
    if any(isinstance(value, int) and abs(value) > most for value in values):
        raise WorkError(f"the template uses a width or a count above {most}")
