"""`QuantizedFiles`: the tensors of a quantised checkpoint as if it were not quantised.

A layer whose weight lies in several tensors has one, `NAME.weight`, like every other layer. Which
layers are quantised, the files' own tensors say; the config says how. Headers are checked when the
files are opened, scales and orders before the model takes any memory. A linear layer's weights are
then held as kernels can hold them without rounding (`Scheme.held`), or widened. One line of the log
says what was held and what was widened.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from infer.errors import LoadError
from infer.kernels.blocks import FOUR_BITS, BlockWeight, panel_kinds
from infer.kernels.int8_weight import Int8Weight
from infer.models.model_config import ModelConfig
from infer.models.quantization import INT8, WIDENED, Quantization, Scheme
from infer.models.quantized_layouts import (
    LAYOUTS,
    Info,
    Layout,
    Size,
    as_blocks,
    as_int8,
    floats,
    is_float16,
    numbers_of,
)
from infer.models.weights import BlockReader, HeldWeights, TensorFiles, WeightSource
from infer.readable_text import listing

log = logging.getLogger(__name__)

_PLAIN = ("F16", "BF16", "F32", "F64")
"""Types of tensors that are not quantised."""
_OF_CACHE = tuple(f".{part}_scale" for part in ("k", "v", "q", "prob", "k_cache", "v_cache"))
"""Ends of names of scales for keys and values, which are held in other formats here."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with a quantised weight."""

    module: str
    """Its name in the files."""
    scheme: Scheme
    layout: Layout
    names: Mapping[str, str]
    """Its tensors: the names behind the layer's → whole names."""
    size: Size
    """Number of the weight's outputs and inputs."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a weight is held."""

    kind: str | None
    """`INT8` or a type of blocks; None: it is widened."""
    reason: str = ""
    """Why it is widened."""


class QuantizedFiles:
    """The safetensors files of a quantised checkpoint."""

    def __init__(self, folder: Path, config: ModelConfig, quantization: Quantization) -> None:
        """Nothing is read yet."""
        self._folder, self._config = folder, config
        self._quantization = quantization
        self._forms: dict[str, _Form] = {}
        self._held: Counter[str] = Counter()
        self._widened: Counter[str] = Counter()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The forms in which weights can be held, the usual one first."""
        kinds = [scheme.held() for scheme in self._quantization.schemes]
        return tuple(dict.fromkeys(kind for kind in kinds if kind is not None))

    @property
    def is_near_int4(self) -> bool:
        """Whether all layers that are quantised have about 4 bits for a weight."""
        return set(self.kinds) <= set(FOUR_BITS)

    def source(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        """A source of the tensors, widened to `dtype`.

        `LoadError` if tensors of a layer are missing, or their headers do not fit together.
        """
        files, layers = self._files, self._layers
        used = {name for layer in layers.values() for name in layer.names.values()}
        ignored = (*_OF_CACHE, *self._left_out)
        plain = {name for name in files.names - used if not name.endswith(ignored)}

        def stored(name: str) -> Tensor:
            layer = layers.get(name)
            if layer is None:
                return torch.empty(files.header(name)[1], dtype=torch.bfloat16, device="meta")
            self._form(layer)
            shape = layer.size[::-1] if self._is_turned(layer) else layer.size
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            layer = layers.get(name)
            if layer is None:
                return files.read(name)
            self._widened[self._form(layer).reason] += 1
            weight = floats(layer.layout, layer.scheme, layer.size, self._reader(layer), dtype)
            return weight.T if self._is_turned(layer) else weight

        return WeightSource(
            plain | layers.keys(),
            read,
            dtype=dtype,
            device=device,
            stored=stored,
            finished=self._log,
        )

    def block_reader(self, *, planned: bool = False) -> BlockReader:
        """A function that reads the weights of a linear layer in blocks, or in int8.

        It returns None for weights of which one cannot be held so. `planned`: the numbers are not
        read; without files, the config alone says what is quantised.
        """

        def read(parts: Mapping[str, tuple[int, int]], gated: bool) -> HeldWeights | None:
            if planned:
                kinds = [self._planned_kind(name, shape[1]) for name, shape in parts.items()]
            else:
                layers = [self._layers.get(name) for name in parts]
                kinds = [
                    None if layer is None or layer.size != shape else self._form(layer).kind
                    for layer, shape in zip(layers, parts.values(), strict=True)
                ]
            known = [kind for kind in kinds if kind is not None]
            if len(known) < len(kinds) or (INT8 in known and set(known) != {INT8}):
                return None
            if INT8 in known:
                if planned:
                    return [Int8Weight(shape, None, None) for shape in parts.values()]
                return [self._int8(self._layers[name]) for name in parts]
            pairs = zip(known, parts.values(), strict=True)
            blocks = [BlockWeight(kind, shape, None) for kind, shape in pairs]
            if panel_kinds(blocks, gated=gated) is None:
                return None
            if planned:
                return blocks
            return [self._blocks(self._layers[name]) for name in parts]

        return read

    def _int8(self, layer: _Layer) -> Int8Weight:
        self._held[INT8] += 1
        numbers = numbers_of(layer.layout, layer.scheme, layer.size, self._reader(layer))
        return as_int8(numbers)

    def _blocks(self, layer: _Layer) -> BlockWeight:
        kind = self._form(layer).kind
        assert kind is not None
        self._held[kind] += 1
        return as_blocks(layer.layout, layer.scheme, layer.size, self._reader(layer), kind)

    def _planned_kind(self, name: str, width: int) -> str | None:
        """The form of a weight as far as it can be said without its values."""
        roots = self._config.layout.roots
        module = name.removesuffix(".weight")
        if (layers := self._layers_on_disk) is None:
            is_layer = not module.endswith(self._config.layout.stored("embed_tokens"))
            scheme = self._quantization.scheme(module) if is_layer else None
            return None if scheme is None else scheme.held(width)
        rest = module.removeprefix(roots[0])
        names = (name, *(f"{root}{rest}.weight" for root in roots))
        layer = next((layers[stored] for stored in names if stored in layers), None)
        return None if layer is None else layer.scheme.held(width)

    def _is_turned(self, layer: _Layer) -> bool:
        """Whether the model expects the weight as [in, out], as its unquantised files have it."""
        layout = self._config.layout
        return layout.transposed and not layer.module.endswith(layout.head)

    @property
    def _left_out(self) -> list[str]:
        """Ends of the names of tensors that are not used."""
        layouts = [LAYOUTS[scheme.layout] for scheme in self._quantization.schemes]
        return [f".{name}" for layout in layouts for name in layout.left_out]

    @functools.cached_property
    def _files(self) -> TensorFiles:
        return TensorFiles(self._folder)

    @functools.cached_property
    def _layers_on_disk(self) -> Mapping[str, _Layer] | None:
        """The quantised layers; None if there are no files."""
        try:
            self._files  # noqa: B018
        except LoadError:
            return None
        return self._layers

    @functools.cached_property
    def _layers(self) -> Mapping[str, _Layer]:
        """The quantised layers by the name of their weight.

        `LoadError` lists what does not fit together."""
        problems: list[str] = []
        layers: dict[str, _Layer] = {}
        for module, names in self._tensors_of_modules().items():
            try:
                layer = self._layer(module, names)
            except (ValueError, KeyError) as error:
                path = self._files.path(next(iter(names.values())))
                problems.append(f"{path}: {module}.{error.args[0]}")
            else:
                layers |= {} if layer is None else {f"{module}.weight": layer}
        if problems:
            raise LoadError(
                f"the checkpoint does not fit its config, {self._quantization}: {listing(problems)}"
            )
        return layers

    def _tensors_of_modules(self) -> Mapping[str, Mapping[str, str]]:
        """The names of tensors that belong to a layer's weight, by the layer's name."""
        ends = {
            part for scheme in self._quantization.schemes for part in LAYOUTS[scheme.layout].names
        }
        tensors: dict[str, dict[str, str]] = {}
        for name in sorted(self._files.names):
            dots = (i for i, char in enumerate(name) if char == ".")
            for dot in dots:
                if name[dot + 1 :] in ends:
                    tensors.setdefault(name[:dot], {})[name[dot + 1 :]] = name
                    break
        return tensors

    def _layer(self, module: str, names: Mapping[str, str]) -> _Layer | None:
        """The layer with these tensors; None if its weight is not quantised.

        `ValueError` or `KeyError` says what is wrong with a tensor.
        """
        infos = {part_name: Info(*self._files.header(name)) for part_name, name in names.items()}
        scheme = self._quantization.scheme(module) or self._quantization.schemes[0]
        layout = LAYOUTS[scheme.layout]
        others = infos.keys() - {"weight", *layout.left_out}
        if "weight" in infos and infos["weight"].dtype in _PLAIN:
            if others:
                raise ValueError(
                    f"weight is {infos['weight'].dtype}, so {', '.join(sorted(others))} must not be"
                    " there"
                )
            return None
        if not others and layout.marker != "weight":
            return None
        for part_name, part in layout.parts.items():
            if part_name not in infos and part.needed(scheme):
                raise KeyError(f"{part_name} is missing")
        if scheme.layout == "fp8" and not infos.keys() & {"weight_scale", "weight_scale_inv"}:
            raise KeyError("weight_scale is missing")
        for part_name, info in infos.items():
            expected = layout.parts.get(part_name)
            if expected is not None and info.dtype not in expected.dtypes:
                wanted = " or ".join(expected.dtypes)
                raise ValueError(f"{part_name} is {info.dtype}, should be {wanted}")
            if part_name not in layout.left_out and (
                expected is None or not expected.known(scheme)
            ):
                raise ValueError(f"{part_name} is unexpected in this layout ({scheme})")
        probe = _Layer(module, scheme, layout, names, (1, 1))
        size = layout.size(scheme, infos, self._reader(probe))
        if scheme.strategy == "group" and scheme.group and size[1] % scheme.group:
            raise ValueError(
                f"{layout.marker} has {size[1]} inputs, which groups of {scheme.group} do not"
                " divide"
            )
        for part_name, info in infos.items():
            wanted_shapes = (
                layout.parts[part_name].shapes(scheme, size) if part_name in layout.parts else ()
            )
            if wanted_shapes and info.shape not in wanted_shapes:
                raise ValueError(
                    f"{part_name} is {list(info.shape)}, should be {list(wanted_shapes[0])} for a"
                    " weight"
                    f" [{size[0]}, {size[1]}] ({scheme})"
                )
        return _Layer(module, scheme, layout, names, size)

    def _reader(self, layer: _Layer) -> _LayerReader:
        return _LayerReader(self._files, layer.names)

    def _form(self, layer: _Layer) -> _Form:
        """How a weight is held, after a look at its scales; `LoadError` if one is wrong."""
        if (known := self._forms.get(layer.module)) is not None:
            return known
        try:
            form = _form_of(layer, self._reader(layer))
        except ValueError as error:
            path = self._files.path(layer.names[layer.layout.marker])
            raise LoadError(f"{path}: {layer.module}.{error}") from None
        self._forms[layer.module] = form
        return form

    def _log(self, source: WeightSource) -> None:
        """Log what was held and what was widened, in one line."""
        log.info("%s", self.summary(source))
        self._held.clear()
        self._widened.clear()

    def summary(self, source: WeightSource) -> str:
        """What was held and what was widened, for the log."""
        return f"{self._quantization}: {', '.join(self._parts(source)) or 'nothing is quantised'}"

    def _parts(self, source: WeightSource) -> Iterator[str]:
        for kind, count in self._held.items():
            how = "with the file's scales" if kind == INT8 else "with the same numbers"
            yield f"{count} weights held in {kind} {how}"
        to = source.quantization or str(source.dtype).removeprefix("torch.")
        can_hold = sum(count for reason, count in self._widened.items() if not reason)
        for reason, count in self._widened.items():
            if reason:
                yield f"{count} weights widened to {to} ({reason})"
        if can_hold:
            yield (
                f"{can_hold} weights widened to {to} (as --dtype, the device or the processor asks,"
                " or because others of their layer are)"
            )


class _LayerReader:
    """Reads the tensors of a layer; `KeyError` if it has none of a name."""

    def __init__(self, files: TensorFiles, names: Mapping[str, str]) -> None:
        self._files, self._names = files, names

    def __call__(self, name: str) -> Tensor:
        return self._files.read(self._names[name])


def _form_of(layer: _Layer, read: _LayerReader) -> _Form:
    scheme, layout = layer.scheme, layer.layout
    factors = layout.factors(scheme, layer.size, read)
    if layout.codes is None or scheme.layout in WIDENED:
        return _Form(None, f"{scheme.layout} has no kernel")
    if factors.groups is not None:
        return _Form(None, "groups are of inputs in another order")
    zeros, width = factors.zeros, layer.size[1]
    if scheme.held(width) == INT8 and zeros is None and factors.scales.shape[1] == 1:
        return _Form(INT8)
    middle = factors.lowest + (1 << scheme.bits - 1)
    kind = scheme.blocks(width, centred=zeros is None or bool((zeros == middle).all()))
    if kind is None or (zeros is not None and bool((zeros > middle + 127).any())):
        sharing = f"scales{'' if zeros is None else ' and zero points'}"
        return _Form(None, f"{scheme.bits} bits with {sharing} for {scheme.inputs or 'all'} inputs"
                           " have no kernel")  # fmt: skip
    if kind != "MXFP4" and not is_float16(factors.scales):
        return _Form(None, "their scales are no numbers of float16")
    return _Form(kind)
