"""`HarmonyParser`: answers in harmony, the format of gpt-oss, in which every text has a channel."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infer.text.tools.call import BREAK, Gathered, Parts, ToolCall, made_call

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)
"""All marks, which are special tokens."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_HEADS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
_BODY_END = re.compile("|".join(map(re.escape, (*_ENDS, START, CHANNEL))))
_MAX_HEAD_CHARS = 1024
_FUNCTIONS = "functions."


class HarmonyParser:
    """Parses one answer, as `AnswerParser` does.

        <|channel|>analysis<|message|> … <|end|>             reasoning
        <|start|>assistant<|channel|>final<|message|> …      content; so is a text in `commentary`
        … to=functions.NAME <|constrain|>json<|message|> … <|call|>    a call, whose text is JSON

    The recipient stands behind the role or behind the channel. The prompt ends with the first
    `<|start|>assistant`. A text without a head, such as one that a grammar enforces, is content.
    """

    def __init__(self, *, calls: bool, prompt_end: str = "") -> None:
        """`calls`: messages to functions are calls; otherwise they are content. `prompt_end`: the
        last characters of the prompt, which may have begun a message."""
        self._calls = calls
        self._held = ""
        self._state = "head"
        self._kind = "content"
        self._is_begun = False
        """Whether the message has text."""
        begun = prompt_end.rpartition(START)[2]
        if MESSAGE in begun:
            head, _, said = begun.rpartition(MESSAGE)
            self._begin(head)
            self._is_begun = bool(said.strip())
            self._state = "body"
        elif CHANNEL in begun:
            self._held = CHANNEL + begun.rpartition(CHANNEL)[2]
        self._gathered = Gathered()

    def push(self, text: str, *, end: bool = False) -> Parts:
        """Take a further piece of text; returns what has become certain. `end`: the last piece."""
        self._read(text, end)
        return self._gathered.joined()

    def push_in_order(self, text: str, *, end: bool = False) -> list[Parts]:
        """See `AnswerParser.push_in_order`."""
        self._read(text, end)
        return self._gathered.in_order()

    def _read(self, text: str, end: bool) -> None:
        self._held += text
        while self._held and (self._body(end) if self._state == "body" else self._head(end)):
            pass
        if end:
            self._close()

    def _head(self, end: bool) -> bool:
        """Read the head of a message; returns whether anything has been read."""
        held = self._held.lstrip()
        ended = next((mark for mark in _ENDS if held.startswith(mark)), None)
        if ended is not None:
            self._held = held.removeprefix(ended)
            return True
        if not held.startswith(_HEADS):
            if not end and any(mark.startswith(held) for mark in (*_HEADS, *_ENDS)):
                return False
            self._kind, self._state = "content", "body"  # a text without a head
            return True
        at = held.find(MESSAGE)
        if at < 0:
            if len(held) < _MAX_HEAD_CHARS and not end:
                return False
            self._held = ""
            if not end:
                self._kind, self._state, self._held = "content", "body", held
            return bool(self._held)
        self._begin(held[:at])
        self._state, self._held = "body", held[at + len(MESSAGE) :]
        return True

    def _begin(self, head: str) -> None:
        """Begin a message with the text of its head."""
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        is_call = self._calls and name not in ("", "assistant", "user", "all")
        is_thought = channel is not None and channel[1] == "analysis"
        self._kind = "call" if is_call else "reasoning" if is_thought else "content"
        self._is_begun = False
        self._name = name

    def _body(self, end: bool) -> bool:
        match = _BODY_END.search(self._held)
        if match is None:
            size = len(self._held) if end else len(self._held) - _num_begun(self._held)
            self._give(self._held[:size])
            self._held = self._held[size:]
            return False
        self._give(self._held[: match.start()])
        self._close()
        is_end = match[0] in _ENDS
        self._state, self._held = "head", self._held[match.end() if is_end else match.start() :]
        return True

    def _give(self, text: str) -> None:
        """Output text of the message, without white space at its beginning."""
        text = text if self._is_begun else text.lstrip()
        if not text:
            return
        if self._kind != "call":
            if not self._is_begun and self._gathered.last == self._kind:
                self._gathered.add(self._kind, BREAK)
            self._gathered.add(self._kind, text)
        elif self._is_begun:
            self._gathered.go_on(text)
        else:
            self._gathered.begin([ToolCall(self._name, text)])
        self._is_begun = True

    def _close(self) -> None:
        """End the message; a call without a text has no arguments."""
        if self._state == "body" and self._kind == "call" and not self._is_begun:
            self._gathered.begin([ToolCall(self._name, "{}")])
            self._is_begun = True


def _num_begun(text: str) -> int:
    """The number of characters at the end of a text that may begin a mark."""
    at = text.rfind("<")
    tail = text[at:] if at >= 0 else ""
    return len(tail) if tail and any(mark.startswith(tail) for mark in MARKS) else 0


def write_harmony(calls: Sequence[ToolCall]) -> str:
    """The calls as gpt-oss writes them behind `<|start|>assistant`."""
    heads = (f"{CHANNEL}commentary to={_FUNCTIONS}{call.name} {CONSTRAIN}json" for call in calls)
    written = (f"{head}{MESSAGE}{call.arguments}" for head, call in zip(heads, calls, strict=True))
    return f"<|call|>{START}assistant".join(written) + "<|call|>"


def read_harmony(text: str) -> list[ToolCall] | None:
    """The calls in a text that a template has written; None if there are none."""
    if CHANNEL not in text:
        return None
    parts = HarmonyParser(calls=True).push(text, end=True)
    return [made_call(*call) or call for call in parts.calls]
