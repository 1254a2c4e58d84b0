"""Small tokenizers saved like those of checkpoints, and chat templates of the usual shapes.

The templates are written from publicly documented prompt formats; only their shapes matter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from infer.text.tokenizer import Tokenizer as OurTokenizer

quick = settings(deadline=None, max_examples=80)

SENTENCES = [
    "Hello world, this is a small text about nothing much.",
    "The quick brown fox jumps over the lazy dog; the dog does not mind.",
    "user assistant system tool end start header message",
    "Ein kurzer Satz mit Umlauten: äöüß. Été à la plage, naïve façade.",
    "数字 1234567890 和 中文 的 句子。 日本語のテキスト。",
    "def f(x):\n    return x + 1\n\nprint(f(2))\n",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|start|>ipython<|header|>\\n\\n' + (message['content'] | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|header|>\\n\\n' }}
        {{- message['content'] | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|header|>\\n\\n' }}
{%- endif %}
"""

CHATML_TEMPLATE = """\
{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|start|>system\\n' + messages[0]['content'] + '<|end|>\\n' }}
{%- else %}
    {{- '<|start|>system\\nYou are a helpful assistant.<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- if '<think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|start|>assistant' }}
        {%- if content %}{{- '\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA_TEMPLATE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|start|>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}
    {%- endif -%}
    {{ '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>model\\n' }}{%- endif -%}
"""

TEMPLATES = {"llama": LLAMA_TEMPLATE, "chatml": CHATML_TEMPLATE, "gemma": GEMMA_TEMPLATE}


def byte_level(*, bos: bool = True) -> Tokenizer:
    """Byte-level BPE, as in Llama 3, GPT-2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|start|>", "<|header|>", "<|end|>", "<|endoftext|>"]
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # These tokens are not special: models write them as text. Their characters are inside and
    # outside the byte alphabet.
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "日本語!", "été"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def _control_tokens() -> list[AddedToken]:
    names = ["<unk>", "<s>", "</s>", "<|start|>", "<|header|>", "<|end|>"]
    return [AddedToken(name, special=True, normalized=False) for name in names]


def _sentencepiece_bpe() -> Tokenizer:
    """BPE with ▁ and byte fallback, without normalizer, decoder and post-processor."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        [sentence for sentence in SENTENCES if "中文" not in sentence],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    names = [token.content for token in _control_tokens()] + BYTE_TOKENS
    pieces = [piece for piece in model["vocab"] if piece != "<unk>"]
    vocab = {piece: token_id for token_id, piece in enumerate([*names, *pieces])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(_control_tokens())
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "▁▁▁"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama2_like() -> Tokenizer:
    """A tokenizer with prepended ▁ and byte fallback, which strips one leading space."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def gemma_like() -> Tokenizer:
    """A tokenizer with ▁ for spaces and byte fallback, which prepends nothing."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with Metaspace; as in T5, the vocabulary lists `</s>` and other tokens as pieces."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(
            vocab_size=200,
            unk_token="<unk>",
            special_tokens=[token.content for token in _control_tokens()],
            show_progress=False,
        ),
    )
    pieces = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    tokenizer = Tokenizer(models.Unigram(pieces + [(c, -9.0) for c in "<>|/"], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(_control_tokens())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece, whose decoder this package does not know, so the library decodes."""
    words = ["<unk>", "<s>", "</s>", "<|start|>", "<|header|>", "<|end|>"]
    words += ["hello", "world", "##ing", "##ed", "end", "|", "<", ">", "a", "##b", "##c"]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|[<>|]"), "isolated")
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(_control_tokens())
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "llama2": llama2_like,
    "gemma": gemma_like,
    "unigram": unigram,
}


def save(
    folder: Path,
    tokenizer: Tokenizer,
    template: str | None = None,
    **config: Any,
) -> Path:
    """Write the text files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
    }
    settings |= config
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Pair:
    """The same checkpoint loaded by this package and by transformers."""

    kind: str
    folder: Path
    ours: OurTokenizer
    theirs: Any


def load_pair(kind: str, folder: Path) -> Pair:
    return Pair(
        kind, folder, OurTokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    )
