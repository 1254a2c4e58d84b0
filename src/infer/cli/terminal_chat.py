"""`infer chat`: a conversation in the terminal, with a model in this process or on a server"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from infer.cli.chat_sources import FULL, ChatSource, Message, Taken
from infer.cli.markdown_stream import MarkdownStream
from infer.cli.plain import note, write
from infer.errors import InferError, RequestError
from infer.files import parse_json, read_text
from infer.readable_text import readable
from infer.types import Sampling, SamplingParams

MAX_FILE_BYTES = 64 << 20
"""Most bytes of a file that `/load` reads."""
NEARLY_FULL = 0.8
"""Share of the model's context from which each answer says how full it is."""
SUMMARISE = (
    "Summarise our conversation so far: what was asked, what was found, what is decided and what is"
    " open. Only the summary."
)
QUOTES = '"""'


class Chat:
    """A message is a line, several lines that were pasted together, or what stands between two
    lines of `\"\"\"`. A line that begins with `/` is a command. The answer is on stdout, everything
    else on stderr. Ctrl+C stops the answer that is being written, and nothing else."""

    def __init__(
        self, source: ChatSource, notes: Console, system: str | None, sampling: dict[str, Any]
    ) -> None:
        """`sampling`: fields of `SamplingParams` that were chosen."""
        self._source, self._notes, self._sampling = source, notes, dict(sampling)
        self._messages: list[Message] = []
        self._taken = Taken()
        self._cuts = False
        """Whether the oldest messages are left out where the context is full."""
        if system:
            self._messages.append({"role": "system", "content": readable(system)})
        self._commands: dict[str, tuple[Callable[[str], object], str]] = {
            "/help": (self._help, "this list"),
            "/reset": (self._reset, "a new conversation"),
            "/system": (self._system, "[TEXT]: show, or set and begin anew, the system message"),
            "/set": (self._set, "[NAME [VALUE]]: show, or set, a sampling field"),
            "/retry": (self._retry, "answer the last message again"),
            "/undo": (self._undo, "take the last message and its answer back"),
            "/save": (self._save, "FILE: write the conversation"),
            "/load": (self._load, "FILE: go on with a conversation that was written"),
            "/tokens": (self._tokens, "how much of the context the conversation takes"),
            "/why": (self._why, "what happened to the last answer, and when"),
            "/model": (self._model, "[NAME]: show, or choose, the model that answers"),
            "/forget": (self._forget, "leave out the oldest messages where the context is full"),
            "/summary": (self._summarise, "go on with a summary in place of the conversation"),
            "/exit": (self._help, "end, as Ctrl+D does"),
        }

    def run(self) -> None:
        """Read messages and answer them until the end of input or `/exit`."""
        note(
            self._notes,
            f"{self._source.model} — /help lists the commands, {QUOTES} begins and ends several"
            " lines, Ctrl+C stops an answer, Ctrl+D ends",
        )
        while (message := read_message()) is not None and message.text != "/exit":
            try:
                if message.is_quoted:
                    self._ask([*self._messages, {"role": "user", "content": message.text}])
                else:
                    self._do(message.text)
            except InferError as error:
                note(self._notes, error, "yellow")

    def _do(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name in self._commands:
            self._commands[name][0](rest.strip())
        elif name.startswith("/") and "\n" not in text and "/" not in name[1:]:
            near = [command for command in self._commands if command.startswith(name)]
            near = near or get_close_matches(name, self._commands, 2, 0.7)
            hint = f"do you mean {' or '.join(near)}?" if near else "/help lists the commands"
            note(self._notes, f"{name} is not a command; {hint}", "yellow")
        elif text:
            self._ask([*self._messages, {"role": "user", "content": text}])

    def _ask(self, messages: list[Message]) -> None:
        """Answer messages, and keep them with the answer; nothing is kept if that fails."""
        text = self._answer(messages)
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _answer(self, messages: list[Message]) -> str:
        self._taken, text = Taken(), ""
        shown = _answer_writer()
        try:
            for piece in self._source.answer(messages, self._sampling, self._taken, cut=self._cuts):
                text += piece
                shown.add(piece)
        except KeyboardInterrupt:
            self._taken.finish_reason = "stopped"
        except RequestError as error:
            if error.code != FULL:
                raise
            raise RequestError(f"{error}; {_WAYS_ON}", code=FULL) from None
        finally:
            shown.close()
        note(self._notes, self._taken)
        if self._taken.num_dropped:
            note(self._notes, f"without the oldest {self._taken.num_dropped} messages")
        self._say_how_full(text)
        return text

    def _say_how_full(self, text: str) -> None:
        num, most = self._taken.num_prompt + self._taken.num_tokens, self._source.max_tokens
        is_full = self._taken.finish_reason == "length" and "max_tokens" not in self._sampling
        if is_full and (not num or num >= most - 1):
            note(self._notes, f"the context is full; {_WAYS_ON}", "yellow")
        elif num > NEARLY_FULL * most:
            note(self._notes, f"{num:,} of {most:,} tokens of the context are used", "yellow")

    # Commands; each takes what stands behind its name.

    def _help(self, _: str) -> None:
        for name, (_act, text) in self._commands.items():
            note(self._notes, f"{name:<9} {text}")

    def _reset(self, _: str) -> None:
        self._messages = [message for message in self._messages[:1] if message["role"] == "system"]
        note(self._notes, "a new conversation")

    def _system(self, text: str) -> None:
        if text:
            self._messages = [{"role": "system", "content": text}]
            note(self._notes, "a new conversation with this system message")
            return
        systems = [
            message["content"] for message in self._messages[:1] if message["role"] == "system"
        ]
        note(self._notes, systems[0] if systems else "there is no system message")

    def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ").partition(" ")
        if not name:
            chosen = ", ".join(
                f"{field} {chosen_value}" for field, chosen_value in self._sampling.items()
            )
            note(self._notes, chosen or "nothing is chosen: all as the model says")
            return
        sampling = dict(self._sampling)
        if value.strip():
            try:
                sampling[name] = parse_json(value.strip())
            except ValueError:
                sampling[name] = value.strip()
        else:
            sampling.pop(name, None)
        try:
            SamplingParams(**sampling)
        except TypeError:
            fields = [field for field in Sampling.__slots__ if field not in ("given", "grammar")]
            raise InferError(f"there is no field {name!r}; there are {', '.join(fields)}") from None
        self._sampling = sampling
        note(self._notes, f"{name} is {sampling.get(name, 'as the model says')}")

    def _retry(self, _: str) -> None:
        last = self._last_question("there is no message to answer again")
        self._ask(self._messages[: last + 1])

    def _undo(self, _: str) -> None:
        last = self._last_question("there is nothing to take back")
        note(self._notes, f"taken back: {self._messages[last]['content']}")
        self._messages = self._messages[:last]

    def _last_question(self, otherwise: str) -> int:
        users = [at for at, message in enumerate(self._messages) if message["role"] == "user"]
        if not users:
            raise InferError(otherwise)
        return users[-1]

    def _save(self, name: str) -> None:
        fields = {"messages": self._messages, "sampling": self._sampling}
        try:
            text = json.dumps(fields, ensure_ascii=False, indent=1)
            _path(name, "/save").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InferError(f"{name} cannot be written: {error.strerror}") from None
        note(self._notes, f"{len(self._messages)} messages are in {name}")

    def _load(self, name: str) -> None:
        try:
            fields = parse_json(read_text(_path(name, "/load"), MAX_FILE_BYTES))
            messages = [
                {"role": str(message["role"]), "content": str(message["content"])}
                for message in fields["messages"]
            ]
            sampling = dict(fields.get("sampling") or {})
            SamplingParams(**sampling)
        except OSError as error:
            raise InferError(f"{name} cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InferError(f"{name} is no conversation that /save has written") from None
        self._messages, self._sampling = messages, sampling
        note(self._notes, f"{len(messages)} messages from {name}")

    def _tokens(self, _: str) -> None:
        most = self._source.max_tokens
        if not self._taken.num_prompt:
            note(self._notes, f"the context has {most:,} tokens; an answer says what is used of it")
            return
        used = self._taken.num_prompt + self._taken.num_tokens
        cached = f", {self._taken.num_cached:,} of the prompt from the cache"
        note(self._notes, f"{used:,} of {most:,} tokens of the context are used{cached}")

    def _why(self, _: str) -> None:
        if not self._taken.num_tokens:
            raise InferError("there is no answer yet")
        self._source.why(self._taken, self._notes)

    def _model(self, name: str) -> None:
        if name:
            self._source.use(name)
        note(self._notes, f"{self._source.model} answers")

    def _forget(self, _: str) -> None:
        self._cuts = True
        note(self._notes, "from now on the oldest messages are left out where all do not fit")

    def _summarise(self, _: str) -> None:
        self._last_question("there is nothing to summarise")
        before, self._cuts = self._cuts, True
        try:
            text = self._answer([*self._messages, {"role": "user", "content": SUMMARISE}])
        finally:
            self._cuts = before
        systems = [message for message in self._messages[:1] if message["role"] == "system"]
        begin = {"role": "user", "content": f"What we have talked about so far:\n\n{text}"}
        self._messages = [*systems, begin, {"role": "assistant", "content": "I see."}]
        note(self._notes, "the conversation goes on with this summary")


_WAYS_ON = (
    "/forget goes on without the oldest messages, /summary with a summary, /reset begins anew"
)


def _path(name: str, command: str) -> Path:
    if not name:
        raise InferError(f"{command} needs the name of a file")
    return Path(name).expanduser()


class _TextItself:
    """What a pipe or a file gets of an answer."""

    def add(self, text: str) -> None:
        write(text)

    def close(self) -> None:
        print(flush=True)


def _answer_writer() -> MarkdownStream | _TextItself:
    """Styled in a terminal that has colours."""
    if not sys.stdout.isatty():
        return _TextItself()
    styled = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return MarkdownStream(show, shutil.get_terminal_size().columns, styled=styled)


class Typed(NamedTuple):
    """What the user has typed or pasted."""

    text: str
    is_quoted: bool = False
    """Whether it stood between quotes, so that it is a message whatever it begins with."""


def read_message() -> Typed | None:
    """One message or command, several lines where they were pasted together or stand between
    quotes; None at the end of input."""
    line = _read_line("\n› ")
    if line is None or not line.lstrip().startswith(QUOTES):
        return None if line is None else Typed(line.strip())
    lines = [line.lstrip().removeprefix(QUOTES)]
    while QUOTES not in lines[-1]:
        if (line := _read_line("… ")) is None:
            break
        lines.append(line)
    return Typed("\n".join(lines).partition(QUOTES)[0].strip("\n"), is_quoted=True)


def _read_line(prompt: str) -> str | None:
    """A line; None at the end of input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _prepare_line_editing()
    while True:
        try:
            return readable(input(prompt if is_terminal else ""))
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _prepare_line_editing() -> None:
    """History, editing, and one message of what is pasted, where Python has GNU readline."""
    try:
        import readline
    except ImportError:
        return
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
