"""Where Ray puts the engines, and what the cluster writes to the log: `pytest -m cluster`.

Nodes of this machine stand for machines; each has more cores than all engines need.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_llama
from tests.support.json_client import call
from tests.support.ray_cluster import ENGINE, ray_cluster
from tests.support.waits import until

pytest.importorskip("ray", reason="pip install -e '.[cluster]'")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # Ray and what it brings have warnings of their own
]
PORT = 8124
ARGUMENTS = {
    **{"replicas": "2", "fronts": "2", "insecure": "true", "max_seq_len": "256"},
    **{"standby": "false", "node_selector": "zone=a", "engines_per_machine": "1"},
    **{"log_format": "json", "log_level": "debug"},
}
ALL_LINES = {"RAY_DEDUP_LOGS": "0"}
"""Ray else shows lines that differ by digits only once."""
LABELS = ({"zone": "b"}, {"zone": "a"}, {"zone": "a"})


def test_engines_are_spread_over_the_machines_that_may_have_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    how: dict[str, Any] = {"cores": (4, 4, 4), "labels": LABELS, "environment": ALL_LINES}
    with ray_cluster(log, ARGUMENTS, port=PORT, **how) as cluster:
        engines = cluster.pids(ENGINE)
        assert len(engines) == 2
        raylets = [str(cluster.raylet_of(pid)) for pid in engines]
        labels = cluster.ask("labels")
        assert [labels[raylet] for raylet in raylets] == [{"zone": "a"}] * 2
        assert raylets[0] != raylets[1]
        more = json.dumps({**ARGUMENTS, "replicas": "3"})
        refused = cluster.ask(f"refused {more}")
        assert "do not fit the 4 machines of this cluster; 2 do" in refused
        body = {"model": "infer-demo", "prompt": "Once", "max_tokens": 4}
        until(lambda: call(PORT, "/v1/completions", body)[0] == 200, 120)
        until(lambda: any(each.get("path") == "/v1/completions" for each in lines_of(log)), 60)
        (asked, *_) = [each for each in lines_of(log) if each.get("path") == "/v1/completions"]
        assert asked["status"] == 200
        assert re.fullmatch("front-[0-9a-f]{8}", asked["front"])
        assert len(asked["replicas"]) == 1
        until(lambda: len(call(PORT, "/stats")[1].get("replicas", ())) == 2, 60)
        time.sleep(3)  # some rounds, after which each front knows both
        before = num_asked(log)
        assert before >= 4
        time.sleep(5)
        assert call(PORT, "/v1/completions", body)[0] == 200
        assert num_asked(log) == before, "they are asked again though nothing has changed"


def test_several_models_in_one_application(tmp_path: Path) -> None:
    for number, name in enumerate(("small", "large-2.5")):
        write_llama(tmp_path / name, seed=number, max_position_embeddings=256 * (number + 1))
    models = {
        "small": {"path": str(tmp_path / "small"), "replicas": 2},
        "large-2.5": {"path": str(tmp_path / "large-2.5"), "replicas": "1-2", "cpus": 2},
    }
    arguments = {"insecure": "true", "standby": "false", "models": json.dumps(models)}
    with ray_cluster(tmp_path / "log", arguments, port=PORT, cores=(4, 4)) as cluster:
        assert len(cluster.pids(ENGINE)) == 3
        status, listed = call(PORT, "/v1/models")
        assert status == 200
        sizes = {each["id"]: each["max_model_len"] for each in listed["data"]}
        assert sizes == {"small": 256, "large-2.5": 512}
        for name in models:
            body = {"model": name, "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
            status, answer = call(PORT, "/v1/completions", body)
            assert (status, answer["model"]) == (200, name)
            status, refused = call(PORT, "/v1/models/unload", {"model": name})
            assert (status, refused["error"]["code"]) == (409, "model_stays")
            assert call(PORT, "/v1/models/load", {"model": name})[0] == 200
        assert call(PORT, "/v1/completions", {"model": "none", "prompt": "Once"})[0] == 404
        (killed, *_) = cluster.pids(ENGINE)
        os.kill(killed, signal.SIGKILL)
        for name in models:
            assert call(PORT, "/v1/completions", {"model": name, "prompt": "Once"})[0] == 200
        much = json.dumps(
            {**arguments, "models": {**models, "third": {**models["small"], "cpus": 4}}}
        )
        assert "all engines together need CPU=" in cluster.ask(f"refused {much}")


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The lines of JSON among what Ray shows of its processes."""
    found = re.findall(r"\{\"time\": .*\}", log.read_text(encoding="utf-8"))
    return [json.loads(line) for line in found]


def num_asked(log: Path) -> int:
    """How often an engine was asked by a front who it is."""
    asked = re.findall(r"(\d+) actors of engines are asked", log.read_text(encoding="utf-8"))
    return sum(map(int, asked))
