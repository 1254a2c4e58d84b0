"""Reads the text side of a checkpoint folder: tokenizer, its configuration, chat templates.

`read_text_files` gives what the files say, in the order of precedence transformers 5 has, or a
`LoadError` that lists everything missing or malformed at once. It opens files by fixed names in
one folder, follows no name found in a file, and builds nothing; `Tokenizer.from_folder` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.errors import LoadError

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What the files of a checkpoint say about text; nothing is resolved to ids yet."""

    tokenizer_json: str
    named_tokens: Mapping[str, str]
    """`bos_token` and so on, those that are set"""
    extra_special_tokens: tuple[str, ...]
    added_tokens: tuple[Mapping[str, Any], ...]
    """`added_tokens_decoder` of tokenizer_config.json, by id"""
    eos_token_ids: tuple[int, ...]
    """from generation_config.json, then config.json"""
    templates: Mapping[str, str]
    """chat templates by name; the usual one is called `default`"""
    tokenizer_class: str | None = None
    """transformers' name for the kind of tokenizer; told to clients, nothing here depends on it"""


@dataclass
class _Folder:
    """A folder, and what was found wrong in it so far."""

    path: Path
    problems: list[str] = field(default_factory=list)

    def text(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            self.problems.append(f"{name} cannot be read: {reason}")
            return None

    def json_object(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            self.problems.append(f"{name} is not valid JSON: {error}")
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{name} must be a JSON object, not {type(value).__name__}")
            return {}
        return value


def read_text_files(path: Path) -> TextFiles:
    """Everything about text in the folder. Raises `LoadError` with all that is wrong with it."""
    if not path.is_dir():
        raise LoadError(
            f"{path} is not a folder; a tokenizer is loaded from the folder of a checkpoint,"
            " which has at least tokenizer.json"
        )
    folder = _Folder(path)
    tokenizer_json = folder.text("tokenizer.json")
    if tokenizer_json is None and not folder.problems:
        folder.problems.append(_missing_tokenizer(path))
    config = folder.json_object("tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # only checkpoints older than that need the map
        config = config | folder.json_object("special_tokens_map.json")
    files = TextFiles(
        tokenizer_json=tokenizer_json or "",
        named_tokens=_named_tokens(config, folder),
        extra_special_tokens=_extra_special_tokens(config),
        added_tokens=_added_tokens(config, folder),
        eos_token_ids=_eos_token_ids(folder),
        templates=_templates(config, folder),
        tokenizer_class=_content(config.get("tokenizer_class")),
    )
    if folder.problems:
        raise LoadError(
            f"the tokenizer in {path} cannot be loaded:\n  - " + "\n  - ".join(folder.problems)
        )
    return files


def _missing_tokenizer(path: Path) -> str:
    slow = [name for name in _SLOW_FILES if (path / name).exists()]
    if not slow:
        return "tokenizer.json is missing; copy it from the checkpoint's repository"
    return (
        f"tokenizer.json is missing; there is only the older format ({', '.join(slow)})."
        " Convert it once with transformers:"
        " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _content(token: Any) -> str | None:
    """A token as configuration files write it: its text, or an object with the text inside."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: Mapping[str, Any], folder: _Folder) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if value is None:
            continue
        content = _content(value)
        if content is None:
            folder.problems.append(
                f"{name} in tokenizer_config.json must be a string or an object with the string"
                f" `content`, not {value!r:.80}"
            )
        elif content:
            named[name] = content
    return named


def _extra_special_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    if isinstance(extra, Mapping):
        extra = tuple(extra.values())
    elif not isinstance(extra, list):
        return ()
    return tuple(content for token in extra if (content := _content(token)))


def _added_tokens(config: Mapping[str, Any], folder: _Folder) -> tuple[Mapping[str, Any], ...]:
    added = config.get("added_tokens_decoder") or {}
    try:
        tokens = [token for _, token in sorted(added.items(), key=lambda item: int(item[0]))]
        if any(_content(token) is None or not isinstance(token, Mapping) for token in tokens):
            raise TypeError
    except (AttributeError, TypeError, ValueError):
        folder.problems.append(
            "added_tokens_decoder in tokenizer_config.json must map ids to objects with `content`"
        )
        return ()
    return tuple(tokens)


def _eos_token_ids(folder: _Folder) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = folder.json_object(name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")  # models that also see pictures
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
            folder.problems.append(
                f"eos_token_id in {name} must be an integer or a list of integers,"
                f" not {value!r:.80}"
            )
            continue
        ids.extend(values)
    return tuple(dict.fromkeys(ids))


def _templates(config: Mapping[str, Any], folder: _Folder) -> dict[str, str]:
    """Files of their own win over the entry in tokenizer_config.json, as in transformers."""
    found: dict[str, str] = {}
    text = folder.text("chat_template.jinja")
    if text is not None:
        found["default"] = text
    extra = folder.path / "additional_chat_templates"
    for file in sorted(extra.glob("*.jinja")) if extra.is_dir() else ():
        text = folder.text(f"{extra.name}/{file.name}")
        if text is not None:
            found[file.stem] = text
    if found:
        return found
    legacy = folder.json_object("chat_template.json").get("chat_template")
    for source, value in (
        ("chat_template.json", legacy),
        ("tokenizer_config.json", config.get("chat_template")),
    ):
        if value is None:
            continue
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, Mapping):
            value = [{"name": name, "template": text} for name, text in value.items()]
        try:
            templates = {entry["name"]: entry["template"] for entry in value}
            if all(isinstance(text, str) for text in (*templates, *templates.values())):
                return templates
        except (KeyError, TypeError):
            pass
        folder.problems.append(
            f"chat_template in {source} must be a string or a list of objects with `name` and"
            " `template`"
        )
    return {}
