"""Engines on machines with several NUMA nodes and sockets, which are emulated: where threads and
memory are, and the same bits. `INFER_LINUX=FOLDER pytest -m peer tests/engine/test_two_nodes.py`
(`tests/support/emulated_machine.py` says what the folder is); some minutes each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.kernels import loader
from tests.support.checkpoints import write_checkpoint
from tests.support.emulated_machine import Machine, linux, python, run_in
from tests.support.placed_server import ASKED, ask
from tests.support.server_process import ENV, ROOT, served

pytestmark = [pytest.mark.peer, pytest.mark.timeout(3000)]
PATIENCE_S = "1200"
SHAPE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some 80 MB, in bfloat16: slices of its layers are many pages."""
    linux()
    folder: Path = tmp_path_factory.mktemp("model")
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    write_checkpoint(folder, "llama", rounded=True, **SHAPE, **heads)
    return folder


def options_of(checkpoint: Path) -> list[str]:
    """Of `infer serve`, here and there."""
    return ["--model", str(checkpoint), "--max-seq-len", "512", "--dtype", "bfloat16"]


def placed(machine: Machine, folder: Path, checkpoint: Path, *options: str) -> Any:
    """What `placed_server.py` prints."""
    program = str(ROOT / "tests/support/placed_server.py")
    arguments = (program, PATIENCE_S, *options_of(checkpoint), *options)
    command = ["env", "INFER_ISA=avx2", *python(*arguments)]
    printed = run_in(machine, folder, command, 3072)
    (folder / "printed").write_text(printed, encoding="utf-8")
    return json.loads(printed.partition("PLACED ")[2].partition("\n")[0])


def test_slices_of_layers_and_caches_are_on_their_nodes(tmp_path: Path) -> None:
    tests = "tests/attention/test_nodes.py"
    options = ("-v", "-n", "0", "-p", "no:cacheprovider", "-m", "", "-k", "lie or preferred")
    machine = Machine(sockets=1, nodes=2, cores=4)
    printed = run_in(machine, tmp_path, python("-m", "pytest", *options, str(ROOT / tests)))
    assert "2 passed" in printed, printed


def test_one_engine_over_the_nodes_of_a_socket(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has a core, each node half of the weights and of the cache, and the answer is
    that of one thread here."""
    found = placed(Machine(sockets=1, nodes=2, cores=5), tmp_path, checkpoint, "--num-threads=10")
    [engine] = found["engines"]
    alone = {each for each in engine["allowed"] if each.isdecimal()}
    assert alone == {str(number) for number in range(1, 10)}, "the first one is the caller"
    # Slices of weights and of the cache ask for their node; the least has 2 MiB.
    of_node = {"0": 0, "1": 0}
    for policy, counts in engine["pages"]:
        if policy.startswith("prefer:"):
            node = policy.removeprefix("prefer:")
            assert counts.get(node, 0) >= 0.99 * sum(counts.values()), engine
            of_node[node] += counts[node]
    assert of_node["0"] > 20_000
    assert 0.95 < of_node["0"] / of_node["1"] < 1.05, of_node
    monkeypatch.setitem(ENV, loader.ISA_VARIABLE, "avx2")
    assert found["answer"]["logprobs"] == answer_here(checkpoint, tmp_path)["logprobs"]


def answer_here(checkpoint: Path, folder: Path) -> Any:
    """The same request's answer of one thread on this machine."""
    arguments = ["-m", "infer", "serve", "--port", "0", "--num-threads", "1"]
    with served([*arguments, *options_of(checkpoint)], folder / "log") as server:
        return ask("/v1/completions", ASKED, server.url)["choices"][0]


def test_each_replica_has_a_socket(checkpoint: Path, tmp_path: Path) -> None:
    """Its threads stay there, and so does its memory."""
    machine = Machine(sockets=2, nodes=1, cores=2)
    found = placed(machine, tmp_path, checkpoint, "--replicas=2", "--num-threads=2")
    nodes = set()
    for engine in found["engines"]:
        [cores] = set(engine["allowed"]) - {"0-3"}  # of threads that libraries had started before
        node = {"0-1": "0", "2-3": "1"}[cores]
        counts = [counts for _, counts in engine["pages"]]
        own = sum(each.get(node, 0) for each in counts)
        # The rest was there before the engine knew its place: what libraries have when imported.
        assert own > 0.85 * sum(sum(each.values()) for each in counts), engine
        nodes.add(node)
    assert nodes == {"0", "1"}
