"""The layering and the rules of `docs/architecture.md`, enforced; the tables of `docs/modules.md`.

`LEVELS` is the only place where the order of the rooms is written; the tables of the page are made
from it, from the modules' own docstrings and from the sizes of the files:
`python tests/test_architecture.py` writes them. The
checks read the source with `ast`, so an import inside a function or under TYPE_CHECKING counts too.
They are functions of a tree of sources; the tests at the end run them on trees that are broken on
purpose, to show that each of them can fail.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "infer"
PAGE = ROOT / "docs" / "modules.md"


class Level(NamedTuple):
    """A level of the layering."""

    modules: str
    """Packages and modules, by their names below `infer`; the longest name that fits decides."""
    purpose: str


# From the bottom up. A module imports only from levels below its own, or from its own entry.
LEVELS = (
    Level(
        "errors version threads signals log_fields load_stages control_groups readiness"
        " readable_text extras fair_queue child_process",
        "exceptions that users see; the version; threads that end before the interpreter;"
        " which signals end a server; owners that take turns;"
        " what lines of the log carry; which part of a load begins; the limits of a container;"
        " waiting for a file; valid text of any path; how to install an optional part; processes"
        " that end with another one",
    ),
    Level(
        "types config files kernels.loader main_memory",
        "records that cross a boundary; settings; files that strangers wrote; the native library;"
        " main memory",
    ),
    Level("private_files", "files that only their owner may read"),
    Level(
        "kernels text memory_pressure requests",
        "packed and native operations; tokenizers, templates, grammars, tool calls; how much memory"
        " there is room for; the state of each request, from the events of steps",
    ),
    Level(
        "schedule models attention",
        "which tokens are computed next, and where they are kept; equations and weights; attention"
        " over pages",
    ),
    Level(
        "runner engine.engine_client engine.build.processors",
        "a plan becomes tensors, and logits become tokens; an engine as its façade sees it; the"
        " machine's processors",
    ),
    Level(
        "engine.core engine.memory_keeper engine.client.input engine.client.output"
        " engine.commands engine.build.checkpoint engine.build.hardware"
        " engine.build.exactness engine.build.machine_share engine.build.server_memory",
        "scheduler and runner in one step; what gives memory back; prompts in, text out; commands;"
        " what is on the disk and in the machine; what number formats cost; the part of the"
        " machine of each engine, and what processes need",
    ),
    Level(
        "engine.loop engine.client.mailbox engine.client.step_lines engine.client.step_frames"
        " engine.build.memory_plan engine.build.draft_checkpoint"
        " engine.build.memory_ledger engine.build.placement"
        " engine.build.fingerprints",
        "the core in a thread; what has arrived for a request; what a step did, as text and for"
        " viewers; what fits into memory, beside other engines; the"
        " draft model on the disk; which bits an engine computes",
    ),
    Level(
        "engine.client.async_llm engine.build.diagnosis engine.build.runner_factory"
        " engine.build.planner cells",
        "the asyncio façade; what a machine is good for; the runner of a model for a device; what a"
        " server will need; an explicit batch over cells that the caller manages",
    ),
    Level("engine.build.assemble", "the composition root"),
    Level("engine.llm", "the blocking façade"),
    Level(
        "replicas.blame replicas.spawned replicas.supervisor_state replicas.router"
        " replicas.messages",
        "who is a suspect after a crash; a process that is to be an engine; the states of a"
        " supervisor; who gets a request; what is said between clients and engines",
    ),
    Level(
        "replicas.journal replicas.routing replicas.child replicas.engine_run replicas.contract",
        "what each request has received; where the pages are; the engine process, from inside and"
        " from outside; what a fleet may rely on",
    ),
    Level(
        "replicas.standby replicas.replica replicas.fleet replicas.host",
        "a process that becomes the next engine; an engine that may die and come back; several as"
        " one, and one for several",
    ),
    Level(
        "replicas.process_transport replicas.link_transport",
        "what carries the conversation with an engine",
    ),
    Level(
        "replicas.launch replicas.socket_link",
        "an `AsyncLLM` over engine processes; an engine that several processes use",
    ),
    Level("server.http", "connections, bodies, errors, the context of a request"),
    Level("server.observe server.ui", "traces, metrics, logs, spans; the page for browsers"),
    Level("server.tenancy", "keys, limits, shared prefixes"),
    Level("server.openai", "OpenAI's formats"),
    Level("server.anthropic", "Anthropic's messages, as chats"),
    Level("server.offload", "long work beside the event loop"),
    Level("server.sessions", "conversations that the server keeps"),
    Level("server bench", "endpoints and their composition; workloads and reports"),
    Level(
        "cluster.scaling cluster.ray_version cluster.cluster_settings",
        "what may be set, and how many engines there are to be",
    ),
    Level(
        "cluster.shared_fronts cluster.ordered_stream",
        "what the fronts of a cluster share; Ray's calls in order",
    ),
    Level("cluster.deployments", "the deployments of Ray Serve"),
    Level("cluster", "engines on several machines under one address"),
    Level("cli", "the terminal"),
    Level("server.__main__ __main__", "`python -m infer`, `python -m infer.server`"),
)
ROWS = {name: row for row, level in enumerate(LEVELS) for name in level.modules.split()}
# The second may not appear in the first, at all.
BANNED = [
    *((name, "torch") for name in ("errors", "types", "config", "schedule", "text", "server")),
    *((f"engine.{name}", "torch") for name in ("core", "loop", "client")),
    ("replicas", "torch"),
    *((f"bench.{name}", "torch") for name in ("client", "drive", "engine", "measure", "report")),
    *((f"bench.{name}", "torch") for name in ("results", "workloads")),
    *((name, "typer") for name in ("bench", "server", "engine")),
    ("", "pickle"),
    *((name, "triton") for name in ("runner", "engine", "models", "server", "cli", "bench")),
    ("models", "infer.schedule"),
    ("models", "infer.attention"),
    ("schedule", "infer.models"),
    ("server.openai", "infer.replicas"),
]
# What may import a library, wherever it is written.
ONLY_IMPORTERS = {
    "ray": ("cluster.deployments", "cluster.shared_fronts"),
    "transformers": ("models.transformers_model",),
}
# Beside the standard library, these may import nothing, or what is named.
LIBRARIES = {
    **dict.fromkeys(
        ("errors", "version", "schedule", "engine.core", "engine.build.processors"), ()
    ),
    **dict.fromkeys(("replicas.router", "replicas.routing"), ()),
    **dict.fromkeys(("config", "types"), ("msgspec",)),
}
# Concrete parts that only the composition roots may name.
CONCRETE = (
    "infer.attention.cpu",
    "infer.attention.sdpa",
    "infer.attention.triton",
    "infer.runner.device_runner",
    "infer.runner.model_runner",
    "infer.runner.kv_storage",
)
COMPOSITION_ROOTS = ("engine.build.assemble", "engine.build.runner_factory", "cells.cell_model")
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
FORBIDDEN_VARIABLES = {"each", "found", "it", "one", "own"}
MAX_FUNCTION_LINES = 60
SCHEDULER_PARTS = {
    f"schedule.{part}"
    for part in ("scheduler", "waiting_queue", "seats", "step_planner", "committer")
}
MAX_PART_LINES = 200
"""The most lines of each of the scheduler's parts."""
TRITON = "kernels.cuda"
"""Its kernels cannot be cut into functions freely, and are named as those of the CPU."""


def module_name(path: Path, root: Path) -> str:
    """`engine.core`; "" for the package itself."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def modules(root: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Every module of a tree."""
    for path in sorted(root.rglob("*.py")):
        yield module_name(path, root), path, parsed(path.read_text(encoding="utf-8"))


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, which every check reads and none changes."""
    return ast.parse(source)


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, of which most are walked over several times."""
    return tuple(ast.walk(tree))


def imports(tree: ast.Module, where: str) -> Iterator[str]:
    """What a module imports, wherever in it."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def lookup(name: str) -> tuple[str, int]:
    """The entry of `ROWS` that decides about a module, and its level."""
    if not name:
        return "", len(LEVELS)
    parts = name.split(".")
    while parts and ".".join(parts) not in ROWS:
        parts.pop()
    key = ".".join(parts)
    if not key:
        raise AssertionError(f"{name} has no level in the layering; give it one")
    return key, ROWS[key]


def is_docstring_only(tree: ast.Module) -> bool:
    """Whether a module (a package, then) holds nothing but its docstring."""
    return len(tree.body) <= 1


def layer_problems(root: Path) -> list[str]:
    """Imports of a level that is not below."""
    problems = []
    known = {name for name, _, _ in modules(SOURCE)} | {name for name, _, _ in modules(root)}
    for name, path, tree in modules(root):
        if is_docstring_only(tree) and path.name == "__init__.py":
            continue
        key, row = lookup(name)
        for target in imports(tree, name):
            inner = target.removeprefix("infer").lstrip(".")
            if not (target + ".").startswith("infer.") or inner not in known:
                continue
            if is_docstring_only(parsed(_source_of(inner, root))):
                continue
            target_key, target_row = lookup(inner)
            if target_key != key and target_row >= row:
                problems.append(f"{name} (level {row}) imports {target} (level {target_row})")
    return problems


def _source_of(name: str, root: Path) -> str:
    for base in (root, SOURCE):
        path = base.joinpath(*name.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if name and found.exists():
                return found.read_text(encoding="utf-8")
    return "x = 1\ny = 2"


def is_inside(name: str, package: str) -> bool:
    """Whether a module is in a package, or is it."""
    return not package or name == package or name.startswith(package + ".")


def ban_problems(root: Path) -> list[str]:
    """What may not be imported where it is."""
    problems = []
    for name, _, tree in modules(root):
        for target in imports(tree, name):
            for package, banned in BANNED:
                if is_inside(name, package) and is_inside(target, banned):
                    problems.append(f"{name} imports {target}, which {package or 'infer'} must not")
            if target in CONCRETE and name not in COMPOSITION_ROOTS:
                problems.append(f"{name} names the concrete {target}")
            library = target.split(".")[0]
            if library in {*sys.stdlib_module_names, "infer", "__future__"}:
                continue
            if name not in ONLY_IMPORTERS.get(library, (name,)):
                problems.append(f"{name} imports {target}: {ONLY_IMPORTERS[library]} may")
            for package, allowed in LIBRARIES.items():
                if is_inside(name, package) and library not in allowed:
                    also = "".join(f" and {each}" for each in allowed)
                    problems.append(f"{name} imports {target}; allowed: the standard library{also}")
    return problems


def name_problems(root: Path) -> list[str]:
    """Modules without a docstring, names that say nothing, and names that are there twice."""
    problems = [
        f"{name}:{line}: a variable {variable}; its noun says more"
        for name, _, tree in modules(root)
        for line, variable in _variables(tree)
        if variable in FORBIDDEN_VARIABLES
    ]
    places = defaultdict(list)
    for name, path, tree in modules(root):
        if path.stem in FORBIDDEN_NAMES:
            problems.append(f"{name}: a name that says nothing")
        if not ast.get_docstring(tree):
            problems.append(f"{name} does not say what it owns")
        if is_inside(name, TRITON):
            continue
        if path.stem not in ("__init__", "__main__"):
            places[f"module {path.stem}"].append(name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[f"class {node.name}"].append(name)
    problems += [f"{what}: in {found}" for what, found in places.items() if len(found) > 1]
    return problems


def _variables(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each variable and argument where it is made."""
    for node in nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def docstring_problems(root: Path) -> list[str]:
    """Docstrings that send the reader elsewhere, and docstrings of attributes that are no sentence:
    one begins with a capital, or with what is written small (a name in code, a number, `xIELU`),
    and ends with a full stop."""
    problems = []
    for name, _, tree in modules(root):
        for node in nodes(tree):
            body = getattr(node, "body", None)
            if not isinstance(body, list) or isinstance(node, ast.Lambda):
                continue
            for before, each in pairwise([None, *body]):
                text = _docstring(each)
                if text is None:
                    continue
                if re.search(r"module's\s+docstring", text):
                    problems.append(f"{name}:{each.lineno}: say it here, not in the module's")
                if not isinstance(before, (ast.Assign, ast.AnnAssign)):
                    continue
                word = text.split()[0]
                is_small = re.fullmatch(r"[a-z][a-z-]*('s|')?[,;:]?", word)
                if is_small or text.rstrip()[-1] not in ".!?":
                    problems.append(
                        f"{name}:{each.lineno}: {text.splitlines()[0]!r} is no sentence"
                    )
    return problems


def _docstring(node: ast.stmt | None) -> str | None:
    """The text of a statement that is only a text."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return None
    return node.value.value if isinstance(node.value.value, str) else None


MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def state_problems(root: Path) -> list[str]:
    """Module-level names in lower case that hold something mutable, or `global` statements."""
    problems = []
    for name, _, tree in modules(root):
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, MUTABLE):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    text = ast.unparse(target)
                    if not text.isupper() and text != "__all__":
                        problems.append(f"{name}: {text} is mutable state")
        found = (node for node in nodes(tree) if isinstance(node, ast.Global))
        problems += [f"{name}:{node.lineno}: global" for node in found]
    return problems


def size_problems(root: Path) -> list[str]:
    """Functions of more than 60 lines, and parts of the scheduler of more than 200."""
    problems = []
    for name, path, tree in modules(root):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if name in SCHEDULER_PARTS and lines > MAX_PART_LINES:
            problems.append(f"{name} has {lines} lines")
        for node in nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES and not is_inside(name, TRITON):
                    problems.append(f"{name}.{node.name} has {size} lines")
    return problems


def _is_record(node: ast.ClassDef) -> bool:
    decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
    return bool(decorators & {"dataclass", "dataclasses.dataclass"})


def constructor_problems(root: Path) -> list[str]:
    """Attributes that a class makes in its constructor and that others assign, and
    `object.__setattr__`: what an object works with comes through its constructor."""
    own: set[str] = set()
    records: set[str] = set()
    for _, _, tree in modules(root):
        for node in nodes(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            if _is_record(node):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                records |= {ast.unparse(target) for target in fields}
            for init in node.body:
                if isinstance(init, ast.FunctionDef) and init.name == "__init__":
                    own |= {attribute for _, attribute in _assigned(init, of_self=True)}
    problems = []
    for name, _, tree in modules(root):
        for line, attribute in _assigned(tree, of_self=False):
            if attribute in own - records:
                problems.append(f"{name}:{line}: .{attribute} is set after construction")
        for node in nodes(tree):
            if not isinstance(node, ast.Call) or _called(node) != "__setattr__":
                continue
            if ast.unparse(node.func) == "object.__setattr__":
                problems.append(f"{name}:{node.lineno}: object.__setattr__")
    return problems


def start_problems(root: Path) -> list[str]:
    """Processes and servers that are started with more than we give them: a Python that looks for
    modules in the folder where it is started, and a uvicorn with the environment's settings."""
    problems = []
    for name, _, tree in modules(root):
        for node in nodes(tree):
            words = [ast.unparse(part) for part in getattr(node, "elts", ())]
            for word, following in pairwise([*words, ""]):
                if word == "sys.executable" and following != "'-P'":
                    problems.append(f"{name}: Python without -P: {' '.join(words)}")
            is_config = isinstance(node, ast.Call) and ast.unparse(node.func) == "uvicorn.Config"
            if is_config and name != "server.http.uvicorn_config":
                problems.append(f"{name}: uvicorn.Config, where uvicorn_config is to be taken")
    return problems


def _assigned(tree: ast.AST, *, of_self: bool) -> Iterator[tuple[int, str]]:
    """Line and name of the public attributes that are assigned, of `self` or of anything else."""
    for node in nodes(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if not isinstance(each, ast.Attribute) or each.attr.startswith("_"):
                    continue
                is_self = isinstance(each.value, ast.Name) and each.value.id in ("self", "cls")
                if is_self is of_self:
                    yield node.lineno, each.attr


Check = Callable[[Path], list[str]]

CHECKS: list[Check] = [
    layer_problems,
    ban_problems,
    name_problems,
    docstring_problems,
    state_problems,
    size_problems,
    constructor_problems,
    start_problems,
]


@pytest.mark.parametrize("check", CHECKS)
def test_the_source_keeps_to_the_rules(check: Check) -> None:
    assert check(SOURCE) == []


CLASS = '"""Doc."""\nclass A: ...\n'
SERVICE = "class A:\n    def __init__(self):\n        self.observer = None\n\n"
BREAKS = [
    (layer_problems, "types/x.py", "from infer.schedule.sequence import Plan"),
    (layer_problems, "engine/core.py", "def f():\n    import infer.engine.llm\nx = 1"),
    (layer_problems, "text/x.py", "import infer.models.model_config\nx = 1"),
    (layer_problems, "server/http/x.py", "from infer.server.tenancy import keys\nx = 1"),
    (ban_problems, "schedule/x.py", "import torch.nn"),
    (ban_problems, "server/x.py", "from torch import Tensor"),
    (ban_problems, "models/x.py", "from transformers import AutoModel"),
    (ban_problems, "cluster/x.py", "from ray import serve"),
    (ban_problems, "bench/x.py", "import typer"),
    (ban_problems, "types/x.py", "import numpy"),
    (ban_problems, "schedule/x.py", "import msgspec"),
    (ban_problems, "config.py", "import numpy"),
    (ban_problems, "engine/llm.py", "from infer.attention.sdpa import SDPABackend"),
    (name_problems, "runner/utils.py", '"""Doc."""'),
    (name_problems, "runner/x.py", "x = 1"),
    (name_problems, "runner/x.py", '"""Doc."""\ny = [each for each in x]'),
    (name_problems, "runner/x.py", '"""Doc."""\ndef f(own):\n    return own'),
    (name_problems, "runner/x.py", CLASS, "text/y.py", CLASS),
    (name_problems, "runner/x.py", '"""Doc."""', "text/x.py", '"""Doc."""'),
    (docstring_problems, "runner/x.py", 'X = 1\n"""number of things."""'),
    (docstring_problems, "runner/x.py", 'class A:\n    x: int = 1\n    """Number of things"""'),
    (docstring_problems, "runner/x.py", 'class A:\n    """See the module\'s docstring."""'),
    (docstring_problems, "runner/x.py", 'def f():\n    """One. See the module\'s docstring."""'),
    (state_problems, "runner/x.py", "cache = {}"),
    (state_problems, "runner/x.py", "def f():\n    global cache\n    cache = 1"),
    (size_problems, "runner/x.py", "def f():\n" + "    x = 1\n" * 60),
    (size_problems, "schedule/seats.py", "x = 1\n" * 201),
    (constructor_problems, "runner/x.py", SERVICE + "def f(a):\n    a.observer = 1"),
    (constructor_problems, "runner/x.py", "def f(a):\n    object.__setattr__(a, 'b', 1)"),
    (start_problems, "server/x.py", "x = [sys.executable, '-m', 'infer']"),
    (start_problems, "server/x.py", "x = (sys.executable,)"),
    (start_problems, "server/x.py", "uvicorn.Config(app)"),
]


@pytest.mark.parametrize(("check", "files"), [(each[0], each[1:]) for each in BREAKS])
def test_a_broken_tree_is_found(check: Check, files: tuple[str, ...], tmp_path: Path) -> None:
    for file, source in zip(files[::2], files[1::2], strict=True):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert check(tmp_path)


def test_a_module_without_a_level_is_named(tmp_path: Path) -> None:
    (tmp_path / "nowhere.py").write_text("import os\nx = 1", encoding="utf-8")
    with pytest.raises(AssertionError, match="nowhere has no level"):
        layer_problems(tmp_path)


def test_the_api_side_needs_no_torch() -> None:
    """Importing the server and the terminal's entry point must not import torch."""
    code = (
        "import sys; import infer, infer.server.app, infer.engine.client.async_llm, infer.cli.main;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# What tests may reach into.

TESTS = ROOT / "tests"
MUTANTS = "it breaks private rules on purpose, to see that the workloads notice"
ON_A_GPU = "it checks a kernel's own choices on a device"
REACHES: dict[str, tuple[int | None, str]] = {
    "cells/test_cells_reference.py": (1, "compares the keys in the cells"),
    "cells/test_contexts.py": (4, "compares the storage byte by byte; attention that fails"),
    "bench/test_bench_cli.py": (3, "ends an engine from another thread; few common ids"),
    "bench/test_bench_report.py": (5, "measures little memory, and shapes that no model has"),
    "engine/test_draft_model.py": (1, "drafts at any cost; its errors are not contained"),
    "engine/test_grammar_waits.py": (2, "a prompt whose reasoning has begun; a longer patience"),
    "engine/test_speculation_grammar.py": (None, MUTANTS),
    "engine/test_threads.py": (1, "a model counts as small by its bytes"),
    "gpu/test_attention_kernels.py": (2, ON_A_GPU),
    "gpu/test_compiled.py": (2, ON_A_GPU),
    "gpu/test_layer_kernels.py": (3, ON_A_GPU),
    "gpu/test_on_device.py": (1, ON_A_GPU),
    "kernels/test_abi.py": (1, "an interface that the library was not built from"),
    "kernels/test_fusion.py": (2, "replaces a product by one that saturates"),
    "models/test_gguf.py": (1, "a tensor in many parts"),
    "models/test_gguf_blocks.py": (1, "a tensor in many parts"),
    "runner/test_storage.py": (1, "prepares less memory"),
    "schedule/test_ahead.py": (None, MUTANTS),
    "schedule/test_drafting.py": (None, MUTANTS),
    "schedule/test_fairness.py": (None, MUTANTS),
    "schedule/test_speculation.py": (None, MUTANTS),
    "schedule/test_workloads.py": (None, MUTANTS),
    "server/test_engine_events.py": (
        5,
        "short waits; nobody watches when the last viewer has left",
    ),
    "server/test_ends.py": (1, "a metric whose counter has gone"),
    "server/test_leaving_server.py": (1, "a last request may come later, on a busy machine"),
    "text/test_hostile_templates.py": (1, "a rendering for ever ends after a second"),
    "text/test_text_template.py": (
        3,
        "short limits; a prompt of more than 10 characters is too long",
    ),
}
"""File below tests/ → number of reaches into private members and constants of `infer` (None: any
number), and why."""


@functools.cache
def private_names(root: Path) -> frozenset[str]:
    """Names with one leading underscore that a tree defines or uses."""
    found = set()
    for _, _, tree in modules(root):
        for node in nodes(tree):
            for name in (getattr(node, each, None) for each in ("attr", "name", "id")):
                if isinstance(name, str) and re.match("_[^_]", name):
                    found.add(name)
    return frozenset(found)


def reaches(tree: ast.AST, private: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each use of a private member, import of a private name, and constant that is
    set in a module of `infer` (`setattr` with a name in capitals)."""
    own = {each.asname or each.name for each in _aliases(tree, "infer")}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()", "os", "sys") and node.attr != "_replace":
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infer"):
            yield from (
                (node.lineno, each.name) for each in node.names if re.match("_[^_]", each.name)
            )
        elif isinstance(node, ast.Call) and _called(node).endswith("setattr"):
            target, *names = [ast.unparse(each).strip("'") for each in node.args[:2]]
            where, _, name = target.rpartition(".") if "infer." in target else (target, "", "")
            name = name or next(iter(names), "")
            if name.isupper() and (where in own or where.startswith("infer.")):
                yield node.lineno, f"{where}.{name}"


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _aliases(tree: ast.AST, package: str) -> Iterator[ast.alias]:
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            yield from node.names


def reach_problems(tests: Path, allowed: Mapping[str, tuple[int | None, str]]) -> list[str]:
    """Files with more or fewer reaches than are allowed, with what they reach."""
    private, problems = private_names(SOURCE), []
    for path in sorted(tests.rglob("*.py")):
        name = path.relative_to(tests).as_posix()
        if name.startswith("clients/drivers"):
            continue
        found = [
            f"line {line}: {what}"
            for line, what in reaches(parsed(path.read_text(encoding="utf-8")), private)
        ]
        count = allowed.get(name, (0, ""))[0]
        if count is None:
            continue
        if len(found) > count:
            problems.append(
                f"{name} reaches into what is private or constant {len(found)} times ({count} are"
                f" allowed): {'; '.join(found)}. Use or make a public way, such as a setting that"
                " comes through a constructor"
            )
        elif len(found) < count:
            problems.append(f"{name} has {len(found)} reaches: lower its number in REACHES")
    return problems


def test_tests_use_public_ways() -> None:
    assert reach_problems(TESTS, REACHES) == []
    assert set(REACHES) <= {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py")}


@pytest.mark.parametrize(
    "source",
    [
        "def test(engine):\n    assert not engine._mailboxes",
        "from infer.models.gguf_reader import _Header",
        "from infer.engine import loop\ndef test(patch):\n    patch.setattr(loop, 'STOP_S', 1)",
        "def test(patch):\n    patch.setattr('infer.engine.loop.STOP_S', 1)",
    ],
)
def test_a_reach_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(source, encoding="utf-8")
    (problem,) = reach_problems(tmp_path, {})
    assert "test_x.py reaches" in problem
    assert reach_problems(tmp_path, {"test_x.py": (1, "why")}) == []
    assert reach_problems(tmp_path, {"test_x.py": (None, MUTANTS)}) == []
    assert "lower its number" in reach_problems(tmp_path, {"test_x.py": (2, "why")})[0]


# The tables of the page.


def purpose(tree: ast.Module) -> str:
    """The first sentence of a module's docstring, in one line."""
    text = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?!]) (?=[A-Z`])", text)[0].rstrip(".")


def layer_table() -> str:
    """The levels, from the top down."""
    rows = ["| level | modules | what they know |", "|---|---|---|"]
    for row, level in reversed(list(enumerate(LEVELS))):
        names = " ".join(f"`{name}`" for name in level.modules.split())
        rows.append(f"| {row} | {names} | {level.purpose} |")
    return "\n".join(rows)


def module_table() -> str:
    """Every module with its purpose, room by room."""
    rows = ["| module | purpose |", "|---|---|"]
    for name, path, tree in modules(SOURCE):
        if "demo_model" in name or (is_docstring_only(tree) and path.stem == "__init__"):
            continue
        rows.append(f"| `{name or 'infer'}` | {purpose(tree)} |".replace("|", "|"))
    return "\n".join(rows)


LANGUAGES = {
    "Python": (".py",),
    "C++": (".cpp", ".h"),
    "JavaScript": (".js", ".mjs"),
}
"""The columns of the table of lines, and the files that they count."""
BESIDE = ("tests", "benchmarks", "examples", "training")
"""Folders beside the package, each counted as a whole."""
UNCOUNTED = {"demo_model", "vendor", "node_modules", "__pycache__"}
"""Folders with files that were not written here."""


def is_about(shown: int, lines: int) -> bool:
    """Whether a number in the table still tells how much a room holds; an exact one would have to
    be written with every change."""
    return (shown > 0) is (lines > 0) and abs(shown - lines) <= max(100, lines // 5)


def room_sizes(root: Path) -> dict[str, list[int]]:
    """Lines by room (a folder of the package, or what is beside it), in each of `LANGUAGES`."""
    sizes: dict[str, list[int]] = {}

    def count(room: str, paths: Iterable[Path]) -> None:
        for path in paths:
            for i, suffixes in enumerate(LANGUAGES.values()):
                inside = path.relative_to(root).parts
                if path.suffix in suffixes and UNCOUNTED.isdisjoint(inside):
                    row = sizes.setdefault(room, [0] * len(LANGUAGES))
                    row[i] += path.read_bytes().count(b"\n")

    package = root / "src" / "infer"
    for folder in [package, *sorted(path for path in package.rglob("*") if path.is_dir())]:
        room = ".".join(folder.relative_to(package).parts) or "infer"
        count(room, folder.iterdir())
    for name in BESIDE:
        count(name, (root / name).rglob("*"))
    return sizes


def size_table(sizes: dict[str, list[int]], page: str) -> str:
    """The lines of each room, to the next 50. A number of the page stays if it is about right."""
    shown = dict(shown_sizes(page))

    def rounded(room: str, i: int, lines: int) -> int:
        before = shown.get(room, [])[i : i + 1]
        if before and is_about(before[0], lines):
            return before[0]
        return max(50, round(lines / 50) * 50) if lines else 0

    rows = [f"| room | {' | '.join(LANGUAGES)} |", "|---" * (1 + len(LANGUAGES)) + "|"]
    for room, lines in sizes.items():
        numbers = [rounded(room, i, number) for i, number in enumerate(lines)]
        cells = " | ".join(f"{number:,}" if number else "" for number in numbers)
        rows.append(f"| {room if room in BESIDE else f'`{room}`'} | {cells} |")
    return "\n".join(rows)


def shown_sizes(page: str) -> Iterator[tuple[str, list[int]]]:
    """The rooms in the page's table of lines, with their numbers."""
    table = page.partition("<!-- sizes -->\n")[2].partition("<!-- end of sizes -->")[0]
    for row in table.splitlines()[2:]:
        room, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        yield room.strip("`"), [int(cell.replace(",", "") or 0) for cell in cells]


def shared_table() -> str:
    """What callers share, with the limits of a key."""
    from tests.support.shared_resources import as_markdown

    return as_markdown()


def with_tables(page: str) -> str:
    """The page with its tables made anew, between their marks."""
    tables = {
        "layers": layer_table(),
        "modules": module_table(),
        "sizes": size_table(room_sizes(ROOT), page),
        "shared": shared_table(),
    }
    for mark, table in tables.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        head, found, rest = page.partition(begin)
        assert found, f"docs/modules.md has no mark {begin!r}"
        page = head + begin + table + "\n" + end + rest.partition(end)[2]
    return page


def test_the_tables_of_the_page_are_those_of_the_source() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run python tests/test_architecture.py"


def test_the_table_of_lines_is_made_anew_where_a_room_has_grown(tmp_path: Path) -> None:
    package = tmp_path / "src" / "infer"
    for file, lines in (("x.py", 90), ("y/a.cpp", 1020), ("y/b.js", 2), ("y/vendor/c.js", 999)):
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" * lines, encoding="utf-8")
    sizes = room_sizes(tmp_path)
    assert sizes == {"infer": [90, 0, 0], "y": [0, 1020, 2]}

    def page(table: str) -> str:
        return f"<!-- sizes -->\n{table}\n<!-- end of sizes -->"

    table = size_table(sizes, page(""))
    assert table.splitlines()[2:] == ["| `infer` | 100 |  |  |", "| `y` |  | 1,000 | 50 |"]
    assert size_table({"infer": [190, 0, 0], "y": [0, 900, 90]}, page(table)) == table
    for grown in ({**sizes, "infer": [210, 0, 0]}, {**sizes, "z": [1, 0, 0]}, {"y": sizes["y"]}):
        assert size_table(grown, page(table)) != table
    assert size_table({**sizes, "y": [0, 1020, 0]}, page(table)) != table


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
