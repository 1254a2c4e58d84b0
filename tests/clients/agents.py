"""Coding agents as their users start them, and a server whose model does a task with their tools.

The model is a script, because no model of this size calls tools by itself. The script has steps,
each of some calls; how many results stand in the prompt says which step is next. Everything else is
real: the agent, HTTP, the APIs, the template, its adaptation, the parser, the prefix cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from infer.cli.connect import AGENTS as CONNECTED
from infer.cli.connect import find_target
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.replicas.fleet import Fleet
from infer.replicas.routing import PrefixRouter
from infer.schedule.sequence import Plan, Sampled
from infer.server.settings import ServerSettings
from infer.text.tokenizer import Tokenizer
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import ToolFormat
from tests.clients import harness
from tests.clients.loops import (
    TalkingRunner,
    engine_settings,
    listening,
    talking,
    tokenizer_of,
)
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet_replicas import EngineDies
from tests.support.linked_engines import LinkedEngine, remote
from tests.support.published_templates import templates
from tests.support.server_process import served
from tests.support.text_checkpoints import save

ROOT = Path(__file__).parent.parent.parent
WINDOW = 600_000
"""In bytes, which are the tests' tokens: about 150,000 tokens of a real vocabulary."""
TEMPLATE = "llama.cpp/Qwen-Qwen3-0.6B"
MARKUPS = {
    "qwen3-coder": "llama.cpp/Qwen3-Coder",
    "harmony": "llama.cpp/openai-gpt-oss-120b",
    "glm": "llama.cpp/GLM-4.6",
    "mistral": "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506",
}
"""Further formats of calls, and templates of models that write them."""
RESULT = re.compile(r"<tool_response>|<\|start\|>functions\.|\[TOOL_RESULTS\]|\[Tool result\]: ")
"""How the templates begin a result; the last is how OpenCode shows one to be summed up."""
DONE = "Results so far: "
"""Begins the script's summary of a history."""
LONG = "seq -f %0100g "
"""Prints that many lines of 100 bytes."""
UNTOLD = 1_000_000
"""Tokens that agents assume where nobody says how long a context is."""
ANSWER = "The secret was 42, and now it is 43."
QUESTION = "Read note.txt, add one to the secret, and say what it was."
NOTE = "The secret is 42.\n"
VOCABULARY = 8192
"""Tokens of the random model, which are about four bytes of a prompt each."""
MIN_NODE = 22
"""Which the newest versions of the agents need."""
NUM_SAID = 20
"""Tokens of an answer after which an engine dies."""
Steps = Sequence[Sequence[tuple[str, dict[str, Any]]]]


@dataclass(frozen=True)
class Agent:
    """One agent: how it is started, and the task in terms of its tools."""

    name: str
    package: str
    key: str
    """Its name in `infer connect`."""
    arguments: list[str]
    """Beside those of `infer connect`: do the task, and ask nobody."""
    steps: Steps
    sums_up: str
    """Words of the message with which it asks for a summary of the history."""
    told: int
    """Window, in bytes, of which 27 KB behind the first prompt are too much when it knows it."""
    untold: int
    """Window that a few results of 9 KB fill; 0: it does not go on when it is refused one."""
    environment: dict[str, str] = field(default_factory=dict)
    driver: str = ""
    """Script of `drivers` that uses the package, which is one of Python; "": the package, one of
    npm, has the command."""
    loaded: str = ""
    """What the last prompt shows of a tool whose definition is sent when the model asks for it."""

    def long_steps(self, num_long: int, num_lines: int) -> Steps:
        """Those of the task, behind results of so many lines of 100 bytes."""
        [(run, arguments)] = self.steps[0]
        command = {name: f"{value}; {LONG}{num_lines}" for name, value in arguments.items()}
        return [*[[(run, command)]] * num_long, *self.steps[1:]]


def _steps(
    shell: tuple[str, str], read: tuple[str, str], edit: tuple[str, dict[str, Any]], work: str
) -> Steps:
    """Look, read twice at once, read what is not there, edit. Each tool has its name and that of
    its argument; `work` begins the paths of files."""
    run, command = shell
    look, path = read
    return (
        [(run, {command: "cat note.txt"})],
        [(look, {path: f"{work}note.txt"}), (run, {command: "ls"})],
        [(look, {path: f"{work}missing.txt"})],
        [edit],
    )


OLD, NEW = "The secret is 42.", "The secret is 43."
FILE = "{work}/note.txt"
AGENTS = (
    Agent(
        "Codex",
        "@openai/codex",
        "codex",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", QUESTION],
        (
            [("exec_command", {"cmd": "cat note.txt"})],
            [("exec_command", {"cmd": "cat note.txt"}), ("exec_command", {"cmd": "ls"})],
            [("exec_command", {"cmd": "cat missing.txt"})],
            [("exec_command", {"cmd": "sed -i s/42/43/ note.txt"})],
        ),
        "CONTEXT CHECKPOINT COMPACTION",
        60_000,
        0,
    ),
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "claude",
        ["--dangerously-skip-permissions", "-p", QUESTION],
        _steps(
            ("Bash", "command"),
            ("Read", "file_path"),
            ("Edit", {"file_path": FILE, "old_string": OLD, "new_string": NEW}),
            "{work}/",
        ),
        "create a detailed summary",
        105_000,
        75_000,
        {"IS_SANDBOX": "1"},
    ),
    Agent(
        "Claude Agent SDK",
        "claude-agent-sdk",
        "claude",
        [QUESTION],
        (
            [("Bash", {"command": "cat note.txt"})],
            [("ToolSearch", {"query": "select:mcp__sums__add"})],
            [("Read", {"file_path": FILE}), ("mcp__sums__add", {"a": 42, "b": 1})],
            [("Read", {"file_path": "{work}/missing.txt"})],
            [("Edit", {"file_path": FILE, "old_string": OLD, "new_string": NEW})],
        ),
        "create a detailed summary",
        97_500,
        67_500,
        {"IS_SANDBOX": "1"},
        driver="claude_agent.py",
        loaded='{"name": "mcp__sums__add", "description": "Adds two numbers.", "parameters": ',
    ),
    Agent(
        "Qwen Code",
        "@qwen-code/qwen-code",
        "qwen",
        ["-y", "-p", QUESTION],
        _steps(
            ("run_shell_command", "command"),
            ("read_file", "file_path"),
            ("edit", {"file_path": FILE, "old_string": OLD, "new_string": NEW}),
            "{work}/",
        ),
        "produce the <state_snapshot>",
        100_000,
        100_000,
    ),
    Agent(
        "OpenCode",
        "opencode-ai",
        "opencode",
        ["run", QUESTION],
        _steps(
            ("bash", "command"),
            ("read", "filePath"),
            ("edit", {"filePath": FILE, "oldString": OLD, "newString": NEW}),
            "{work}/",
        ),
        "Create a new anchored summary",
        64_000,
        0,
    ),
)


class AgentRunner(TalkingRunner):
    """Says the calls of the step that is next, and the answer after the last one. A prompt that
    ends with `sums_up` it answers with the number of results, from which it then goes on."""

    def __init__(
        self, tokenizer: Tokenizer, way: ToolFormat, steps: Steps, sums_up: str | None = None
    ) -> None:
        super().__init__(tokenizer, way)
        self._steps = steps
        self._sums_up = sums_up
        self.prompts: list[str] = []
        """All prompts, in order."""
        self.num_results = 0
        """In the last one."""
        self.summed_up: list[int] = []
        """The numbers of results in its summaries."""

    def answer(self, prompt: str) -> str:
        self.prompts.append(prompt)
        _, done, since = prompt.rpartition(DONE)
        earlier = int(since.partition(".")[0]) if done else 0
        num_results = self.num_results = earlier + len(RESULT.findall(since))
        if self._sums_up and self._sums_up in prompt[prompt.rindex("<|im_start|>user") :]:
            self.summed_up.append(num_results)
            return f"<summary>{DONE}{num_results}. {QUESTION}</summary>"
        num_before = 0
        for step in self._steps:
            if num_results <= num_before and QUESTION in prompt:
                return self._way.write([ToolCall(name, json.dumps(call)) for name, call in step])
            num_before += len(step)
        return ANSWER


class DyingRunner(AgentRunner):
    """Dies once, in the midst of the call that follows the first result."""

    def execute(self, plan: Plan) -> list[Sampled]:
        for chunk in plan:
            num_said = len(chunk.sequence.tokens) - len(chunk.sequence.request.prompt_token_ids)
            if self.num_results == 1 and num_said == NUM_SAID and not self._deaths:
                self._deaths.append(chunk.sequence.request.request_id)
                raise EngineDies
        return super().execute(plan)

    def share(self, deaths: list[str]) -> DyingRunner:
        """Note the requests in which it dies there, and die only if there are none."""
        self._deaths = deaths
        return self


@contextmanager
def mortal_server(folder: Path, steps: Steps) -> Iterator[tuple[str, list[str]]]:
    """A server of the script over two engines, of which one dies in the midst; yields its address
    and the ids of the requests in which an engine has died."""
    tokenizer, deaths = tokenizer_of(folder, templates()[TEMPLATE]), list[str]()
    assert tokenizer.tool_use is not None
    way = tokenizer.tool_use.format

    def make_runner(*_: object, **__: object) -> DyingRunner:
        return DyingRunner(tokenizer, way, steps).share(deaths)

    settings = {**engine_settings(WINDOW), "runner": make_runner}
    machines = [LinkedEngine(name, **settings) for name in ("one", "other")]
    fleet = Fleet([remote(machine, "front") for machine in machines], router=PrefixRouter())
    processor = InputProcessor(tokenizer, machines[0].engine.limits)
    try:
        with listening(AsyncLLM(fleet, processor, "loop"), ServerSettings()) as url:
            yield url, deaths
    finally:
        for machine in machines:
            machine.stop()


@contextmanager
def scripted_server(
    folder: Path,
    steps: Steps,
    window: int = WINDOW,
    sums_up: str | None = None,
    template: str = TEMPLATE,
) -> Iterator[tuple[str, AgentRunner]]:
    """A server of the script; yields its address and the runner."""
    runners: list[AgentRunner] = []

    def make_runner(tokenizer: Tokenizer, way: ToolFormat) -> AgentRunner:
        runners.append(AgentRunner(tokenizer, way, steps, sums_up))
        return runners[0]

    engine = talking(folder, templates()[template], make_runner, window)
    with listening(engine, ServerSettings()) as url:
        yield url, runners[0]


@contextmanager
def random_server(folder: Path, window: int) -> Iterator[str]:
    """A server as its users start it, of a random model whose vocabulary is as dense as real ones;
    yields its address. One token in a hundred ends an answer."""
    write_checkpoint(folder, "qwen3", vocab_size=VOCABULARY, max_position_embeddings=window)
    vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        show_progress=False,
    )
    vocabulary.train([str(file) for file in sorted((ROOT / "docs").glob("*.md"))], trainer)
    save(folder, vocabulary, templates()[TEMPLATE], bos_token=None, eos_token="<|im_end|>")
    ends = {"eos_token_id": [1, 2, *range(1000, 1000 + VOCABULARY // 100)]}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    command = ["-m", "infer", "serve", str(folder), "--port", "0", "--max-seq-len", str(window)]
    with served([*command, "--sessions", "off"], folder / "log") as server:
        yield server.url


def command_of(agent: Agent, program: str) -> list[str]:
    """What starts the agent, whose command is `program`; it is installed once."""
    if agent.driver:
        return harness.command_of(harness.Client(agent.name, (agent.package,), agent.driver, ""))
    home = Path(os.environ.get("INFER_CLIENTS", Path.home() / ".cache" / "infer" / "clients"))
    folder = home / f"agent-{agent.name.replace(' ', '-').lower()}"
    if not (folder / "complete").exists():
        check_node()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), agent.package],
            check=True,
            capture_output=True,
            timeout=900,
        )
        (folder / "complete").touch()
    return [str(folder / "node_modules" / ".bin" / program)]


def check_node() -> None:
    """With an older Node npm installs older agents without a word: their prompts have other sizes
    than `told` and `untold` are for."""
    done = subprocess.run(
        ["node", "--version"], capture_output=True, check=True, text=True, encoding="utf-8"
    )
    version = done.stdout.strip()
    major = int(version.removeprefix("v").partition(".")[0])
    assert major >= MIN_NODE, f"this is Node {version}; the agents need {MIN_NODE} or later"


def run(agent: Agent, url: str, folder: Path, told: int | None = None) -> str:
    """Start the agent in an empty home and a folder with a note; what it has printed.

    `told` is how long it believes the context to be (`None` = what the server says).
    """
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    (work / "note.txt").write_text(NOTE, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    target = find_target(url, None, None)
    how = CONNECTED[agent.key](target if told is None else target._replace(window=told))
    program, *options = how.command
    system = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
    environment = {**system, **how.environment, **agent.environment}
    done = subprocess.run(
        [*command_of(agent, program), *options, *agent.arguments],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def finished(url: str) -> list[dict[str, Any]]:
    """The requests that the server has answered, the first one first."""
    with urllib.request.urlopen(f"{url}/v1/requests", timeout=30) as response:
        listed: list[dict[str, Any]] = json.load(response)["data"]
    return listed[::-1]
