"""Reading a checkpoint folder's text files: tokenizer, its configuration, chat templates.

`read_text_files` returns the content of the files, in transformers 5's order of precedence. Its
`LoadError` lists everything that is missing or malformed. It opens files with fixed names in one
folder and no file that another file names. `Tokenizer.from_folder` builds the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.errors import LoadError
from infer.files import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, parse_json, read_text
from infer.text.generation_config import FILE, defaults_of
from infer.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                "mask_token")  # fmt: skip
"""Names of tokens in configuration files."""
_OLDER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json",
                "merges.txt", "vocab.txt", "tekken.json", "tiktoken.model",
                "qwen.tiktoken")  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The content of a checkpoint's text files; tokens are not resolved to ids yet."""

    tokenizer_json: str
    """Text of tokenizer.json."""
    named_tokens: Mapping[str, str]
    """Text of each named token that is set, by name (`bos_token`, …)."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids from generation_config.json, then from config.json."""
    templates: Mapping[str, str]
    """Chat templates by name; the usual one is called `default`."""
    extra_special_tokens: tuple[str, ...] = ()
    """Texts of further special tokens."""
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    """Entries of `added_tokens_decoder` in tokenizer_config.json, in the order of their ids."""
    tokenizer_class: str | None = None
    """Transformers' class of the tokenizer, which clients may ask for; it has no effect here."""
    tool_parser: str | None = None
    """Name of the format of tool calls, if the operator has set one."""
    reasoning_parser: str | None = None
    """Name of the marks of reasoning, if the operator has set one."""
    architecture: str | None = None
    """Name of the model's architecture, by which its formats are known."""
    response_template: Mapping[str, Any] = field(default_factory=dict)
    """What tokenizer_config.json says about the parts of an answer."""
    sampling: SamplingDefaults = NO_DEFAULTS
    """What requests get where they leave out fields; set by `engine.build.checkpoint`."""
    built: Any = field(default=None, compare=False, repr=False)
    """The library's object for `tokenizer_json`, where it was made first, as of a GGUF file. It
    stays in its process, and one thread may use it."""


def read_text_files(path: Path) -> TextFiles:
    """The text files in the folder `path`. `LoadError` lists everything that is wrong with them."""
    if not path.is_dir():
        raise LoadError(
            f"{path} is not a folder; a tokenizer is loaded from the folder of a checkpoint,"
            " which has at least tokenizer.json"
        )
    folder = _Folder(path)
    files = folder.text_files()
    if folder.problems:
        raise LoadError(
            f"the tokenizer in {path} cannot be loaded:\n  - " + "\n  - ".join(folder.problems)
        )
    return files


def read_defaults(path: Path, source: str = FILE, *, must_exist: bool = False) -> SamplingDefaults:
    """The defaults in the generation_config.json of the folder `path`; none without that file.

    `source`: what people call it. `must_exist`: a missing file is an error. Raises `LoadError` for
    a file that is no JSON object.
    """
    folder = _Folder(path)
    config = folder.json_object(FILE)
    if must_exist and not (path / FILE).exists():
        folder.problems.append(f"there is no {path / FILE}")
    if folder.problems:
        raise LoadError(folder.problems[0])
    return defaults_of(config, source)


def _content(token: Any) -> str | None:
    """The text of a token, which files write as a string or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _whole(number: Any) -> Any:
    """A number that is written as 2.0 as the integer; anything else unchanged."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


class _Folder:
    """A folder and the problems found in it so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []

    def text_files(self) -> TextFiles:
        """Read all files; what is wrong is added to `problems`."""
        tokenizer_json = self.text("tokenizer.json")
        if tokenizer_json is None and not self.problems:
            self.problems.append(self.missing_tokenizer())
        config = self.json_object("tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # only older checkpoints need the map
            config = config | self.json_object("special_tokens_map.json")
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        extra = list(extra.values()) if isinstance(extra, Mapping) else extra
        extra = filter(None, map(_content, extra)) if isinstance(extra, list) else ()
        parts = config.get("response_template")
        return TextFiles(
            tokenizer_json=tokenizer_json or "",
            named_tokens=self.named_tokens(config),
            eos_token_ids=self.eos_token_ids(),
            templates=self.templates(config),
            extra_special_tokens=tuple(extra),
            added_tokens=self.added_tokens(config.get("added_tokens_decoder") or {}),
            tokenizer_class=_content(config.get("tokenizer_class")),
            architecture=_content(self.json_object("config.json").get("model_type")),
            response_template=parts if isinstance(parts, dict) else {},
        )

    def text(self, name: str) -> str | None:
        """The text of a file; None if it is missing or cannot be read, which is a problem."""
        most = (MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES)
        try:
            return read_text(self.path / name, most[name == "tokenizer.json"])
        except FileNotFoundError:
            return None
        except LoadError as error:
            self.problems.append(str(error))
            return None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            self.problems.append(f"{name} cannot be read: {reason}")
            return None

    def json_object(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; {} if the file is missing or is not an object."""
        text = self.text(name)
        try:
            value = {} if text is None else parse_json(text)
        except ValueError as error:
            self.problems.append(f"{name} is not valid JSON: {error}")
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{name} must be a JSON object, not {type(value).__name__}")
            return {}
        return value

    def missing_tokenizer(self) -> str:
        """The problem of a folder without tokenizer.json."""
        older = [name for name in _OLDER_FILES if (self.path / name).exists()]
        if not older:
            return "tokenizer.json is missing; copy it from the checkpoint's repository"
        return (
            f"tokenizer.json is missing; there is only the older format ({', '.join(older)})."
            " Convert it once with transformers:"
            " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )

    def named_tokens(self, config: Mapping[str, Any]) -> dict[str, str]:
        """The text of each named token that is set, by name."""
        values = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
        named = {name: _content(value) for name, value in values.items()}
        self.problems += [
            f"{name} in tokenizer_config.json must be a string or an object with the string"
            f" `content`, not {values[name]!r:.80}"
            for name, content in named.items()
            if content is None
        ]
        return {name: content for name, content in named.items() if content}

    def added_tokens(self, added: Any) -> tuple[Mapping[str, Any], ...]:
        """The entries of `added_tokens_decoder` in the order of their ids."""
        try:
            tokens = tuple(added[key] for key in sorted(added, key=int))
            if all(isinstance(token, Mapping) and _content(token) is not None for token in tokens):
                return tokens
        except (LookupError, TypeError, ValueError):
            pass
        self.problems.append(
            "added_tokens_decoder in tokenizer_config.json must map ids to objects with `content`"
        )
        return ()

    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids of generation_config.json and config.json, each once."""
        ids: list[int] = []
        for name in (FILE, "config.json"):
            config = self.json_object(name)
            value = config.get("eos_token_id")
            if value is None and isinstance(config.get("text_config"), dict):
                value = config["text_config"].get("eos_token_id")  # multimodal models
            values: list[Any] = value if isinstance(value, list) else [value]
            # -1 is a word for none, as null is.
            values = [
                token_id
                for token_id in map(_whole, values)
                if token_id is not None and token_id != -1
            ]
            if all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in values):
                ids += values
            else:
                self.problems.append(
                    f"eos_token_id in {name} must be a token id or a list of them,"
                    f" not {value!r:.80}"
                )
        return tuple(dict.fromkeys(ids))

    def templates(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Chat templates by name. An empty one is none.

        Template files take precedence over the entry in tokenizer_config.json, as in transformers.
        """
        names = {"default": "chat_template.jinja"}
        for folder in ("chat_templates", "additional_chat_templates"):
            for file in sorted(self.path.glob(f"{folder}/*.jinja")):
                names[file.stem] = f"{folder}/{file.name}"
        texts = {name: self.text(file) for name, file in names.items()}
        templates = {name: text for name, text in texts.items() if text and text.strip()}
        if templates:
            return templates
        legacy = self.json_object("chat_template.json")
        for source, holder in (("chat_template.json", legacy), ("tokenizer_config.json", config)):
            value = holder.get("chat_template")
            if value is None or (isinstance(value, str) and not value.strip()):
                continue
            if isinstance(value, str):
                return {"default": value}
            try:
                if isinstance(value, list):
                    value = {entry["name"]: entry["template"] for entry in value}
                if all(isinstance(text, str) for text in (*value, *value.values())):
                    return dict(value)
            except (AttributeError, KeyError, TypeError):
                pass
            self.problems.append(
                f"chat_template in {source} must be a string or a list of objects with `name` and"
                " `template`"
            )
        return {}
