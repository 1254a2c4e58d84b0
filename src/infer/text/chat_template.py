"""`ChatTemplate`: renders a checkpoint's Jinja chat template as transformers does.

Templates come with checkpoints and are not trusted: one may be written so that it takes for ever.
So they are compiled and rendered in processes with limits of time and memory
(`text.untrusted.workers`), and a rendering that exceeds them is that caller's `RequestError`. Only
templates whose text is known are rendered in place. A template that does not compile is a
`LoadError`. An error in rendering is attributed to the messages. Messages are copied as plain JSON.
`Tokenizer` uses this module and also keeps control tokens out of messages; this module knows no
tokens.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from infer.errors import LoadError, OverloadedError, RequestError
from infer.text.control_text import free_noncharacters
from infer.text.role_order import in_order
from infer.text.template_probes import find_abilities
from infer.text.thinking_switches import switches
from infer.text.tools.formats import ToolFormat, thoughts_in
from infer.text.tools.tool_messages import adapted
from infer.text.tools.written_numbers import WrittenNumbers, calls_with_own_forms
from infer.text.untrusted.template_renderer import CANNOT, Rendered, TemplateRenderer
from infer.text.untrusted.workers import Answer, Steps, UntrustedWorkers, run_steps

MAX_RENDERED_CHARS = 16_000_000
"""Maximum length of a rendered prompt in characters, which is longer than any context."""
MAX_COMPILE_S = 5
"""Maximum CPU time of starting a process and compiling a template in it, in seconds."""
MAX_RENDER_S = 5
"""Maximum CPU time of a rendering, in seconds; published templates take milliseconds."""
MAX_PROBE_S, MAX_PROBE_CHARS = 1, 1_000_000
"""Maximum CPU time in seconds, and length in characters, of each probe with which a template is
tried at the start."""
MAX_TEMPLATE_CHARS = 2_000_000
"""Maximum length of a template's source in characters; the longest published one has 20,000."""
KNOWN_TEMPLATES = frozenset({"04f3491876eb00dde273cece3681bc42bbffaf2adbcd3550fe0f7b0a61f0adfb"})
"""SHA-256 of the templates that are rendered in place: that of the demo model, whose work is linear
in the messages."""
_WORD = re.compile(r"[A-Za-z_]\w*")


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages")


class _LimitError(Exception):
    """A rendering has exceeded a limit of its process."""


class ChatTemplate:
    """A compiled chat template with the special tokens that it may use (`bos_token`, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: text of each token by the name of its variable.

        `LoadError` if the template is too long, does not compile, or takes too much time or memory.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._words = frozenset(_WORD.findall(source))
        """All identifiers in the source, which include the variables that it reads."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise LoadError(
                f"the chat template has {len(source):,} characters; at most"
                f" {MAX_TEMPLATE_CHARS:,} are taken"
            )
        self.workers: UntrustedWorkers | None = None
        """The processes that render it; None: it is rendered in place."""
        self._renderer: TemplateRenderer | None = None
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        if digest in KNOWN_TEMPLATES:
            self._renderer = TemplateRenderer(source)
        else:
            self.workers = _compiling_workers(source)
        self.abilities = find_abilities(self._render_probe, self._words)
        """What the template supports (tools, parts, …), as probes have found out."""
        self.thoughts = self.abilities.thoughts or thoughts_in(source)
        """Marks around the model's reasoning; None: the template has none."""

    def _render_probe(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        fixed = {"messages": list(messages), "add_generation_prompt": False}
        variables = {**self._common_variables(), "tools": None, **variables, **fixed}
        try:
            return run_steps(self._rendered(variables, MAX_PROBE_S, MAX_PROBE_CHARS))
        except _LimitError as error:
            raise LoadError(
                f"the chat template cannot be used, not even for a few words: {error}"
            ) from None
        except OverloadedError as error:
            raise LoadError(f"the chat template cannot be tried: {error}") from None

    def _common_variables(self) -> dict[str, Any]:
        """The variables that are the same for every prompt."""
        common: dict[str, Any] = {"documents": None, **self._special_tokens}
        if "datetime" in self._words:  # Firefunction's template needs it; clients do not send it
            common["datetime"] = datetime.datetime.now().strftime("%B %d %Y %H:%M:%S")
        return common

    def render(self, *arguments: Any, **options: Any) -> str:
        """The prompt as text, with the arguments of `rendering`; blocks meanwhile."""
        return run_steps(self.rendering(*arguments, **options))

    def rendering(
        self,
        messages: Sequence[Mapping[str, Any]],
        tool_format: ToolFormat | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> Steps[str]:
        """The prompt as text. `extra`: further variables of the template; those that say whether
        and how long a model thinks are given under the names that the template reads.

        Entries of a message that are None count as absent. The role "developer" is a newer name of
        "system". Messages are brought into an order that the template takes (`text.role_order`).
        Tools, calls and results are given to the template in the form that it supports.
        `tool_format` is the format of calls that the template does not render itself; the default
        is the template's own format or else a generic one. With `continue_final_message` the text
        ends where the last message's content ends. Raises `RequestError` with `param="messages"`
        for anything that the template refuses or cannot render.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message and add_generation_prompt"
                " starts a new one; use one of them",
                param="continue_final_message",
            )
        for name in extra:
            if name in ("raise_exception", "range") or name.startswith("_"):
                problem = f"{name!r} cannot be set as a variable of the chat template"
                raise RequestError(problem, param="chat_template_kwargs")
        turns = [self._prepared(f"messages[{i}]", message) for i, message in enumerate(messages)]
        if not turns:
            raise _refusal("messages is empty: send at least one message")
        turns = in_order(turns, self.abilities.order)
        way = tool_format or self.abilities.format
        texts = [turns, tools, extra, self.source]
        tag = free_noncharacters(texts, 1)[0] if continue_final_message else ""
        extra = switches(
            {n: _plain(value, n) for n, value in extra.items()}, self.source, self._words
        )
        extra["add_generation_prompt"] = add_generation_prompt
        known = [] if tools is None else _plain(tools, "tools")
        if not isinstance(known, list) or not all(isinstance(tool, dict) for tool in known):
            raise RequestError("tools must be a list of objects", param="tools")
        text = yield from self._adapted(turns, known, way, tag, extra)
        if calls_with_own_forms(turns):
            numbers = WrittenNumbers(turns, free_noncharacters(texts, 2)[1])
            marked = yield from self._adapted(numbers.turns, known, way, tag, extra)
            text = numbers.restored(marked, text)
        return text

    def _adapted(
        self,
        turns: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        way: ToolFormat | None,
        tag: str,
        extra: dict[str, Any],
    ) -> Steps[str]:
        """The prompt, which ends where the last message's content ends if there is a `tag`."""
        turns, shown = adapted(turns, tools, self.abilities, way)
        if tag:
            _tag_final(turns[-1], tag)
        variables = self._common_variables() | extra | {"messages": turns, **shown}
        try:
            text = yield from self._rendered(variables, MAX_RENDER_S, MAX_RENDERED_CHARS)
        except _LimitError as error:
            raise _refusal(f"{CANNOT}: {error}") from None
        return _cut_at(text, tag) if tag else text

    def _prepared(self, where: str, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise _refusal(f"{where} must be an object with `role` and `content`, not {kind}")
        turn: dict[str, Any] = _plain(
            {key: value for key, value in message.items() if value is not None}, where
        )
        if not isinstance(turn.get("role"), str):
            raise _refusal(f"{where} has no `role` (a string)")
        if turn["role"] == "developer":
            turn["role"] = "system"
        # Templates read the reasoning of earlier turns as `thinking` or as `reasoning_content`.
        for name in ("reasoning_content", "thinking", "reasoning"):
            if name in turn:
                turn = {"thinking": turn[name], **turn, "reasoning_content": turn[name]}
                break
        content = turn.get("content")
        is_result = turn["role"] in ("tool", "ipython")
        if content == [] and not is_result:
            turn["content"] = ""
        elif isinstance(content, list) and not self.abilities.takes_parts:
            only_text = all(_kind_of(part) == "text" for part in content)
            # A tool's result may be a list of anything, which templates render as JSON.
            if only_text or not is_result:
                turn["content"] = "\n".join(_text_of(part, where) for part in content)
        return turn

    def _rendered(self, variables: dict[str, Any], max_cpu_s: int, max_chars: int) -> Steps[str]:
        """The prompt. Raises `RequestError` and `_LimitError`."""
        rendered: Rendered
        if self._renderer is not None:
            rendered = self._renderer.render(variables, max_chars)
        else:
            assert self.workers is not None
            try:
                job = self.workers.job((variables, max_chars), max_cpu_s)
            except (ValueError, RecursionError):
                problem = "they are nested too deeply, or have a number that is too long"
                raise _refusal(f"{CANNOT}: {problem}") from None
            rendered = _rendered_of(self.workers.lasting((yield job)))
        if (limit := rendered.get("exceeds")) is not None:
            raise _LimitError(_LIMITS[limit].format(max_cpu_s=max_cpu_s, max_chars=max_chars))
        if "problem" in rendered:
            raise _refusal(rendered["problem"])
        text: str = rendered["text"]
        return text

    def warm(self) -> None:
        """Start all processes that render it, without waiting until they are ready."""
        if self.workers is not None:
            self.workers.warm()

    def rest(self) -> None:
        """End the processes until something is to be rendered."""
        if self.workers is not None:
            self.workers.rest()


_LIMITS = {
    "cpu": "it takes more than {max_cpu_s} s of CPU time",
    "chars": "the prompt is longer than {max_chars} characters",
    "memory": "it takes too much memory",
    "crash": "it ends the process that renders it",
}


def _rendered_of(answer: Answer) -> Rendered:
    if answer.death:
        return {"exceeds": answer.death}
    rendered: Rendered = answer.value
    return rendered


def _compiling_workers(source: str) -> UntrustedWorkers:
    """Processes that render a template, one of which has compiled it; raises `LoadError`."""
    workers = UntrustedWorkers("template", lambda: source, prepare_cpu_s=MAX_COMPILE_S)
    try:
        compiled = _rendered_of(workers.lasting(workers.first_answer()))
    except OverloadedError as error:
        workers.close()
        raise LoadError(f"the chat template cannot be compiled: {error}") from None
    problem = compiled.get("problem")
    if (limit := compiled.get("exceeds")) is not None:
        problem = _LIMITS[limit].format(max_cpu_s=MAX_COMPILE_S)
    if problem is not None:
        workers.close()
        raise LoadError(f"the chat template does not compile: {problem}")
    return workers


def _plain(value: Any, where: str) -> Any:
    """A copy that consists of JSON's types only, without subclasses.

    `RequestError` if `value`, which the message calls `where`, has other types or is too deep.
    """
    if value is None or isinstance(value, bool):
        return value
    try:
        if isinstance(value, str):  # also an enumeration whose members are strings
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Mapping):
            return {_plain(key, where): _plain(item, where) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(item, where) for item in value]
    except RecursionError:
        raise _refusal(f"{where} is nested too deeply") from None
    raise _refusal(f"{where} contains a {type(value).__name__}; only JSON values can be rendered")


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else type(part).__name__


def _text_of(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = _kind_of(part)
        raise _refusal(
            f"{where}.content has a part of type {kind!r}; this model reads text parts only"
        )
    return text


def _tag_final(turn: dict[str, Any], mark: str) -> None:
    """Append the mark and a space to the content of the last message, in place.

    The space is missing from the prompt if the template strips white space from contents.
    """
    content = turn.get("content")
    if isinstance(content, str):
        turn["content"] = content + mark + " "
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += mark + " "
            return
    raise _refusal("continue_final_message needs a last message with text to continue")


def _cut_at(text: str, mark: str) -> str:
    """The text before the mark of `_tag_final`."""
    kept, separator, rest = text.rpartition(mark)
    if not separator:
        raise _refusal(
            "the model's chat template leaves out the last message, so it cannot be continued"
        )
    return kept if rest.startswith(" ") else kept.rstrip()
