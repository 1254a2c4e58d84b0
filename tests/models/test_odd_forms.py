"""Checkpoints in odd but legal forms are the same model, or a sentence says what would be right."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.errors import LoadError, RequestError
from infer.models.gguf_file import GGUFFile
from infer.models.hub import SHIPPED_FOLDER, locate
from infer.models.model_config import ConfigReader
from infer.models.registry import ARCHITECTURES, MODEL_TYPES, parse_model_config, read_model_config
from infer.models.rope_config import read_rope
from infer.models.weights import open_checkpoint
from infer.text.checkpoint_text import read_text_files
from infer.text.tokenizer import Tokenizer
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.ready_templates import templates_kept

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_checkpoint(folder, "llama")
    return folder


def _json(name: str, **changes: Any) -> Change:
    """Fields of a JSON file changed; None takes one away."""

    def change(folder: Path) -> None:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
        value |= {key: each(value) if callable(each) else each for key, each in changes.items()}
        value = {key: each for key, each in value.items() if each != "absent"}
        (folder / name).write_text(json.dumps(value), encoding="utf-8")

    return change


def _marked(folder: Path) -> None:
    """A byte-order mark at the beginning of every text, as Windows' editors write it."""
    for file in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def _renamed(rename: Callable[[str], str]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {rename(name): each for name, each in tensors.items()}, folder / "model.safetensors"
        )

    return change


def _indexed(written: str, stored: str = "model-00001-of-00001.safetensors") -> Change:
    """One shard with an index that names it as `written`."""

    def change(folder: Path) -> None:
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / stored)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, written)}
        text = json.dumps(index)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    return change


def _in_shards(folder: Path) -> None:
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    save_file(dict(tensors[:3]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[3:]), folder / "model-00002-of-00002.safetensors")


def _as_in_the_hubs_cache(folder: Path) -> None:
    blobs = folder / "blobs"
    blobs.mkdir()
    for number, file in enumerate([each for each in folder.iterdir() if each.is_file()]):
        file.rename(blobs / str(number))
        file.symlink_to(f"blobs/{number}")


def _whole_floats(folder: Path) -> None:
    path = folder / "config.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    value = {
        name: float(each) if type(each) is int and "token_id" not in name else each
        for name, each in value.items()
    }
    path.write_text(json.dumps(value), encoding="utf-8")


def _template(value: Any) -> Change:
    return _json("tokenizer_config.json", chat_template=value)


def _moved_template(target: str, wrap: bool) -> Change:
    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        text = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
        _template("absent")(folder)
        (folder / target).parent.mkdir(exist_ok=True)
        written = json.dumps({"chat_template": text}) if wrap else text
        (folder / target).write_text(written, encoding="utf-8")

    return change


def _empty_file(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text(" \n", encoding="utf-8")

    return change


def _named(config: dict[str, Any]) -> Any:
    return [{"name": "default", "template": config["chat_template"]}]


SAME: dict[str, Change] = {
    "byte-order marks": _marked,
    "whole floats": _whole_floats,
    "torch_dtype with torch.": _json("config.json", dtype="absent", torch_dtype="torch.float32"),
    "dtype auto": _json("config.json", dtype="auto", torch_dtype="float32"),
    "eos of -1": _json("config.json", eos_token_id=-1),
    "an empty template beside another": _empty_file("chat_template.jinja"),
    "dtype in capitals": _json("config.json", dtype=" FP32 "),
    "activation in capitals": _json("config.json", hidden_act="SiLU"),
    "swish": _json("config.json", hidden_act="swish"),
    "architecture as text": _json("config.json", architectures="LlamaForCausalLM"),
    "architecture with spaces": _json("config.json", architectures=[" llamaforcausallm "]),
    "model_type alone": _json("config.json", architectures="absent"),
    "head_dim null": _json("config.json", head_dim=None),
    "rope_scaling null": _json("config.json", rope_scaling=None),
    "empty quantization_config": _json("config.json", quantization_config={}),
    "eos as float": _json("generation_config.json", eos_token_id=[257.0, 261.0, None]),
    "no metadata": _renamed(str),
    "wrapped in module.": _renamed(lambda name: f"module.{name}"),
    "wrapped twice": _renamed(lambda name: f"base_model.model._orig_mod.{name}"),
    "language_model.": _renamed(lambda name: f"language_model.{name}"),
    "without model.": _renamed(lambda name: name.removeprefix("model.")),
    "one shard with an index": _indexed("model-00001-of-00001.safetensors"),
    "an absolute path": _indexed("/home/them/out/model-00001-of-00001.safetensors"),
    "a path of Windows": _indexed("C:\\out\\model-00001-of-00001.safetensors"),
    "a nested path": _indexed("./checkpoint-9/model-00001-of-00001.safetensors"),
    "an index that is left over": _indexed("model-00001-of-00009.safetensors", "model.safetensors"),
    "shards without an index": _in_shards,
    "links of the hub's cache": _as_in_the_hubs_cache,
    "a list of templates": _template(_named),
    "a mapping of templates": _template(lambda config: {"default": config["chat_template"]}),
    "chat_template.json": _moved_template("chat_template.json", True),
    "chat_template.jinja": _moved_template("chat_template.jinja", False),
    "a folder of templates": _moved_template("additional_chat_templates/default.jinja", False),
    "chat_templates": _moved_template("chat_templates/default.jinja", False),
}


def _read(folder: Path) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    config = read_model_config(folder)
    source = open_checkpoint(folder, torch.float32, torch.device("cpu"))
    shape = (VOCAB_SIZE, config.hidden_size)
    taken = source.take("model.embed_tokens.weight", shape)
    norm = source.take("model.layers.0.input_layernorm.weight", (config.hidden_size,))
    tokenizer = Tokenizer(read_text_files(folder))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    return config, (chat, tokenizer.eos_token_ids), {"embed": taken, "norm": norm}


_read_once = functools.cache(_read)


@pytest.fixture(autouse=True)
def templates_stay() -> Iterator[None]:
    """Most forms have the same template: one process renders it for all of them."""
    with templates_kept():
        yield


@pytest.mark.parametrize("form", SAME)
def test_an_odd_form_is_the_same_model(form: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Modell ü 1"
    shutil.copytree(good, folder)
    SAME[form](folder)
    config, text, tensors = _read(folder)
    good_config, good_text, good_tensors = _read_once(good)
    assert (config, text) == (good_config, good_text)
    assert all(torch.equal(tensors[name], each) for name, each in good_tensors.items())


@pytest.mark.parametrize("text", ["", " \n", None])
def test_an_empty_template_is_none(text: str | None, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(good, folder)
    _template(text)(folder)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(read_text_files(folder)).apply_chat_template([{"role": "user", "content": "Hi"}])


REFUSED: dict[str, tuple[Change, str]] = {
    "half a size": (_json("config.json", hidden_size=8.5), "hidden_size must be int, not 8.5"),
    "float64": (_json("config.json", dtype="float64"), "dtype='float64' is not supported"),
    "unknown model_type": (
        _json("config.json", architectures="absent", model_type="xlnet"),
        "architectures must name one architecture",
    ),
    "a path out of the folder": (_indexed("../../etc/passwd"), "is not the name of a file in this"),
    "a missing shard": (_indexed("model-00002-of-00002.safetensors"), "files that are not there"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_is_not_read_is_named(form: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(good, folder)
    change, message = REFUSED[form]
    change(folder)
    with pytest.raises(LoadError, match=message):
        _read(folder)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_model_type_names_a_supported_architecture(kind: str) -> None:
    assert MODEL_TYPES[kind] in ARCHITECTURES


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2}}, "linear"),
        ({"rope_scaling": {"rope_type": "Linear ", "factor": 2}}, "linear"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, "default"),
        ({"rope_theta": None, "rope_scaling": {}}, "default"),
    ],
)
def test_rope_is_written_in_many_ways(raw: dict[str, Any], kind: str) -> None:
    reader = ConfigReader(raw, "it")
    rope = read_rope(reader, max_position=100)
    assert (reader.problems, rope.kind) == ([], kind)
    assert rope.theta == (5e5 if "rope_parameters" in raw else 1e4)


def test_a_window_that_is_switched_off_has_no_effect() -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    raw = {
        **dict.fromkeys(sizes, 8),
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "architectures": ["Qwen2ForCausalLM"],
    }
    for more in (
        {"sliding_window": None},
        {"sliding_window": 4, "use_sliding_window": False},
        {"sliding_window": None, "use_sliding_window": None},
    ):
        assert parse_model_config({**raw, **more}, "it").windows == ()


@pytest.mark.parametrize(
    "form", ["{}/", "{}//", "file://{}", "FILE://{}/", "  {} ", "{}/../demo_model", "file://{}/%2e"]
)
def test_a_folder_is_given_in_many_ways(form: str) -> None:
    path, name = locate(form.format(SHIPPED_FOLDER))
    assert (path.resolve(), name) == (SHIPPED_FOLDER, "demo_model")


def test_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: Path) -> None:
    (tmp_path / "model").symlink_to(good)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/model/")[0].resolve() == good
    with pytest.raises(LoadError, match="~nobody-here/model: "):
        locate("~nobody-here/model")


@pytest.mark.parametrize(
    "page",
    [
        "https://huggingface.co/owner/name",
        "https://huggingface.co/owner/name/tree/main",
        "huggingface.co/owner/name/",
        "hf.co/owner/name",
        "hf://owner/name",
    ],
)
def test_the_hubs_page_is_its_id(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("infer.models.hub._download", lambda hub_id, revision: Path(hub_id))
    assert locate(page) == (Path("owner/name"), "owner/name")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GGUF\x01\0\0\0", "has version 1 of the format"),
        (b"GGUF\0\0\0\x03", "is big-endian.*gguf-convert-endian"),
    ],
)
def test_other_kinds_of_gguf_are_named(tmp_path: Path, head: bytes, message: str) -> None:
    file = tmp_path / "it.gguf"
    file.write_bytes(head + bytes(64))
    with pytest.raises(LoadError, match=message):
        GGUFFile(file)


def test_a_big_endian_file_of_the_package_is_named(tmp_path: Path) -> None:
    file = tmp_path / "it.gguf"
    writer = gguf.GGUFWriter(file, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(LoadError, match="is big-endian"):
        GGUFFile(file)
