"""Text files made from a GGUF file: its vocabulary as a `tokenizer.json`, and its chat templates.

`text_files` takes the file's metadata as plain Python values and returns the same `TextFiles` as a
checkpoint folder, so `Tokenizer` does not know about GGUF. The supported model families have two
kinds of vocabulary. Byte-level BPE ("gpt2") names its pre-tokenizer in `tokenizer.ggml.pre`.
Sentencepiece's BPE ("llama") stores a score for each piece instead of merges. Other kinds and names
are refused, because a wrong pre-tokenizer would silently give wrong ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from infer.errors import LoadError
from infer.text.checkpoint_text import TextFiles

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Types of tokens in `tokenizer.ggml.token_type`."""
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_LLAMA_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # defaults of "llama" vocabularies
# Tokens that end a turn. A file names only one of them, but its model may use several.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>",
         "<end_of_turn>")  # fmt: skip


def _tekken_pattern(max_digits: str = "", ending: str = "") -> str:
    """The split pattern of Mistral's newer models.

    A word ends before a capital letter, each digit is separate, and slashes stay with the
    punctuation before them. GPT-4o's has up to three digits together, and an English contraction
    as the `ending` of its word.
    """
    capital, small = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}[{capital}]*[{small}]+{ending}|{first}[{capital}]+[{small}]*{ending}"
        r"|\p{N}" + max_digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


_MAX_CUT_CHARS = 1 << 26
"""Maximum number of characters of all ways to divide all pieces in two.

Gemma's 262,000 pieces have 2²⁴.
"""


def _llama3_pattern(max_digits: str) -> str:
    """The split pattern of Llama 3 and Qwen2, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + max_digits +
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip


def _split(*patterns: str) -> Sequence:
    """Divides text at what each pattern finds, one pattern after the other."""
    words = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*words, ByteLevel(add_prefix_space=False, use_regex=False)])


PATTERNS = frozenset({_llama3_pattern("{1,3}"), _llama3_pattern(""), _tekken_pattern()})
"""Split patterns that are known to take time linear in the length of the text."""


@dataclass(frozen=True)
class _Pre:
    """The pre-tokenizer of a byte-level vocabulary, and options that its name implies."""

    splits: PreTokenizer
    """Pre-tokenizer that divides the text into words."""
    add_bos: bool = False
    """Whether BOS is added if the file does not say."""
    ignore_merges: bool = False
    """Whether a word that is a token becomes that token without applying merges."""
    normalizer: normalizers.Normalizer | None = None
    """Normalizer of the text."""


_WORDS = ByteLevel(add_prefix_space=False)
_GPT2 = _Pre(_WORDS)
_SMOLLM = _Pre(Sequence([Digits(individual_digits=True), _WORDS]))
_LLAMA3 = _Pre(_split(_llama3_pattern("{1,3}")), add_bos=True, ignore_merges=True)
_QWEN2 = _Pre(_split(_llama3_pattern("")), normalizer=normalizers.NFC())
_SMAUG = _Pre(_LLAMA3.splits)
_TEKKEN = _Pre(_split(_tekken_pattern()), add_bos=True, ignore_merges=True)
_GPT4O = _Pre(_split(_tekken_pattern("{1,3}", _CONTRACTION)))
_FALCON = _Pre(
    _split(
        r"[\p{P}\$\+<=>\^~\|`]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        "[0-9][0-9][0-9]",
    )
)
_BLOOM = _Pre(_split(r" ?[^(\s|.,!?…。，、।۔،)]+"))
_STABLELM2 = _Pre(_split(_llama3_pattern("")))
_SEED = _Pre(
    _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
)
_DEEPSEEK3 = _Pre(
    _split(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _SMAUG),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    **{"falcon": _FALCON, "bloom": _BLOOM, "seed-coder": _SEED},
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), _STABLELM2),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), _DEEPSEEK3),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SMOLLM
    ),
    **dict.fromkeys(
        ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum",
         "exaone4", "trillion"),
        _GPT2,
    ),
}  # fmt: skip
"""Pre-tokenizers by the name that llama.cpp gives them; several names may mean the same one."""


class _Vocabulary:
    """The keys `tokenizer.ggml.*` of one file, which are checked when they are read."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where
        self.kind = self.need("model", str)
        if self.kind not in ("gpt2", "llama"):
            raise self.error(f"model {self.kind!r} is not supported (supported: 'gpt2', 'llama')")
        self.tokens: list[str] = self.need("tokens", list)
        self.types: list[int] = self.aligned("token_type")
        if self.kind == "llama":  # user-defined pieces are matched in the text before `▁` is used
            self.tokens = [
                token.replace("▁", " ") if self.types[i] == _USER_DEFINED else token
                for i, token in enumerate(self.tokens)
            ]
        self.ids = {  # unused tokens have no text
            token: i for i, token in enumerate(self.tokens) if token and self.types[i] != _UNUSED
        }
        defaults = _LLAMA_IDS if self.kind == "llama" else {}
        named = {name: self.id_at(key, defaults.get(name)) for name, key in _NAMED_IDS.items()}
        self.named_ids = {name: i for name, i in named.items() if i is not None}

    def error(self, problem: str) -> LoadError:
        """The error for a problem, which begins with the name of a key."""
        return LoadError(f"{self.where}: the tokenizer cannot be used: tokenizer.ggml.{problem}")

    def need(self, name: str, kind: type) -> Any:
        """The value of a required key of type `kind`; `LoadError` if it is missing."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, kind):
            problem = "is missing" if value is None else f"is {value!r:.40}"
            raise self.error(f"{name} {problem}; it must be a {kind.__name__}")
        return value

    def aligned(self, name: str) -> list[Any]:
        """A list of the metadata that has one entry per token."""
        values: list[Any] = self.need(name, list)
        if len(values) != len(self.tokens):
            raise self.error(f"{name} has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def id_at(self, key: str, default: int | None = None) -> int | None:
        """The token id that a key holds; `LoadError` if there is no such token."""
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            raise self.error(f"{key} is {value!r}, outside of {len(self.tokens)} tokens")
        return value

    def is_added(self, token_id: int) -> bool:
        """Whether a token is an added one, which is matched before the text is divided."""
        return self.types[token_id] in (_UNKNOWN, _CONTROL, _USER_DEFINED)


def text_files(metadata: Mapping[str, Any], where: str) -> TextFiles:
    """The text files of a GGUF file with this metadata.

    `LoadError` if a key is missing, malformed or not supported; its message begins with `where`.
    """
    vocabulary = _Vocabulary(metadata, where)
    build = _byte_level_bpe if vocabulary.kind == "gpt2" else _sentencepiece_bpe
    tokenizer = build(vocabulary)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=vocabulary.types[i] != _USER_DEFINED, normalized=False)
            for token, i in vocabulary.ids.items()
            if vocabulary.is_added(i)
        ]
    )
    ends = [vocabulary.named_ids.get("eos_token"), vocabulary.id_at("eot_token_id")]
    ends += [vocabulary.id_at("eom_token_id"), *map(vocabulary.ids.get, _ENDS)]
    prefix = "tokenizer.chat_template"
    return TextFiles(
        tokenizer_json=tokenizer.to_str(),
        named_tokens={
            name: vocabulary.tokens[i]
            for name, i in vocabulary.named_ids.items()
            # Some files name an ordinary token as padding, which must not become a special token.
            if name in ("bos_token", "eos_token") or vocabulary.is_added(i)
        },
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        templates={
            key.removeprefix(prefix).removeprefix(".") or "default": text
            for key in metadata
            if key == prefix or key.startswith(f"{prefix}.")
            if isinstance(text := metadata[key], str)
        },
        architecture=str(metadata.get("general.architecture", "")) or None,
        built=tokenizer,
    )


def _byte_level_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    pre = vocabulary.need("pre", str)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(map(repr, PRE_TOKENIZERS))
        raise vocabulary.error(f"pre {pre!r} is not supported (supported: {known})")
    merges = [tuple(merge.split(" ")) for merge in vocabulary.need("merges", list)]
    way = PRE_TOKENIZERS[pre]
    tokenizer = _bpe(vocabulary, merges, add_bos=way.add_bos, ignore_merges=way.ignore_merges)
    if way.normalizer is not None:
        tokenizer.normalizer = way.normalizer
    tokenizer.pre_tokenizer = way.splits
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.tokens[vocabulary.named_ids["unk_token"]]
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    tokenizer = _bpe(vocabulary, _merges(vocabulary), add_bos=True, **options)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True):
        prepend = normalizers.Prepend("▁")
        tokenizer.normalizer = normalizers.Sequence([prepend, tokenizer.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges of sentencepiece's BPE: every pair of pieces that forms a piece, best score first.

    Sentencepiece joins the two neighbours that form the piece with the best score, whatever the two
    are. So each way to divide a piece in two is a merge, and all of them have the piece's rank.
    """
    scores = vocabulary.aligned("scores")
    pieces = {t: i for t, i in vocabulary.ids.items() if vocabulary.types[i] == _NORMAL}
    if sum(len(token) ** 2 for token in pieces) > _MAX_CUT_CHARS:
        raise vocabulary.error("tokens are too long for a vocabulary of pieces")
    cuts = [
        (scores[i], token[:cut], token[cut:])
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    cuts.sort(key=lambda cut: (-cut[0], -len(cut[1]), -len(cut[2])))
    return [(left, right) for _, left, right in cuts]


def _bpe(vocabulary: _Vocabulary, merges: list[Any], *, add_bos: bool, **options: Any) -> Tokenizer:
    """A BPE tokenizer that adds BOS and EOS to a text if the file says so.

    `add_bos`: the default for BOS. `LoadError` if tokens and merges do not fit each other.
    """
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise vocabulary.error(f"tokens and merges do not fit together: {error}") from None
    tokenizer = Tokenizer(model)
    ids: dict[str, int] = {}
    for name, default in (("bos_token", add_bos), ("eos_token", False)):
        if vocabulary.metadata.get(f"tokenizer.ggml.add_{name}", default):
            if name not in vocabulary.named_ids:
                raise vocabulary.error(f"add_{name} is true, but {name}_id is missing")
            ids[name] = vocabulary.named_ids[name]
    if ids:
        tokenizer.post_processor = TemplateProcessing(
            single=[name for name in ("bos_token", "$A", "eos_token") if name in {"$A", *ids}],
            special_tokens=[{"id": name, "ids": [i], "tokens": [name]} for name, i in ids.items()],
        )
    return tokenizer
