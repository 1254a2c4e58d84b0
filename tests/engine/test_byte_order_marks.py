"""A byte-order mark, which some editors write, changes nothing in any text file of a checkpoint or
of a setting."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

import infer
from infer import LLM, SamplingParams
from infer.config import EngineConfig
from infer.engine.build.checkpoint import find_checkpoint, text_of
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.checkpoints import CHAT_TEMPLATE, write_llama

pytestmark = pytest.mark.usefixtures("kept_templates")

CHAT = [{"role": "user", "content": "Hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards, with every text file that there may be."""
    path = tmp_path_factory.mktemp("model")
    write_llama(path, shard_bytes=100_000, num_hidden_layers=2, max_position_embeddings=128)
    assert (path / "model.safetensors.index.json").exists()
    (path / "chat_template.jinja").write_text("{{ 'J' }}" + CHAT_TEMPLATE, encoding="utf-8")
    (path / "chat_template.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE}), encoding="utf-8"
    )
    (path / "special_tokens_map.json").write_text("{}", encoding="utf-8")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/tool_use.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return path


def seen(folder: Path, template: Path | None = None) -> tuple[object, ...]:
    """What a model is and says: its files, a prompt, an answer."""
    setting = None if template is None else str(template)
    config = EngineConfig(model=str(folder), dtype="float32", chat_template=setting)
    with LLM.from_config(config) as llm:
        prompt = llm.tokenizer.apply_chat_template(CHAT)
        [answer] = llm.chat(CHAT, GREEDY)
    return text_of(find_checkpoint(str(folder)), config), prompt, answer.token_ids


def mark(file: Path) -> None:
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())


def test_no_text_file_of_a_checkpoint_notices(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ 'own' }}" + CHAT_TEMPLATE, encoding="utf-8")
    before, with_own = seen(folder), seen(folder, template)
    assert before != with_own
    files = [*folder.rglob("*.json"), *folder.rglob("*.jinja")]
    assert len(files) >= 9
    for file in (*files, template):
        mark(file)
    assert seen(folder) == before
    assert seen(folder, template) == with_own


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    token = Keys(file, must_exist=False).create("a", KeyLimits())
    mark(file)
    assert Keys(file).find(token) is not None


def test_the_package_shows_what_it_exports() -> None:
    assert set(infer.__all__) <= set(dir(infer))
