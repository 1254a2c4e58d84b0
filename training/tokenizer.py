"""The tokenizer that ships with the demo model.

Owns how it is built (byte-level BPE, digits one by one, six special tokens), the chat
template, and the JSON files next to the weights that describe tokens and sampling. Called
by train.py before anything else; once a checkpoint is published its tokenizer stays fixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from grammar import BEGIN, END, SPECIAL_TOKENS, TURN_END

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a tokenizer whose alphabet is all bytes, so that any text survives it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": True,
        }
        for text in SPECIAL_TOKENS
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [text for text in SPECIAL_TOKENS if text not in (BEGIN, END)],
        "bos_token": BEGIN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })  # fmt: skip
    _write_json(folder / "generation_config.json", {
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "do_sample": True,
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(TURN_END)],
        "temperature": 0.7,
        "top_p": 0.95,
    })  # fmt: skip
