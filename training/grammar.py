"""The training text: which documents there are, from seeds.

Owns the mixture of raw stories and chats, the chat markup, and the split of seeds into
training and held-out documents. Called by train.py, heldout.py and evaluate.py. A document
is a function of its split and number alone, so nothing needs to be stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from dialogues import Message, conversation, recall_chat, sums_chat
from stories import Wish, tell

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TURN_END = "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (BEGIN, END, *ROLES.values(), TURN_END)

RAW_SHARE = 0.25


def chat_text(messages: list[Message], answer_next: bool = False) -> str:
    """Return a chat in the markup of the model's chat template."""
    turns = "".join(f"{ROLES[role]}\n{content}{TURN_END}\n" for role, content in messages)
    return BEGIN + turns + (f"{ROLES['assistant']}\n" if answer_next else "")


def document(split: str, number: int) -> str:
    """Return the numbered document of a split, with its markup.

    The splits are "train" and "heldout"; "drill" has short exercises for training: more
    sums, and questions about who has what, from which the model learns to copy and look up.
    """
    rng = Random(f"infer demo model/{split}/{number}")
    if split == "drill":
        return chat_text(rng.choice((sums_chat, recall_chat))(rng)) + END
    if rng.random() < RAW_SHARE:
        return BEGIN + tell(rng, Wish(detail=rng.uniform(0.2, 0.9))).text + END
    return chat_text(conversation(rng)) + END


def documents(split: str, start: int, count: int) -> Iterator[str]:
    """Yield consecutive documents of a split."""
    for number in range(start, start + count):
        yield document(split, number)
