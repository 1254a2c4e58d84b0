"""Tests of refused checkpoints: the message names what is wrong and what would be right."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from infer import LLM
from infer.engine.build.runner_factory import make_attention
from infer.errors import LoadError
from infer.models.model_config import LayerConfig, ModelConfig
from infer.runner.kv_storage import KVStorage
from tests.support.checkpoints import write_llama


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_llama(folder, num_hidden_layers=1)
    return folder


def broken(good: Path, to: Path, **config: object) -> Path:
    shutil.copytree(good, to, dirs_exist_ok=True)
    raw = json.loads((to / "config.json").read_text(encoding="utf-8"))
    (to / "config.json").write_text(json.dumps({**raw, **config}), encoding="utf-8")
    return to


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, "'FooForCausalLM' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be int"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rope_parameters": {"rope_type": "odd"}}, "rope_scaling type 'odd' is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_scaling of type 'yarn' lacks factor",
        ),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"intermediate_size": 100}, "mlp.down_proj.weight is [64, 112], should be [64, 100]"),
        ({"num_hidden_layers": 2}, "missing: model.layers.1"),
        ({"tie_word_embeddings": True, "num_hidden_layers": 1, "vocab_size": 7}, "embed_tokens"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    good: Path, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(LoadError) as caught:
        LLM(str(broken(good, tmp_path, **config)))
    assert message in str(caught.value)


def test_an_unexpected_tensor_is_refused_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path, attention_bias=True, num_hidden_layers=1)
    with pytest.raises(LoadError, match=r"unexpected: model.layers.0.self_attn.k_proj.bias"):
        LLM(str(broken(tmp_path, tmp_path / "b", attention_bias=False)))


def test_files_that_are_not_there_or_not_whole(good: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="neither a folder here nor a hub id"):
        LLM("/nowhere/at/all")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LoadError, match=r"without config\.json"):
        LLM(str(empty))
    cut = broken(good, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(LoadError, match="cut short"):
        LLM(str(cut))
    pickled = broken(good, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(LoadError, match="save_pretrained"):
        LLM(str(pickled))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path, shard_bytes=60_000)
    next(iter(sorted(tmp_path.glob("model-00002-*")))).unlink()
    with pytest.raises(LoadError, match="model-00002-of"):
        LLM(str(tmp_path))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uneven(ModelConfig):
    """A model whose last layer has smaller heads."""

    def layer(self, index: int) -> LayerConfig:
        layer = super().layer(index)
        size = layer.head_dim // (2 if index == self.num_layers - 1 else 1)
        return dataclasses.replace(layer, head_dim=size)


def test_layers_with_other_heads_are_refused_by_attention() -> None:
    """The cache has the shape of each layer, and no backend computes two shapes."""
    config = Uneven(
        architecture="X", vocab_size=9, hidden_size=64, intermediate_size=64, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=64, norm_eps=1e-6,
        tie_embeddings=True, dtype="float32",
    )  # fmt: skip
    storage = KVStorage(config, 2, 4, dtype=torch.float32, device=torch.device("cpu"))
    assert [cache.shape[-1] for cache in storage.keys] == [16, 8]
    with pytest.raises(LoadError, match=r"layers differ in head_dim \(8, 16\)"):
        make_attention("auto", storage, config)
