"""`infer bench machine`: the speed of this machine, and the limit it sets to the speed of a model.

The read bandwidth is the best of two kinds of reading: memory larger than a last-level cache (by a
plain loop where the kernels were compiled, else by torch's sum), and the weights of one-row
products. The products are measured on the layers as the engine runs them. With a CUDA device,
everything is measured on the device by the functions of `infer bench gpu`. A token of a stream
takes at least as long as reading the weights, and a prompt as long as its products.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from infer.bench.gpu import measure_peaks, timed_us
from infer.bench.results import environment
from infer.config import EngineConfig
from infer.engine.build.checkpoint import find_checkpoint
from infer.engine.build.hardware import (
    check_quantization,
    choose_device,
    choose_dtype,
    default_threads,
)
from infer.errors import ConfigError
from infer.kernels import cuda, loader
from infer.kernels.invariance import linears
from infer.kernels.linear.choose import make_linear
from infer.kernels.linear.fusion import Linear
from infer.kernels.native import lm_head_quantization, weight_bytes
from infer.models.model import build_model
from infer.models.model_config import ModelConfig
from infer.models.weights import WeightSource

READ_BYTES = 3 << 29
"""The size of the memory that is read, in bytes (1.5 GiB): several times the largest cache."""
ROTATED_BYTES = 700 << 20
"""The size of all weights of one shape, in bytes. They take turns, so that none is still in a cache
when its turn comes again."""
ROWS = (1, 8, 32, 1024)
DEFAULT_SHAPES = {(2048, 3072): 1, (2048, 16384): 1, (8192, 2048): 1}
_REPEATS = 5


def measure_machine(config: EngineConfig) -> dict[str, Any]:
    """Everything that was measured, as plain data.

    Where `config` names a model, its layers are measured, and `floor` has the limits of its speed.
    Raises `ConfigError` for a quantised dtype that is not possible, or if memory does not suffice.
    """
    threads = config.num_threads or default_threads()
    torch.set_num_threads(threads)
    with cuda.current(device := choose_device(config)):
        return _measure(config, device, threads)


def _measure(config: EngineConfig, device: torch.device, threads: int) -> dict[str, Any]:
    """`measure_machine` for a device, on which kernels are launched."""
    check_quantization(config, device)
    shapes, dtype, floor_of = DEFAULT_SHAPES, torch.bfloat16, None
    if config.model is not None:
        floor_of = find_checkpoint(config.model, dummy=True)
        dtype = choose_dtype(config, floor_of.config, device)
        shapes = layer_shapes(floor_of.config, dtype)
    elif config.dtype != "auto":
        dtype = getattr(torch, "bfloat16" if config.weight_format else config.dtype)
    about, read = _of_memory(device)
    held, head = config.weight_format, None
    if floor_of is not None:
        head = (floor_of.config.hidden_size, floor_of.config.vocab_size)
    layers = [
        _layer(shape, count, dtype, lm_head_quantization(held) if shape == head else held, device)
        for shape, count in shapes.items()
    ]
    best = max(read["best"], *(row["gb_s"] for layer in layers for row in layer["rows"]))
    measured = {
        **environment(),
        "threads": threads,
        **about,
        "dtype": held or str(dtype).removeprefix("torch."),
        "read_gb_s": read,
        "best_read_gb_s": best,
        "layers": layers,
    }
    if floor_of is not None:
        limits = floor(layers, best, head)
        measured["floor"] = {"model": floor_of.name, **limits}
    return measured


def _of_memory(device: torch.device) -> tuple[dict[str, Any], dict[str, float]]:
    """The device in words, and the best and median rate at which it reads memory, in GB/s."""
    if device.type == "cpu":
        isa = torch.backends.cpu.get_cpu_capability()
        attention = loader.available() or f"native, {loader.chosen_instruction_set()}"
        return {"torch_isa": isa, "attention": attention}, read_rates()
    peaks = measure_peaks(device)
    read = round(1000 * peaks.read_tb_s, 2)  # a median of many
    about = {"gpu": torch.cuda.get_device_name(device), "peaks": asdict(peaks)}
    return about, {"best": read, "median": read}


def layer_shapes(model: ModelConfig, dtype: torch.dtype) -> dict[tuple[int, int], int]:
    """How many matrices a model has of each shape (in, out).

    The model is built from tensors that have a shape and no memory.
    """

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    source = WeightSource((), read, dtype=dtype, device=torch.device("meta"), complete=False)
    built = build_model(model, source, max_seq_len=1)
    widths = ((layer.in_features, layer.num_weights) for layer in linears(built))
    return dict(Counter((width, num_weights // width) for width, num_weights in widths))


def floor(
    layers: Iterable[dict[str, Any]], read_gb_s: float, head: tuple[int, int] | None
) -> dict[str, float]:
    """The limits that the layers and the read bandwidth set to a model, in tokens a second.

    `head` is the shape (in, out) of the output layer, which runs on only one row of a prompt.
    """
    num_bytes, prompt_s = 0, 0.0
    for layer in layers:
        num_bytes += layer["count"] * layer["bytes"]
        if (layer["in"], layer["out"]) != head:
            prompt_s += layer["count"] * layer["rows"][-1]["us"] / 1e6 / layer["rows"][-1]["rows"]
    return {
        "bytes_per_token": num_bytes,
        "one_stream_tok_s": read_gb_s * 1e9 / num_bytes,
        "prefill_tok_s": 1 / prompt_s if prompt_s else math.inf,
    }


def _seconds(run: Callable[[], object]) -> list[float]:
    """The times of several calls, in seconds, after one that is not counted."""
    run()
    times = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return times


def reader(memory: torch.Tensor) -> Callable[[], float]:
    """A function that lets torch's threads read `memory` once and returns the rate in GB/s."""
    library = loader.library()

    def read() -> float:
        started_s = time.perf_counter()
        if isinstance(library, str):
            memory.sum()
        else:
            arguments = (memory.nbytes, torch.get_num_threads())
            library.infer_read(memory.data_ptr(), *arguments)
        return memory.nbytes / (time.perf_counter() - started_s) / 1e9

    read()  # the first one warms up
    return read


def read_rates() -> dict[str, float]:
    """The best and the median rate at which torch's threads read memory, in GB/s."""
    try:
        memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    except RuntimeError:
        message = f"the measurement needs {READ_BYTES >> 20} MiB of free memory"
        raise ConfigError("machine", message) from None
    read = reader(memory)
    rates = [read() for _ in range(_REPEATS)]
    return {"best": round(max(rates), 2), "median": round(statistics.median(rates), 2)}


def _layer(
    shape: tuple[int, int],
    count: int,
    dtype: torch.dtype,
    held: str | None,
    device: torch.device,
) -> dict[str, Any]:
    """The rates of a layer of one shape at each number of rows, as medians over rotated weights."""
    width, height = shape
    num_bytes = int(width * height * weight_bytes(held, dtype.itemsize, width))
    copies = max(2, math.ceil(ROTATED_BYTES / num_bytes))
    weight = torch.randn(height, width, device=device).mul_(width**-0.5).to(dtype)
    # A layer on a GPU holds the tensor that it was given.
    weights = (weight if device.type == "cpu" else weight.clone() for _ in range(copies))
    layers = [make_linear(tensor, quantization=held) for tensor in weights]
    measured = []
    for num_rows in ROWS:
        # Products of many rows are bound by arithmetic, so a few layers are enough.
        used = (
            layers if num_rows <= 32 else layers[: max(2, math.ceil(2e11 / num_rows / num_bytes))]
        )
        x = torch.randn(num_rows, width, device=device).to(dtype)

        def run(x: Tensor = x, used: list[Linear] = used) -> None:
            for layer in used:
                layer(x)

        seconds = statistics.median(_seconds(run)) if device.type == "cpu" else timed_us(run) / 1e6
        seconds /= len(used)
        measured.append(
            {
                "rows": num_rows,
                "us": round(seconds * 1e6, 2),
                "gflop_s": round(2 * num_rows * width * height / seconds / 1e9, 1),
                "gb_s": round(num_bytes / seconds / 1e9, 2),
            }
        )
    kind = type(layers[0]).__name__
    return {
        "in": width, "out": height, "count": count, "bytes": num_bytes, "kind": kind,
        "rows": measured,
    }  # fmt: skip
