"""A server of published chat templates, for clients that run tool loops of several turns.

One model behind one address for each template of the families that are loaded. The model is a
script, because no model of this size calls tools by itself: it asks for the weather of three cities
in the format of its template, one behind the other, and then answers. Everything else is the real
server: templates, their adaptation, the parser, streams.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.engine.loop import EngineThread
from infer.schedule.sequence import Plan, Sampled
from infer.server.address import bind, url_of
from infer.server.app import create_app
from infer.server.loaded_models import LoadedModels
from infer.server.multi_model import ModelRouter
from infer.server.serve import Server
from infer.server.settings import ServerSettings
from infer.text.tokenizer import Tokenizer
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import ToolFormat
from tests.support.checkpoints import END_ID, write_tokenizer
from tests.support.hash_engine import limits_of, make_hash_core
from tests.support.published_templates import LOADED, SPECIAL, templates

CITIES = ("Ulm", "Bonn", "Jena")
ANSWER = "All three are sunny."
MAX_SEQ_LEN = 60_000


class TalkingRunner(ABC):
    """Says what `answer` makes of a prompt."""

    def __init__(self, tokenizer: Tokenizer, way: ToolFormat) -> None:
        self._tokenizer = tokenizer
        self._way = way
        self._scripts: dict[str, list[int]] = {}

    @abstractmethod
    def answer(self, prompt: str) -> str:
        """The text of the answer, without thoughts."""

    def execute(self, plan: Plan) -> list[Sampled]:
        results = []
        for chunk in plan:
            if not chunk.samples:
                continue
            request = chunk.sequence.request
            if request.request_id not in self._scripts:
                self._scripts[request.request_id] = self._script(request.prompt_token_ids)
            script = self._scripts[request.request_id]
            position = len(chunk.sequence.tokens) - len(request.prompt_token_ids)
            results.append(Sampled(script[min(position, len(script) - 1)], None))
        return results

    def _script(self, prompt_ids: tuple[int, ...]) -> list[int]:
        prompt = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
        text = self.answer(prompt)
        if prompt.rstrip().endswith("<think>"):
            text = f"It asks.\n</think>\n\n{text}"
        ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)
        return [*ids, END_ID]


class LoopRunner(TalkingRunner):
    """Says what comes next in the loop; how far it is, the results in the prompt tell."""

    def answer(self, prompt: str) -> str:
        num_results = sum(f"{city} is sunny" in prompt for city in CITIES)
        opens, text = self._way.prompt_opens, ANSWER
        if num_results < len(CITIES):
            city = {"city": CITIES[num_results]}
            text = self._way.write([ToolCall("weather", json.dumps(city))])
        elif '"final_answer"' in prompt:  # a tool with which smolagents' loops end
            text = self._way.write([ToolCall("final_answer", json.dumps({"answer": ANSWER}))])
        elif opens:
            text = f"{opens}all\n{text}"
        if opens and prompt.endswith(opens):
            text = text.removeprefix(opens)
        return text


def talking(
    folder: Path,
    source: str,
    make_runner: Callable[[Tokenizer, ToolFormat], TalkingRunner] = LoopRunner,
    max_seq_len: int = MAX_SEQ_LEN,
) -> AsyncLLM:
    """The engine of one template; `folder` is where its text files are written."""
    tokenizer = tokenizer_of(folder, source)
    assert tokenizer.tool_use is not None
    core = make_hash_core(**engine_settings(max_seq_len))
    core.runner = make_runner(tokenizer, tokenizer.tool_use.format)
    limits = dataclasses.replace(limits_of(core), vocab_size=tokenizer.vocab_size)
    return AsyncLLM(EngineThread(core), InputProcessor(tokenizer, limits), "loop")


def tokenizer_of(folder: Path, source: str) -> Tokenizer:
    """A tokenizer of bytes with one template."""
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {name: SPECIAL[name] for name in ("bos_token", "eos_token")}
    # As in the checkpoints: Mistral's marks are special tokens, DeepSeek's are tokens.
    marks = [mark for mark in ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]") if mark in source]
    config |= {**named, "chat_template": source, "additional_special_tokens": marks}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_folder(folder)


def engine_settings(max_seq_len: int) -> dict[str, Any]:
    """Those of an engine for long prompts."""
    pages = {"num_pages": 4 * max_seq_len // 16, "page_size": 16}
    return {"max_seq_len": max_seq_len, "max_num_batched_tokens": 8192, **pages}


@contextmanager
def loops(folder: Path) -> Iterator[str]:
    """The server; yields its address."""
    launches = {
        name.replace("/", "."): functools.partial(
            talking, folder / name.replace("/", "."), templates()[name]
        )
        for name in LOADED
    }
    settings = ServerSettings(sessions="sqlite://")
    make_app = functools.partial(create_app, settings=settings, is_inner=True)
    models = ModelRouter(LoadedModels(launches, make_app))
    models.load_all()
    with listening(models, settings) as url:
        yield f"{url}/v1"


@contextmanager
def listening(engine: AsyncLLM | ModelRouter, settings: ServerSettings) -> Iterator[str]:
    """A server over engines; yields its address."""
    with bind(port=0) as sock:
        listening = threading.Event()
        server = Server(engine, sock, settings, announce=lambda line: listening.set())
        thread = threading.Thread(target=server.serve_until_stopped)
        thread.start()
        try:
            assert listening.wait(60)
            yield url_of(sock)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
