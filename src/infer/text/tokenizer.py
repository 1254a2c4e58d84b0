"""`Tokenizer`: converts text to token ids and back, and chats to prompts, for one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from infer.errors import LoadError, RequestError
from infer.files import reading
from infer.text.answer_marks import marks_of_architecture, marks_of_response_template
from infer.text.chat_template import ChatTemplate
from infer.text.checkpoint_text import TextFiles, read_text_files
from infer.text.control_text import ControlText, sealed_names, sealed_tokenizer
from infer.text.detokenizer import IncrementalDetokenizer, make_detokenizer, pieces_for
from infer.text.library_tokenizer import end_token_ids, library_tokenizer
from infer.text.tools.formats import Thoughts, thoughts_named
from infer.text.tools.tool_use import (
    ARCHITECTURE,
    RESPONSE_TEMPLATE,
    ToolUse,
    find_tool_use,
)
from infer.text.untrusted.workers import Steps, run_steps

LONG_CHARS = 8192
"""Length, in characters or tokens, above which the interpreter lock is released for a text."""
MAX_ADDED_TOKENS = 20_000
"""Maximum number of added tokens; Gemma 3 has 6,400. Each takes 0.1 ms at the start."""


class Tokenizer:
    """The tokenizer of one checkpoint.

    The ids are those of transformers' fast tokenizers for the same folder. The post-processor in
    `tokenizer.json` decides whether BOS is added; as in transformers 5, `add_bos_token` in the
    configuration is not read. There is one more promise: text from a caller never becomes a control
    token (`text.control_text`). A `Tokenizer` is immutable after loading, and threads may share it.
    The façades, the server and the command line use it. `from_folder` makes it.

    `vocab_size` is the highest id plus one, so it includes added tokens and gaps; a model may have
    more logits. `eos_token_ids` are those of generation_config.json, config.json and the tokenizer,
    in this order. `special_token_ids` are the tokens that `skip_special_tokens` leaves out.
    `named_tokens` (those of `bos_token`, … that are set) and `tokenizer_class` are as in the files.
    """

    def __init__(self, files: TextFiles) -> None:
        """Raises `LoadError` if the files are malformed."""
        with reading("the tokenizer"):
            self._load(files)

    def _load(self, files: TextFiles) -> None:
        self._parser = library_tokenizer(files)
        vocab = self._parser.get_vocab()
        if not vocab:
            raise LoadError("tokenizer.json has no tokens")
        added = self._parser.get_added_tokens_decoder()
        if len(added) > MAX_ADDED_TOKENS:
            raise LoadError(
                f"tokenizer.json has {len(added):,} added tokens; at most {MAX_ADDED_TOKENS:,} are"
                " taken"
            )
        self.max_token_chars = max(map(len, vocab), default=1)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.named_tokens: Mapping[str, str] = (named := dict(files.named_tokens))
        self.tokenizer_class = files.tokenizer_class
        self.bos_token_id: int | None = vocab.get(named.get("bos_token", ""))
        self.eos_token_ids = end_token_ids(files, vocab)
        # A byte-order mark would be the beginning of every prompt.
        given = {name: text.removeprefix("\ufeff") for name, text in files.templates.items()}
        sources = [given.get(name) for name in ("default", "tool_use")]
        templates = {text: ChatTemplate(text, named) for text in set(sources) if text is not None}
        self._templates = tuple(templates.values())
        self.chat_template = None if sources[0] is None else templates[sources[0]]
        self.tool_template = self.chat_template if sources[1] is None else templates[sources[1]]
        self._find_marks(files, {token.content for token in added.values()})

        # An end-of-sequence token is a control token even if the files do not mark it as special.
        control_ids = self.special_token_ids | added.keys() & set(self.eos_token_ids)
        names = sealed_names(added[i].content for i in control_ids)
        self._control = ControlText(names)
        description = json.loads(self._parser.to_str())
        self._sealed = sealed_tokenizer(description, names)
        self._pieces = pieces_for(description["decoder"], self._spelling)

    def _find_marks(self, files: TextFiles, tokens: set[str]) -> None:
        """Find out how the model writes reasoning and calls; `tokens`: those that were added."""
        self.tool_use: ToolUse | None = None
        """How tools are described to the model and called; None: there is no chat template."""
        self.thoughts: Thoughts | None = None
        """Marks around the model's reasoning; None: it writes none."""
        template = self.tool_template
        if template is None:
            return
        known = marks_of_architecture(files.architecture)
        described = marks_of_response_template(files.response_template)
        others = {ARCHITECTURE: known.calls, RESPONSE_TEMPLATE: described.calls}
        self.tool_use = find_tool_use(template, files.tool_parser, tokens, others)
        self.thoughts = template.thoughts or known.thoughts or described.thoughts
        if files.reasoning_parser is not None:
            self.thoughts = thoughts_named(files.reasoning_parser)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        `LoadError` lists everything that is missing or malformed.
        """
        return cls(read_text_files(Path(folder)))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False
    ) -> list[int]:
        """The token ids of a text.

        `add_special_tokens`: add BOS and other tokens as the checkpoint defines. A control literal
        in the text, such as `<|end|>`, is ordinary text, unless `parse_special_tokens` is set,
        which is for trusted text only. Raises `RequestError` for invalid Unicode (lone surrogates).
        """
        tokenizer = self._parser if parse_special_tokens else self._sealed
        return _encode(tokenizer, text, add_special_tokens=add_special_tokens, param=None)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a token (padding of the vocabulary) have no text.

        Spaces are never "cleaned up", even if the configuration asks for it, because that loses
        text. Raises `RequestError` for numbers that cannot be ids.
        """
        ids = list(token_ids)
        try:
            if len(ids) > LONG_CHARS:  # the batch functions release the interpreter lock
                (text,) = self._parser.decode_batch([ids], skip_special_tokens=skip_special_tokens)
                return str(text)
            return self._parser.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise RequestError(
                "token ids must be integers from 0 to 2**32 - 1", param="tokens"
            ) from None

    def _spelling(self, token_id: int) -> str | None:
        return self._parser.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def to_json(self) -> str:
        """This tokenizer as the text of a `tokenizer.json`."""
        return self._parser.to_str()

    def token_piece(self, token_id: int) -> str:
        """A token as the vocabulary spells it, such as `Ġworld`, `▁world`, `<0x0A>`.

        "" if there is no such id.
        """
        return self._spelling(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The exact bytes of one token inside a text; None if they or the id are not known."""
        if self._pieces is None or self._spelling(token_id) is None:
            return None
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text, with U+FFFD for bytes that are no character."""
        if self._pieces is None and self._spelling(token_id) is not None:
            return self._parser.decode([token_id], skip_special_tokens=False)
        return (self.token_bytes(token_id) or b"").decode("utf-8", errors="replace")

    def apply_chat_template(
        self, /, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> tuple[str, list[int]]:
        """The prompt of a chat, with the arguments of `chat_prompt`; blocks meanwhile."""
        return run_steps(self.chat_prompt(messages, **options))

    def chat_prompt(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Steps[tuple[str, list[int]]]:
        """The prompt of a chat: (text, token ids). `options`: as for `ChatTemplate.rendering`.

        The template itself writes BOS and control tokens, so none is added. Control literals in
        messages, tools and options stay text. Raises `RequestError` with `param="messages"` if the
        template cannot render the messages.
        """
        template = self.tool_template if tools else self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template: it completes text and does not chat;"
                " use /v1/completions (in Python: generate)",
                param="messages",
            )
        marked = self._control.mark(list(messages), list(tools or ()), options)
        messages, tools, options = marked.values
        way = self.tool_use.format if self.tool_use and template is self.tool_template else None
        rendered = yield from template.rendering(messages, way, tools=tools, **options)
        # This is needed even if no literal was found: a normalizer may turn other text into one.
        text, prompt = self._control.seal(rendered, marked)
        return text, _encode(self._sealed, prompt, add_special_tokens=False, param="messages")

    def warm(self) -> None:
        """Start the processes that render the chat templates, without waiting for them."""
        for template in self._templates:
            template.warm()

    def rest(self) -> None:
        """End the processes that render the chat templates until something is to be rendered."""
        for template in self._templates:
            template.rest()

    def thoughts_before(self, prompt: Sequence[int]) -> tuple[str, str] | None:
        """The marks of thoughts that an answer to this prompt may have before its text, as the chat
        template has them; the opening one is empty where the prompt has written it. None: the model
        does not think, or the prompt has ended the thoughts. See `Request.thoughts`."""
        marks = self.thoughts
        if marks is None:
            return None
        end = self.decode(prompt[-16:], skip_special_tokens=False).rstrip()
        if end.endswith(marks.closing):
            return None
        return ("" if marks.are_opened_by(end) else marks.opening, marks.closing)

    def special_tokens(self) -> dict[str, int]:
        """The id of each special token, by its text."""
        return {self._spelling(i) or "": i for i in sorted(self.special_token_ids)}

    def end_tokens(self) -> list[str]:
        """The texts of the tokens that end an answer."""
        return [text for i in self.eos_token_ids if (text := self._spelling(i))]

    def thought_end(self, *, only_mark: bool = False) -> tuple[int, ...]:
        """The tokens between reasoning and answer, as the chat template writes them; none if the
        model does not think. `only_mark`: nothing behind the mark that ends the reasoning."""
        marks = self.thoughts
        if marks is None:
            return ()
        shown = self.tool_template.abilities.thought_end if self.tool_template else ""
        if marks.closing not in shown:
            shown = marks.closing + marks.begins_answer
        if only_mark:
            shown = shown[: shown.index(marks.closing) + len(marks.closing)]
        # Behind a text, as some tokenizers add a space at the beginning.
        before = self.encode(".", add_special_tokens=False)
        ids = self.encode(f".{shown}", add_special_tokens=False, parse_special_tokens=True)
        is_apart = ids[: len(before)] == before
        whole = self.encode(shown, add_special_tokens=False, parse_special_tokens=True)
        return tuple(ids[len(before) :] if is_apart else whole)

    def special_ids_of(self, marks: Iterable[str]) -> tuple[int, ...]:
        """The sorted ids of those `marks` that are special tokens."""
        ids = {self._parser.token_to_id(mark) for mark in marks} - {None}
        return tuple(sorted(self.special_token_ids & ids))

    def new_detokenizer(
        self, *, skip_special_tokens: bool = True, shown_token_ids: Iterable[int] = ()
    ) -> IncrementalDetokenizer:
        """A detokenizer for one generation; its pieces together equal `decode` of all ids.

        `shown_token_ids`: special tokens that are not left out.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        if shown := frozenset(shown_token_ids):
            skipped -= shown
        return make_detokenizer(self._pieces, self._parser, skipped)


def _encode(
    tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, param: str | None
) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate"
            f" U+{ord(text[error.start]):04X}",
            param=param,
        ) from None
    try:
        if len(text) <= LONG_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # The batch functions release the interpreter lock, and this one computes no offsets.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids
    except BaseException as error:  # a panic in Rust, such as that of a pattern's work limit
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(
            "the tokenizer of this model cannot encode this text: a pattern gives up", param=param
        ) from None
