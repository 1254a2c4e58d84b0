"""Settings from flags, variables and a file: the same values, known origins, and what is refused.

Every setting is tried in all three ways; the list is that of the settings classes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.cli.configuration import (
    MODEL,
    Configuration,
    flag_of,
    read_again,
    schema,
    settings_by_name,
    variable_of,
)
from infer.cli.main import app
from infer.config import MAX_SECONDS, Setting
from infer.errors import ConfigError
from infer.server.settings import ServerSettings
from tests.support.cases import one_of
from tests.support.command_line import CliRunner

ROOT = Path(__file__).parents[2]
TEXTS = {
    "sampler": "module:function",
    "cors_origins": "https://a.org",
    "allowed_hosts": "models.example.org",
    "metrics_prefix": "vllm",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    "dtype": "float32",
    "revision": "main",
    "sessions": "sqlite:////tmp/x.db",
    "mcp_server": "docs=https://docs.example.org/mcp",
    "mcp_token": "docs=@/tmp/token",
}
"""Values of settings that are not any text."""
STATIC = {"batching_mode": "static"}
NEEDED: dict[str, dict[str, Any]] = {
    "ssl_keyfile": {"ssl_certfile": "cert.pem"},
    "min_batch_size": STATIC,
    "static_order": STATIC,
    "page_size": {"kv_cache_backend": "paged"},
    "mcp_token": {"mcp_server": "docs=https://docs.example.org/mcp"},
}
"""Settings without which another is refused."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is chosen by whoever runs the tests."""
    for name in [each for each in os.environ if each.startswith("INFER_")]:
        monkeypatch.delenv(name)


def sample(setting: Setting) -> Any:
    """A value that is not the default."""
    if setting.kind is bool:
        return not setting.default
    if setting.name in TEXTS:
        return TEXTS[setting.name]
    if setting.names:
        wanted = {"batching_mode": "static", "kv_cache_backend": "slotted"}
        others = [name for name in setting.names if name != setting.default]
        return wanted.get(setting.name, others[-1])
    if setting.kind is str:
        return "some-text"
    number = min(setting.high or MAX_SECONDS, max(setting.low or 0, 3))
    return setting.kind(number / 2 if setting.kind is float and number < 3 else number)


def of_toml(value: Any) -> str:
    """A value as TOML has it; that of JSON is nearly the same."""
    return json.dumps(value)


def show(*arguments: str, env: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """What `infer config show` says of each setting."""
    done = CliRunner().invoke(app, ["config", "show", "--json", *arguments], env=env)
    assert done.exit_code == 0, (done.output, done.exception)
    return {row["name"]: (row["value"], row["from"]) for row in json.loads(done.stdout)}


def flags(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, bool):
            yield flag_of(name) if value else f"--no-{name.replace('_', '-')}"
        else:
            yield f"{flag_of(name)}={value}"


@pytest.mark.parametrize(
    "setting",
    one_of(4, [(each,) for each in settings_by_name().values()]),
    ids=lambda each: each.name,
)
def test_a_setting_is_the_same_by_flag_variable_and_file(setting: Setting, tmp_path: Path) -> None:
    name, value = setting.name, sample(setting)
    values = {**NEEDED.get(name, {}), name: value}
    file = tmp_path / "infer.toml"
    lines = [f"{each} = {of_toml(it)}" for each, it in values.items()]
    file.write_text("# the settings\n" + "\n".join(lines), encoding="utf-8")
    words = {
        each: str(it).lower() if isinstance(it, bool) else str(it) for each, it in values.items()
    }
    by_flag = show(*flags(values))
    by_variable = show(env={variable_of(each): text for each, text in words.items()})
    by_file = show("--config", str(file))
    assert by_file == show(env={"INFER_CONFIG": str(file)})
    shown = [
        {each: it[0] for each, it in found.items()} for found in (by_flag, by_variable, by_file)
    ]
    assert shown[0] == shown[1] == shown[2]
    assert by_flag[name][0] == (json.loads(value) if setting.takes_mapping else value)
    origins = [found[name][1] for found in (by_flag, by_variable, by_file)]
    assert origins == [flag_of(name), variable_of(name), f"{file}:{len(values) + 1}"]
    untouched = {each: it for each, it in by_flag.items() if each not in values}
    assert untouched.keys() == settings_by_name().keys() - values.keys()
    assert {it[1] for it in untouched.values()} == {"default"}


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "infer.toml"
    file.write_text("port = 1\nmax_batch_size = 1\nseed = 1", encoding="utf-8")
    env = {"INFER_PORT": "2", "INFER_MAX_BATCH_SIZE": "2", "INFER_CONFIG": str(file)}
    found = show("--port", "3", env=env)
    assert found["port"] == (3, "--port")
    assert found["max_batch_size"] == (2, "INFER_MAX_BATCH_SIZE")
    assert found["seed"] == (1, f"{file}:3")


def test_what_may_be_several_is_repeated_or_a_list(tmp_path: Path) -> None:
    file = tmp_path / "infer.toml"
    file.write_text('mcp_server = ["a=http://a.org/", "b=http://b.org/"]', encoding="utf-8")
    both = "a=http://a.org/,b=http://b.org/"
    assert show("--config", str(file))["mcp_server"] == (both, f"{file}:1")
    arguments = [each for entry in both.split(",") for each in ("--mcp-server", entry)]
    assert show(*arguments)["mcp_server"] == (both, "--mcp-server")
    assert show(env={"INFER_MCP_SERVER": both})["mcp_server"] == (both, "INFER_MCP_SERVER")
    file.write_text("mcp_server = [3]", encoding="utf-8")
    with pytest.raises(ConfigError, match="mcp_server"):
        Configuration.read({}, file, {})


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("mcp_token=a=hush", "a=***"),
        ("mcp_token=a=@/tmp/x,b=X-Key: hush", "a=@/tmp/x,b=***"),
        ("mcp_server=a=https://a.org/mcp?key=hush,b=https://b.org/", None),
    ],
)
def test_keys_of_mcp_servers_are_secrets(given: str, shown: str | None) -> None:
    name, _, value = given.partition("=")
    server = "a=https://a.org/,b=https://b.org/"
    env = {"INFER_MCP_SERVER": server, variable_of(name): value}
    expected = shown or "a=https://a.org/mcp?***,b=https://b.org/"
    assert show(env=env)[name] == (expected, variable_of(name))
    done = CliRunner().invoke(app, ["serve", flag_of(name), value])
    assert isinstance(done.exception, ConfigError)
    assert f"give it as {variable_of(name)} or in the file of --config" in str(done.exception)
    assert "hush" not in str(done.exception)
    assert show("--mcp-token", "a=@/tmp/x", env={"INFER_MCP_SERVER": server})


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('model = "m"', "m"),
        ('model = ["a=m", "b=n"]', ["a=m", "b=n"]),
        ('[models]\na = "m"\nb = "n"', ["a=m", "b=n"]),
        ('ui = false\n[models]\na = "m"', "a=m"),
    ],
)
def test_models_in_a_file_and_in_a_variable(given: str, shown: Any, tmp_path: Path) -> None:
    file = tmp_path / "infer.toml"
    file.write_text(given, encoding="utf-8")
    text = shown if isinstance(shown, str) else json.dumps(shown)
    models = [shown] if isinstance(shown, str) else shown
    assert show("--config", str(file))["model"][0] == shown
    assert show(env={"INFER_MODEL": text})["model"] == (shown, "INFER_MODEL")
    assert show(*(f"--model={each}" for each in models))["model"] == (shown, "--model")
    if len(models) == 1:
        assert show(models[0])["model"] == (shown, "--model")


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("max_batchsize = 5", "max_batchsize", r"did you mean 'max_batch_size'\? \(.*:1\)"),
        ("\nmax-batch-size = 5", "max-batch-size", r"did you mean 'max_batch_size'\? \(.*:2\)"),
        ("[server]\nport = 1", "server", r"there is no such setting; .*\(.*:1\)"),
        ("[model]\na = 1", "model", r"must be a path, or a list of NAME=PATH, .*:1\)"),
        ('models = "m"', "models", r"must be a table of names, .*, not 'm' \(.*:1\)"),
        ('model = "m"\n[models]\na = "n"', "model", "is given twice in .*: as model and as models"),
        ("seed = 1\nport = 70000", "port", r"between 0 and 65535, not 70000 \(.*:2\)"),
        ('port = "80"', "port", r"must be an integer, not '80' \(.*:1\)"),
        ("ui = 1", "ui", r"must be True or False, not 1 \(.*:1\)"),
        ("port = 1\nport = 2", "config", "is no TOML: "),
        ("port", "config", "is no TOML: "),
        ('sessions = "foo://a:b@c"\nuds="/x"\nhost="0.0.0.0"', "uds", r"has no host \(.*:3\);"),
        ("port = 9\nmetrics_port = 9", "metrics_port", "9 is the port of the server"),
        ('ssl_keyfile = "k"', "ssl_keyfile", r"of no use without ssl_certfile \(.*:1\)"),
        ('page_size = 16\nkv_cache_backend = "none"', "page_size", r"leave page_size out.*:1\)"),
        ('[models]\n"no name" = "m"', "models", r"'no name' is no name.*\(.*:1\)"),
    ],
)
def test_what_a_file_may_not_say(text: str, field: str, message: str, tmp_path: Path) -> None:
    """Each is one sentence that names the setting and the line."""
    file = tmp_path / "infer.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{re.escape(field)}: .*{message}") as refused:
        Configuration.read({}, file, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["absent", "folder", "bytes"])
def test_a_file_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "infer.toml"
    if kind == "folder":
        file.mkdir()
    elif kind == "bytes":
        file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config: '.*' cannot be read: "):
        Configuration.read({}, file, {})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("INFER_PORT", "many", r"port: must be an integer, not 'many' \(INFER_PORT\)"),
        ("INFER_PORT", "-1", r"port: must be between 0 and 65535, not -1 \(INFER_PORT\)"),
        ("INFER_UI", "perhaps", r"ui: must be true or false, not 'perhaps' \(INFER_UI\)"),
        ("INFER_MODEL", "[1]", "model: must be a path or a JSON list of NAME=PATH, not"),
        ("INFER_DTYPE", "int3", r"dtype: must be one of .* \(INFER_DTYPE\)"),
    ],
)
def test_what_a_variable_may_not_say(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Configuration.read({}, None, {variable: text})


def test_variables_that_are_no_settings(caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes sets INFER_PORT where a service has the name infer; a typo is named."""
    variables = {
        "INFER_PORT": "tcp://10.0.0.1:8000",
        "INFER_MAX_BATCHSIZE": "3",
        "INFER_SERVICE_HOST": "10.0.0.1",
        "INFER_API_KEY": "sk-x",
        "INFER_SEED": "",
    }
    assert Configuration.read({}, None, variables).given == {}
    assert "INFER_PORT=tcp://10.0.0.1:8000 is not a port, but a link of Kubernetes" in caplog.text
    assert "INFER_MAX_BATCHSIZE is no setting; was INFER_MAX_BATCH_SIZE meant?" in caplog.text
    assert "SERVICE_HOST" not in caplog.text
    assert "API_KEY" not in caplog.text


def test_secrets_are_not_shown_and_not_in_flags(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "postgresql+psycopg://me:hush@db.example.org/x"
    shown = "postgresql+psycopg://me:***@db.example.org/x"
    file = tmp_path / "infer.toml"
    file.write_text(f'sessions = "{secret}"', encoding="utf-8")
    file.chmod(0o600)
    assert show("--config", str(file))["sessions"][0] == shown
    assert show(env={"INFER_SESSIONS": secret})["sessions"][0] == shown
    assert Configuration.read({}, file, {}).server.sessions == secret
    assert not caplog.records
    file.chmod(0o644)
    Configuration.read({}, file, {})
    assert f"{file} can be read or written by others than its owner (mode 0644)" in caplog.text
    for command in (["config", "show"], ["serve"], ["keys", "purge"]):
        done = CliRunner().invoke(app, [*command, "--sessions", secret])
        assert isinstance(done.exception, ConfigError)
        assert "give it as INFER_SESSIONS or in the file of --config" in str(done.exception)
        assert "hush" not in str(done.exception)


@pytest.mark.parametrize(
    "command", [["explain", "x"], ["top", "--once"], ["connect", "qwen"], ["bench", "serve"]]
)
def test_a_key_is_in_no_command_line(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes from a file, or from a variable."""
    url = (
        "--base-url=http://127.0.0.1:9/v1" if command[0] == "bench" else "--url=http://127.0.0.1:9"
    )
    where = ["http://127.0.0.1:9"] if command[0] == "top" else [url]

    def problem(*options: str, **env: str) -> str:
        done = CliRunner().invoke(app, [*command, *where, *options], env=env)
        return f"{done.exception} {done.output}"

    refused = problem("--api-key", "sk-hush")
    assert "_API_KEY, or a file as @FILE" in refused
    assert "hush" not in refused
    assert "is no file with a key" in problem("--api-key", f"@{tmp_path / 'none'}")
    file = tmp_path / "key"
    file.write_text("sk-hush\n", encoding="utf-8")
    file.chmod(0o600)
    for found in (problem("--api-key", f"@{file}"), problem(INFER_API_KEY="sk-hush")):
        assert "api_key" not in found  # it has gone on, and nobody answers there
    assert not caplog.records
    file.chmod(0o644)
    problem("--api-key", f"@{file}")
    assert "by others than its owner (mode 0644)" in caplog.text


def test_a_file_without_secrets_may_be_read_by_everybody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "infer.toml"
    file.write_text(
        'sessions = "sqlite:////x.db"\nspeculative_config = {method = "ngram"}', "utf-8"
    )
    file.chmod(0o644)
    Configuration.read({}, file, {})
    assert not caplog.records


def test_the_table_for_people() -> None:
    done = CliRunner().invoke(app, ["config", "show", "--port", "3"], env={"COLUMNS": "200"})
    assert re.search(r"^port +3 +--port *$", done.stdout, re.MULTILINE)
    assert re.search(r"^seed +- +default *$", done.stdout, re.MULTILINE)


# ---- the schema


@functools.cache
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(schema())


def is_valid(content: dict[str, Any]) -> bool:
    return bool(validator().is_valid(content))


def is_read(content: dict[str, Any], file: Path) -> bool:
    """Whether a server would take it, of values that TOML can say."""
    lines = [f"{name} = {of_toml(value)}" for name, value in content.items()]
    file.write_text("\n".join(lines), encoding="utf-8")
    try:
        Configuration.read({}, file, {})
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("setting", settings_by_name().values(), ids=lambda each: each.name)
def test_the_schema_says_what_the_settings_say(setting: Setting, tmp_path: Path) -> None:
    needed = NEEDED.get(setting.name, {})
    values: list[Any] = [sample(setting), True, 3, 0, -1, 1.5, 2**70, "", "x:y", [], [3]]
    values += [*setting.names, "{}"]
    for bound in (setting.low, setting.high):
        if bound is not None:
            values += [bound if setting.kind is float else int(bound) + step for step in (-1, 0, 1)]
    free = (
        *("cors_origins", "allowed_hosts", "metrics_prefix", "speculative_config"),
        *("mcp_server", "mcp_token"),
    )
    modes = (
        "kv_cache_backend",
        "kv_cache_pages",
        "batching_mode",
        "scheduler_policy",
        "quantization",
    )
    for value in values:
        content = {**needed, setting.name: value}
        if setting.name in (*free, *modes, MODEL, "min_batch_size") and isinstance(
            value, str | int
        ):
            continue  # what a value means beside others, or its form, the schema cannot say
        assert is_valid(content) is is_read(content, tmp_path / "x.toml"), (setting.name, value)


def test_the_schema_validates_the_examples_of_the_docs() -> None:
    examples = [
        (path.name, tomllib.loads(text))
        for path in sorted((ROOT / "docs").rglob("*.md"))
        for text in re.findall(r"```toml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        if not any(table in text for table in ("[project", "[model_providers"))  # others' files
    ]
    assert examples
    for name, content in examples:
        assert is_valid(content), (name, content)
    assert not is_valid({"prot": 1})
    assert not is_valid({"model": "a", "models": {"b": "c"}})


# ---- reading again


def test_what_a_running_server_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "infer.toml"
    file.write_text('log_level = "info"\nseed = 1', encoding="utf-8")
    before = Configuration.read({"max_sessions": 3}, file, {}).server
    file.write_text('log_level = "debug"\nmax_sessions = 9\nhang_s = 5\nseed = 2', encoding="utf-8")
    now, others = read_again({"max_sessions": 3}, file, before)
    assert (now.log_level, now.max_sessions, now.hang_s) == ("debug", 3, 120.0)
    assert others == ["hang_s"]
    file.write_text("log_level = 5", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"log_level: .* \(.*:1\)"):
        read_again({}, file, before)
    live = {name for name, each in settings_by_name().items() if each.is_live}
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.endswith("flags still win |")]
    assert live == set(re.findall(r"`(\w+)`", row)) - {"HUP"}, "see docs/configuration.md"
    assert live <= set(ServerSettings.__dataclass_fields__)


def test_models_have_presets_and_aliases(tmp_path: Path) -> None:
    """What a model's table says holds for it alone; flags and variables win over the file."""
    file = tmp_path / "infer.toml"
    file.write_text(
        'seed = 1\nmax_batch_size = 8\nmodels_dir = "/srv/models"\n[models]\na = "/a"\n'
        'b = { path = "/b", aliases = ["best", "gpt-4o"], seed = 2, max_seq_len = 64 }\n'
        "c = { max_seq_len = 128, max_batch_size = 2 }\n",
        encoding="utf-8",
    )
    found = Configuration.read({"max_batch_size": 4}, file, {})
    assert isinstance(found.configs, dict)
    shown = {name: (it.model, it.seed, it.max_seq_len) for name, it in found.configs.items()}
    assert shown == {"a": ("/a", 1, None), "b": ("/b", 2, 64)}
    in_folder = found.presets.config_of("c", "/srv/models/c")
    assert (in_folder.max_seq_len, in_folder.max_batch_size, in_folder.seed) == (128, 4, 1)
    assert found.presets.config_of("d", "/srv/models/d").max_seq_len is None
    assert found.presets.aliases == {"best": "b", "gpt-4o": "b"}
    assert is_valid(tomllib.loads(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a = { seed = 1 }", "'a' has no path, and there is no models_dir"),
        ('a = { path = "/a", max_seqlen = 1 }', "a.max_seqlen: .*did you mean 'max_seq_len'"),
        ('a = { path = "/a", port = 1 }', "a.port: .*there is no such setting"),
        ('a = { path = "/a", served_model_name = "x" }', "a.served_model_name: "),
        ('a = { path = "/a", max_seq_len = 0 }', "a.max_seq_len: must be "),
        ('a = { path = "/a", seed = "x" }', "a.seed: must be "),
        ('a = { path = 3 }', "must be a table of names"),
        ('a = { path = "/a", aliases = "b" }', "must be a table of names"),
        ('a = { path = "/a", aliases = ["a"] }', "'a' is the name of a model, too"),
        ('a = { path = "/a", aliases = ["b c"] }', "'b c' is no name"),
        ('a = { path = "/a", aliases = ["load"] }', "'load' is no name"),
        ('a = { path = "/a", aliases = ["x"] }\nb = { path = "/b", aliases = ["x"] }',
         "'x' is an alias of two models, a and b"),
    ],
)  # fmt: skip
def test_what_a_models_table_may_not_say(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "infer.toml"
    file.write_text(f"[models]\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^models: .*{message}.*infer.toml:1"):
        Configuration.read({}, file, {})
