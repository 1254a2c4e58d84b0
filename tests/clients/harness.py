"""Real clients, each in an environment of its own, and a server for them: what the tests share.

An environment is made once, with the package managers' own commands, in a folder of
`INFER_CLIENTS` (default: one in the user's cache folder), and used again. A driver is a script that
a user of the client could have written; it prints one JSON document (see `drivers/checks.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import infer
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.clients.loops import loops
from tests.support.server_process import Served, served

MODEL = "infer-demo"
TOOL_MODEL = "infer-demo-tools"
DEMO = Path(infer.__file__).parent / "demo_model"
DRIVERS = Path(__file__).with_name("drivers")
TOOL_TEMPLATE = """\
{{ bos_token }}{% if tools %}<|system|>
You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""With which the model that ships is shown tools, and what they have answered."""


@dataclass(frozen=True)
class Client:
    """One client; `settings` are what its user has to say."""

    name: str
    packages: tuple[str, ...]
    driver: str
    settings: str


CLIENTS = (
    Client(
        "openai (Python)",
        ("openai",),
        "openai_py.py",
        '`OpenAI(base_url="http://HOST:8000/v1", api_key=KEY)`, `AsyncOpenAI` alike',
    ),
    Client(
        "anthropic (Python)",
        ("anthropic",),
        "anthropic_py.py",
        '`Anthropic(base_url="http://HOST:8000", api_key=KEY)`, `AsyncAnthropic` alike',
    ),
    Client(
        "openai (npm)",
        ("openai",),
        "openai_npm.mjs",
        '`new OpenAI({ baseURL: "http://HOST:8000/v1", apiKey: KEY })`; with Node 20 npm installs'
        " 6.49.0, which passed the same checks",
    ),
    Client(
        "anthropic (npm)",
        ("@anthropic-ai/sdk",),
        "anthropic_npm.mjs",
        '`new Anthropic({ baseURL: "http://HOST:8000", apiKey: KEY })`',
    ),
    Client(
        "langchain-openai",
        ("langchain-openai",),
        "langchain_openai_chat.py",
        '`ChatOpenAI(model=NAME, base_url="http://HOST:8000/v1", api_key=KEY)`, `OpenAI` alike;'
        " `stream_usage=True` for the usage of streams, `use_responses_api=True` for responses",
    ),
    Client(
        "langchain-anthropic",
        ("langchain-anthropic",),
        "langchain_anthropic_chat.py",
        '`ChatAnthropic(model=NAME, base_url="http://HOST:8000", api_key=KEY)`',
    ),
    Client(
        "litellm",
        ("litellm", "mcp"),
        "litellm_sdk.py",
        '`completion("openai/NAME", api_base="http://HOST:8000/v1", api_key=KEY)`, or'
        " `hosted_vllm/NAME`; tools want the package `mcp` beside it; `anthropic/NAME` with"
        ' `api_base="http://HOST:8000"`',
    ),
    Client(
        "llm",
        ("llm",),
        "llm_cli.py",
        "in `extra-openai-models.yaml`: `model_id`, `model_name: NAME`,"
        " `api_base: http://HOST:8000/v1`, `api_key_name`; `supports_schema: true`,"
        " `supports_tools: true`",
    ),
    Client(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]",),
        "pydantic_ai_agent.py",
        '`OpenAIChatModel(NAME, provider=OpenAIProvider(base_url="http://HOST:8000/v1",'
        " api_key=KEY))`",
    ),
    Client(
        "openai-agents",
        ("openai-agents",),
        "openai_agents_sdk.py",
        "`OpenAIChatCompletionsModel(NAME,"
        ' AsyncOpenAI(base_url="http://HOST:8000/v1", api_key=KEY))`, `set_tracing_disabled(True)`;'
        " `OpenAIResponsesModel` alike",
    ),
    Client(
        "smolagents",
        ("smolagents[openai]",),
        "smolagents_agent.py",
        '`OpenAIModel(NAME, api_base="http://HOST:8000/v1", api_key=KEY)`; calls are forced unless'
        ' it gets `tool_choice="auto"`',
    ),
    Client(
        "haystack",
        ("haystack-ai",),
        "haystack_agent.py",
        '`OpenAIChatGenerator(Secret.from_token(KEY), NAME, api_base_url="http://HOST:8000/v1")`',
    ),
    Client(
        "instructor",
        ("instructor",),
        "instructor_client.py",
        '`instructor.from_openai(OpenAI(base_url="http://HOST:8000/v1", api_key=KEY))`, or'
        ' `from_provider("openai/NAME", base_url=…, api_key=KEY)`',
    ),
    Client(
        "lm-eval",
        ("lm-eval[api]",),
        "lm_eval_tasks.py",
        "`--model local-completions --model_args"
        " model=NAME,base_url=http://HOST:8000/v1/completions,auth_token=KEY` and"
        " `OPENAI_API_KEY=KEY`; the tokenizer is the server's",
    ),
    Client(
        "aiperf",
        ("aiperf",),
        "aiperf_cli.py",
        "`aiperf profile --model NAME --url http://HOST:8000 --api-key KEY --tokenizer FOLDER"
        " --use-server-token-count --extra-inputs ignore_eos:true`; a local tokenizer wants"
        " `HF_HUB_OFFLINE` unset",
    ),
)


def command_of(client: Client) -> list[str]:
    """What runs its driver; its environment is made if there is none yet."""
    home = Path(os.environ.get("INFER_CLIENTS", Path.home() / ".cache" / "infer" / "clients"))
    folder = home / client.driver.partition(".")[0]
    is_node = client.driver.endswith(".mjs")
    complete = folder / "complete"
    if not complete.exists() or complete.read_text(encoding="utf-8") != " ".join(client.packages):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if is_node:
            _run("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *client.packages)
        else:
            _run(sys.executable, "-m", "venv", folder)
            _run(folder / "bin" / "python", "-m", "pip", "install", "-q", *client.packages)
        complete.write_text(" ".join(client.packages), encoding="utf-8")
    if not is_node:
        return [str(folder / "bin" / "python"), str(DRIVERS / client.driver)]
    for driver in DRIVERS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(driver, folder)
    return ["node", str(folder / client.driver)]


def _run(*command: str | Path) -> None:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=600, encoding="utf-8"
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"


@dataclass(frozen=True)
class Address:
    """Where the server is, and a key for it."""

    server: Served
    key: str
    loops: str
    """The base URL of the server of `loops.py`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"


@contextmanager
def serving(folder: Path) -> Iterator[Address]:
    """The model that ships in float32, and again with a template that shows it tools."""
    tools = folder / TOOL_MODEL
    shutil.copytree(DEMO, tools)
    config = tools / "tokenizer_config.json"
    config.write_text(
        json.dumps(
            {**json.loads(config.read_text(encoding="utf-8")), "chat_template": TOOL_TEMPLATE}
        ),
        encoding="utf-8",
    )
    keys = folder / "keys.json"
    key = Keys(keys, must_exist=False).create("client", KeyLimits())
    arguments = ["-m", "infer.cli.main", "serve", "--port", "0", "--dtype", "float32"]
    arguments += ["--model", f"{MODEL}={DEMO}", "--model", f"{TOOL_MODEL}={tools}"]
    arguments += ["--api-keys", str(keys), "--sessions", f"sqlite:///{folder}/sessions.db"]
    with loops(folder) as url, served(arguments, folder / "server.log") as server:
        yield Address(server, key, url)


def drive(client: Client, address: Address) -> dict[str, Any]:
    """Run its driver; what it has told."""
    models = [MODEL, TOOL_MODEL, str(DEMO), address.loops]
    command = [*command_of(client), address.url, address.key, *models]
    hidden = ("PYTHONPATH", "OPENAI_API_KEY", "OPENAI_BASE_URL")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
