"""Tests of `LayerStack`: one call for all layers gives the same bits as the decoder's own loop.

They run on every family whose decoder makes a stack, in every odd shape of `model_shapes`. What the
stack cannot compute it refuses, and the loop is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from infer.attention.cpu import NativeBackend
from infer.attention.layout import BatchLayout
from infer.kernels import loader, native
from infer.kernels.layer_stack import LayerStack, obstacle, stack_layers
from infer.kernels.linear import plain_linear
from infer.kernels.linear.fusion import Norm
from infer.kernels.rotary import HeadNorms, QKRotation
from infer.models import decoder
from infer.models.decoder import Decoder
from infer.models.layer_forms import LayerForm
from infer.models.model import build_model
from infer.models.model_config import LayerConfig, ModelConfig
from infer.models.registry import read_model_config
from infer.models.weights import open_checkpoint
from infer.runner.kv_storage import KVStorage
from tests.support import isas
from tests.support.cases import slow_but
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.model_shapes import LOOPED, SHAPES, STACKED, is_stacked

CPU = torch.device("cpu")
Way = Literal["stack", "layer by layer", "calls"]
KINDS = (
    *("llama", "qwen3", "phi3", "gemma", "ministral3", "granite", "olmo", "olmo2", "glm4"),
    *("hunyuan", "cohere2", "gpt_neox", "starcoder2", "apertus", "gpt2", "bloom", "gemma2"),
)
"""Families that have all that differs in layers of a stack."""
CASES = slow_but(
    [(family, name) for family in KINDS for name in SHAPES[family]],
    [(family, name) for family in STACKED for name in SHAPES[family] if is_stacked(family, name)],
)


def make(
    folder: Path,
    family: str,
    quantization: str | None = None,
    changes: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    **shape: Any,
) -> Decoder:
    write_checkpoint(folder, family, **shape)
    source = open_checkpoint(folder, torch.bfloat16, CPU).with_layers(quantization)
    model = build_model(changes(read_model_config(folder)), source, 256)
    assert isinstance(model, Decoder)
    return model


def run(model: Decoder, held: torch.dtype, way: Way) -> list[Tensor]:
    """Results of a prompt of 70 tokens, of a second one of 17, and the logits of both after one
    more token."""
    config = model.config
    storage = KVStorage(config, 16, 16, dtype=held, device=CPU)
    backend = NativeBackend(storage.keys, storage.values, **config.attention())
    calls = []

    def attend(*arguments: Any) -> Tensor:
        calls.append(arguments[0])
        return backend(*arguments)

    tables = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])
    tokens = torch.arange(200) % VOCAB_SIZE
    results = []
    for spans in ([(0, 70), (0, 17)], [(70, 71), (17, 18)]):
        starts = [0, spans[0][1] - spans[0][0]]
        starts.append(starts[1] + spans[1][1] - spans[1][0])
        positions = torch.cat([torch.arange(*span) for span in spans])
        rows = torch.tensor([0] * starts[1] + [1] * (starts[2] - starts[1]))
        slots = tables[rows, positions // 16] * 16 + positions % 16
        layout = BatchLayout(starts, [end for _, end in spans], slots, tables)
        if way == "calls" and len(positions) == 2:
            results.append(called(model, tokens[positions], positions, backend, layout))
            continue
        backend.plan(layout)
        attended = attend if way == "layer by layer" else backend
        results.append(model.forward(tokens[positions], positions, attended))
    if way != "calls":
        results[-1] = model.logits(results[-1])
    assert len(calls) == (2 * config.num_layers if way == "layer by layer" else 0)
    return [*results, *storage.keys, *storage.values]


def called(
    model: Decoder, tokens: Tensor, positions: Tensor, backend: NativeBackend, layout: BatchLayout
) -> Tensor:
    """The logits by calls that are made before the tokens are known."""
    known, tokens = tokens, torch.zeros_like(tokens)
    made = model.calls(tokens, positions, backend, None)
    assert made is not None
    plan = backend.plan_call(layout)
    tokens.copy_(known)
    calls: list[Callable[[], object]] = [*made.before, plan, *made.behind]
    for call in calls:
        call()
    return made.logits


def has_calls(model: Decoder) -> bool:
    config = model.config
    return (
        model.norm.fused is not None
        and (model.embedding_norm, model.positions) == (None, None)
        and (config.final_softcap, config.logits_scale) == (None, 1.0)
    )


def assert_same(model: Decoder) -> None:
    assert model.stack is not None
    config = model.config
    for held in (torch.bfloat16, torch.int8):
        if held == torch.int8 and loader.int8_cache_obstacle(config.head_dim, 16):
            continue
        wanted = run(model, held, "layer by layer")
        assert all(map(torch.equal, run(model, held, "stack"), wanted))
        if has_calls(model):
            assert all(map(torch.equal, run(model, held, "calls"), wanted))
        else:
            nothing = torch.zeros(0, dtype=torch.int64)
            backend: Any = None
            assert model.calls(nothing, nothing, backend, None) is None


def wide(family: str) -> dict[str, Any]:
    """Heads of 64, which a cache in int8 takes."""
    return {"hidden_size": 256} | ({} if family == "falcon" else {"head_dim": 64})


QUANTIZED = [(family, kind) for family in STACKED for kind in (None, "int8", "int4")]
USUAL: list[tuple[str, str | None]] = [
    *((family, None) for family in KINDS),
    *((family, "int8") for family in KINDS[::3]),
    *((family, "int4") for family in KINDS[1::3]),
]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("family", "quantization", "isa"),
    isas.in_turns(USUAL, every=4, slow=QUANTIZED),
    indirect=["isa"],
)
def test_a_stack_is_its_layers(family: str, quantization: str | None, tmp_path: Path) -> None:
    shape = {**next(iter(SHAPES[family].values())), **wide(family)}
    assert_same(make(tmp_path, family, quantization, **shape))


@pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def test_of_every_shape(case: tuple[str, str], tmp_path: Path) -> None:
    family, name = case
    assert_same(make(tmp_path, family, **SHAPES[family][name]))


def each_its_own(config: ModelConfig) -> ModelConfig:
    """Layers with another RoPE and other windows each, of which the second does not rotate."""
    ropes = [dataclasses.replace(config.rope, theta=100.0 + i) for i in range(config.num_layers)]
    windows = [None, 9, 33]
    return dataclasses.replace(
        config,
        ropes=tuple(None if i == 1 else rope for i, rope in enumerate(ropes)),
        windows=tuple(windows[i % 3] for i in range(config.num_layers)),
    )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("family", "isa"),
    isas.in_turns([(each,) for each in KINDS[::2]], every=4, slow=[(each,) for each in STACKED]),
    indirect=["isa"],
)
def test_layers_may_differ(family: str, tmp_path: Path) -> None:
    shape = wide(family)
    model = make(tmp_path, family, changes=each_its_own, **shape)
    assert_same(model)
    alike = make(tmp_path, family, **shape)
    ours, theirs = (run(each, torch.bfloat16, "stack") for each in (model, alike))
    assert not any(map(torch.equal, ours[:2], theirs[:2]))


@pytest.mark.parametrize("case", sorted(LOOPED), ids=lambda case: f"{case[0]}, {case[1]}")
def test_layers_of_another_form_are_no_stack(case: tuple[str, str], tmp_path: Path) -> None:
    family, name = case
    write_checkpoint(tmp_path, family, **SHAPES[family][name])
    source = open_checkpoint(tmp_path, torch.bfloat16, CPU)
    model: Any = build_model(read_model_config(tmp_path), source, 256)
    assert getattr(model, "stack", None) is None


def test_other_layers_are_no_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(native.VARIABLE, "onednn")
    assert make(tmp_path, "llama").stack is None


# What is refused.


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    if reason := native.native_obstacle():
        pytest.skip(reason)
    return make(tmp_path, "qwen3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterModelConfig(ModelConfig):
    """With a property that no family had before."""

    residual_scale: float = 1.0
    """Factor of what a layer adds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterLayerConfig(LayerConfig):
    """With a property that no layer had before."""

    has_gate: bool = False
    """Whether attention has a gate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnevenModelConfig(ModelConfig):
    """With a property of its last layer only."""

    last_has_gate: bool = False
    """Whether attention of the last layer has a gate."""

    def layer(self, index: int) -> LayerConfig:
        """The layer with its new property."""
        has_gate = self.last_has_gate and index == self.num_layers - 1
        layer = super().layer(index)
        fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        return LaterLayerConfig(**fields, has_gate=has_gate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterForm(LayerForm):
    """With a form that no layer had before."""

    has_gate: bool = False
    """Whether attention has a gate."""


def later(kind: type[ModelConfig], config: ModelConfig, **changes: Any) -> ModelConfig:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return kind(**values, **changes)


def test_an_unknown_property_is_refused(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [layer.parts() for layer in model.layers]
    assert stack_layers(model.config, parts) is not None
    assert obstacle(later(LaterModelConfig, model.config), parts) is None
    reason = obstacle(later(LaterModelConfig, model.config, residual_scale=0.5), parts)
    assert reason is not None
    assert "residual_scale = 0.5" in reason
    known = "infer.kernels.layer_stack.MODEL_PROPERTIES"
    monkeypatch.setattr(known, {"last_has_gate", *vars(model.config)})
    assert obstacle(later(UnevenModelConfig, model.config), parts) is None
    reason = obstacle(later(UnevenModelConfig, model.config, last_has_gate=True), parts)
    assert reason is not None
    assert "has_gate = True" in reason
    form = dataclasses.replace(model.config, form=LaterForm(has_gate=True))
    assert "LaterForm.has_gate = True" in str(obstacle(form, parts))


def test_layers_that_the_call_cannot_take_are_refused(model: Decoder, tmp_path: Path) -> None:
    config = model.config
    parts: list[Any] = [layer.parts() for layer in model.layers]
    norms = parts[1].norms
    assert norms is not None

    def reason(own: Any = parts[1], **changes: Any) -> str:
        changed = dataclasses.replace(own, **changes)
        return obstacle(config, [parts[0], changed, *parts[2:]]) or ""

    assert reason() == ""
    assert reason(norms=None) == ""
    assert "eps" in reason(norms=HeadNorms(Norm(norms.q.weight, 0.1), norms.k))
    whole = HeadNorms(Norm(torch.ones(96), norms.q.eps), norms.k)
    assert "norm is not over one head" in reason(norms=whole)
    wider: Any = make(tmp_path / "wider", "qwen3", intermediate_size=128).layers[1].parts()
    assert "differ in size" in reason(wider)
    fewer: Any = make(tmp_path / "fewer", "qwen3", num_key_value_heads=1).layers[1].parts()
    assert "do not fit" in reason(fewer)
    assert "do not fit" in reason(inner=wider.inner)
    assert "PlainLinear" in reason(qkv=plain_linear.PlainLinear(torch.ones(3, 3)))
    assert "float32" in reason(o=model.lm_head)
    assert "declared" in str(obstacle(config, parts[:2]))


Call = Callable[..., Tensor]


def scaled(call: Call) -> Call:
    return lambda self, x, *rest: 0.5 * call(self, x, *rest)


def without_rotation(call: Call) -> Call:
    def changed(self: Any, x: Tensor, angles: Any, attend: Any, growth: Any) -> Tensor:
        own = [None] * len(angles) if self.attention.layer.index == 1 else angles
        return call(self, x, own, attend, growth)

    return changed


def with_another_rotation(call: Call) -> Call:
    def changed(self: Any, x: Tensor, angles: Any, attend: Any, growth: Any) -> Tensor:
        own = [(sin, cos) for cos, sin in angles]
        used = own if self.attention.layer.index == 2 else angles
        return call(self, x, used, attend, growth)

    return changed


def without_head_norms(call: Call) -> Call:
    def changed(self: Any, x: Tensor, angles: Any, attend: Any, growth: Any) -> Tensor:
        def own(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation) -> Tensor:
            return attend(layer, q, k, v, QKRotation(rotation.cos, rotation.sin, None))

        return call(self, x, angles, own, growth)

    return changed


def with_larger_values(call: Call) -> Call:
    def changed(self: Any, x: Tensor, angles: Any, attend: Any, growth: Any) -> Tensor:
        def own(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation) -> Tensor:
            return attend(layer, q, k, 1.01 * v, rotation)

        return call(self, x, angles, own, growth)

    return changed


def in_parallel(call: Call) -> Call:
    return lambda self, x, angles, attend, growth: (
        self.attention(x, angles, attend, residual=x) + self.mlp(x)
    )


def with_a_norm_behind(call: Call) -> Call:
    return lambda self, x, *rest: torch.nn.functional.rms_norm(call(self, x, *rest), x.shape[-1:])


CHANGES = (
    *(scaled, without_rotation, with_another_rotation, without_head_norms, with_larger_values),
    *(in_parallel, with_a_norm_behind),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_layer_that_does_something_else_is_computed_by_the_loop(
    change: Callable[[Call], Call],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing declares it: what the layers do is compared when the model is loaded."""
    if reason := native.native_obstacle():
        pytest.skip(reason)
    monkeypatch.setattr(decoder.DecoderLayer, "__call__", change(decoder.DecoderLayer.__call__))
    monkeypatch.setattr(LayerStack, "call", None)
    assert make(tmp_path, "qwen3").stack is None
    assert "something else than the model's own layers" in caplog.text


def test_so_is_a_loop_that_does_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason := native.native_obstacle():
        pytest.skip(reason)

    class Later(Decoder):
        """Its layers read the embeddings again."""

        def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
            if self.stack is not None and hasattr(attend, "through"):
                return super().forward(tokens, positions, attend)
            x = first = self.embedding.index_select(0, tokens)
            for layer in self.layers:
                x = layer(x + first, self.rope.at(positions), attend)
            return x

    monkeypatch.setattr(decoder, "Decoder", Later)
    assert make(tmp_path, "llama").stack is None
