"""Models that lie in a folder: what of it is served, and what happens when it changes under way"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from infer.config import EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.errors import LoadError
from infer.server.models_folder import ModelsFolder, launches_in
from infer.server.multi_model import ModelRouter
from infer.server.served_models import MODEL_NAME, Presets
from tests.server.test_models import statuses, used
from tests.support.doubles import make_hash_llm
from tests.support.serving import COMPLETIONS, App, check_refused, completion_body


def checkpoint(folder: Path, name: str) -> Path:
    """A folder or GGUF file as far as it is looked at."""
    path = folder / name
    if name.lower().endswith(".gguf"):
        path.write_bytes(b"GGUF")
    else:
        path.mkdir()
        (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def test_folders_and_files_are_models_by_their_names(tmp_path: Path) -> None:
    for name in ("b", "a.gguf", "C-1.Q4_K_M.GGUF", "s-00001-of-00002.gguf"):
        checkpoint(tmp_path, name)
    checkpoint(tmp_path, "s-00002-of-00002.gguf")
    checkpoint(tmp_path, "mmproj-x.gguf")
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    found = ModelsFolder(tmp_path).list_models()
    assert {name: path.name for name, path in found.items()} == {
        "C-1.Q4_K_M": "C-1.Q4_K_M.GGUF",
        "a": "a.gguf",
        "b": "b",
        "s": "s-00001-of-00002.gguf",
    }
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    "name",
    [
        "no name",
        "Ünicode",
        "-x",
        "load",
        "unload",
        "new\nline",
        "x" * 97,
        "quote'",
        "a%2fb",
        "$(x)",
    ],
)
def test_odd_names_are_left_out_and_told_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, name)
    checkpoint(tmp_path, f"{name}.gguf")
    folder = ModelsFolder(tmp_path)
    for _ in range(3):
        assert folder.list_models() == {}
    assert len(caplog.messages) == 2
    assert all("is not served: a name has letters" in message for message in caplog.messages)
    assert not any("\n" in message for message in caplog.messages)


def test_names_that_only_contain_those_of_actions_are_names() -> None:
    for name in ("loader", "load.1", "load-2", "unload_", "payload"):
        assert re.fullmatch(MODEL_NAME, name), name
    for name in ("load", "unload", ""):
        assert not re.fullmatch(MODEL_NAME, name), name


def test_hidden_and_special_files_are_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, ".hidden")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "gone.gguf").symlink_to("nowhere")
    assert ModelsFolder(tmp_path).list_models() == {}


def test_links_out_of_the_folder_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    for name in ("secret", "file.gguf"):
        (folder / name).symlink_to(checkpoint(outside, name))
    mixed = checkpoint(folder, "mixed")
    (mixed / "model.safetensors").symlink_to(outside / "file.gguf")
    inside = checkpoint(folder, "inside")
    (folder / "again").symlink_to(inside)
    assert list(ModelsFolder(folder).list_models()) == ["again", "inside"]
    assert sum("link out of the folder" in message for message in caplog.messages) == 3
    (tmp_path / "linked").symlink_to(folder)  # the folder itself may be one
    assert list(ModelsFolder(tmp_path / "linked").list_models()) == ["again", "inside"]


def test_a_folder_that_cannot_be_read_or_is_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ModelsFolder(tmp_path / "later")
    assert folder.list_models() == folder.list_models() == {}
    assert caplog.messages == ["the folder of models cannot be read: No such file or directory"]
    (tmp_path / "later").mkdir()
    for i in range(5):
        checkpoint(tmp_path / "later", f"m{i}")
    assert len(folder.list_models()) == 5
    assert len(ModelsFolder(tmp_path / "later", max_entries=3).list_models()) == 3
    assert "only 3 entries" in caplog.messages[-1]


class Folder:
    """Counts looks at a folder, whose models are hash engines."""

    def __init__(self, path: Path) -> None:
        self.num_looks = 0
        self.configs: list[EngineConfig] = []
        presets = Presets({"seed": 1}, {"b": {"seed": 2}}, {"other": "b"})
        self._find = partial(launches_in, ModelsFolder(path), self._launch, presets)

    def _launch(self, config: EngineConfig) -> AsyncLLM:
        self.configs.append(config)
        return make_hash_llm()

    def find(self) -> dict[str, Callable[[], AsyncLLM]]:
        self.num_looks += 1
        return self._find()


def test_a_folder_that_changes_under_way(tmp_path: Path) -> None:
    folder = Folder(tmp_path)

    async def body(app: App, models: ModelRouter) -> None:
        assert (await app.get("/health/ready")).status == 503
        unknown = await app.post(COMPLETIONS, completion_body(model="b"))
        check_refused(unknown, 404, "model", "model_not_found", "has none yet")
        nameless = await app.post(COMPLETIONS, completion_body())
        check_refused(nameless, 404, "model", "model_not_found", "has none yet")
        path = checkpoint(tmp_path, "b")
        assert (await app.post(COMPLETIONS, completion_body(model="b"))).status == 200
        assert (folder.configs[0].model, folder.configs[0].seed) == (str(path), 2)
        assert await statuses(app) == {"b": "loaded"}
        assert (await app.get("/health/ready")).status == 200
        (path / "config.json").unlink()  # it has gone, but what is loaded is served
        assert await statuses(app) == {"b": "loaded"}
        assert (await app.post(COMPLETIONS, completion_body(model="b"))).status == 200
        assert (await app.post("/v1/models/unload", {"model": "b"})).status == 200
        gone = await app.post(COMPLETIONS, completion_body(model="b"))
        assert (gone.status, gone.error()["code"]) == (503, "engine_unavailable")
        assert "'b' is no longer in the folder of models" in gone.error()["message"]
        assert await statuses(app) == {}

    used(body, {}, load=False, find=folder.find)


def test_an_alias_is_the_model(tmp_path: Path) -> None:
    checkpoint(tmp_path, "a")
    checkpoint(tmp_path, "b")
    folder = Folder(tmp_path)

    async def body(app: App, _: ModelRouter) -> None:
        for name in ("other", "b"):
            reply = await app.post(COMPLETIONS, completion_body(model=name))
            assert (reply.status, reply.json()["model"]) == (200, "b")
        shown = (await app.get("/v1/models/other")).json()
        assert (shown["id"], shown["aliases"]) == ("b", ["other"])
        assert "engine" in (await app.get("/stats?model=other")).json()
        assert (await app.post("/v1/models/unload", {"model": "other"})).json()["id"] == "b"

    used(body, {}, load=False, find=folder.find, aliases={"other": "b"})


def test_many_who_ask_for_unknown_names_share_one_look(tmp_path: Path) -> None:
    folder = Folder(tmp_path)

    async def body(app: App, _: ModelRouter) -> None:
        asking = [app.post(COMPLETIONS, completion_body(model=f"x{i}")) for i in range(50)]
        assert {reply.status for reply in await asyncio.gather(*asking)} == {404}
        assert folder.num_looks == 1

    used(body, {}, load=False, find=folder.find)


def test_what_has_gone_before_it_is_loaded_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no longer in the folder"):
        ModelsFolder(tmp_path).path_of("a")
