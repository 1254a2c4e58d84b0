"""`infer load`, `unload` and `ps`: what they say of a server's models, and of what it refuses"""

from __future__ import annotations

from functools import partial

import pytest

from infer.cli.main import main
from infer.server.app import create_app
from infer.server.loaded_models import LoadedModels
from infer.server.multi_model import ModelRouter
from tests.server.test_models_at_run_time import Launches
from tests.support.doubles import make_hash_llm
from tests.support.running_server import running, settings_with
from tests.support.serving import live


def refused(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 2


def done(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert not ended.value.code


def test_the_models_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    launches, settings = Launches(max_seq_len=512), settings_with()
    launches.failing = {"a"}
    make = partial(create_app, settings=settings, is_inner=True)
    with running(ModelRouter(LoadedModels(launches.all, make)), settings) as (_, url, _):
        done("ps", "--url", url)
        assert capsys.readouterr().out.count("unloaded") == 2
        done("load", "b", "--url", url)
        assert capsys.readouterr().out == "b: loaded\n"
        refused("load", "a", "--url", url)
        assert "'a' could not be loaded: a: is no checkpoint" in capsys.readouterr().err
        done("ps", "--url", url)
        a, b = capsys.readouterr().out.splitlines()[-3:-1]
        assert a.split() == ["a", "failed", "a:", "is", "no", "checkpoint"]
        assert b.split() == ["b", "loaded", "512"]
        done("unload", "b", "--url", url, "--force")
        assert capsys.readouterr().out == "b: unloaded\n"
        refused("unload", "c", "--url", url)
        assert "there is no such model here; this server has a, b" in capsys.readouterr().err
        assert launches.loads == ["b", "a"]


def test_a_server_with_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    with live(make_hash_llm()) as url:
        done("ps", "--url", url)
        done("load", "hash-model", "--url", url)
        assert capsys.readouterr().out.endswith("hash-model: loaded\n")
        refused("unload", "hash-model", "--url", url)
        assert "stays loaded" in capsys.readouterr().err


def test_where_there_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("ps",), ("load", "a"), ("unload", "a")):
        refused(*words, "--url", "http://127.0.0.1:1")
        assert "no infer server answers" in capsys.readouterr().err
