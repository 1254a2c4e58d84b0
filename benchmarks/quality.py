"""What the formats of weights cost in quality: `python benchmarks/quality.py [MODEL]`.

MODEL is a checkpoint as everywhere (default: the shipped model). The engine reads the tokens of a
text, teacher-forced, in windows. The table has for each of `--formats`: the perplexity, also
relative to float32's; the deviation of the log-probabilities of the text's tokens from float32's,
root mean square; the share of positions at which the most probable token is not float32's; the
bytes of the weights; and, with `--speed`, the tokens per second of 1 and 32 streams. The text is
quality_text.txt, which is from this repository's documentation, and for the shipped model held-out
documents of its grammar. `--peers` has other engines read the same ids (peers/README.md): llama.cpp
from the same files, where `--llamacpp-python` has `llama-cpp-python`, the others from a folder with
the same numbers, which peers/unpack_gguf.py writes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from k_quants import q4_k, q6_k

from infer import LLM, SamplingParams
from infer.config import EngineConfig
from infer.engine.build.checkpoint import find_checkpoint
from infer.engine.build.planner import plan_for
from infer.models.hub import locate
from infer.text.tokenizer import Tokenizer

sys.path += [str(Path(__file__).parent.parent / "training"), str(Path(__file__).parent / "peers")]
from files import PEERS, ours, theirs
from run import Worker

from grammar import documents

HERE = Path(__file__).parent

TEXT = HERE / "quality_text.txt"
OWN: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "blocks": {"dtype": "auto"},
}
"""The engine's own formats and the settings that choose them."""
REWRITTEN = ("f32", "q8_0", "q4_0", "q4_k")
"""Types of blocks to which a GGUF file's numbers are rounded anew, as a file that engines read."""
CACHE = "+kv8"
"""What follows the name of a format for keys and values in int8."""
SPEED_TOKENS = (128, 64)
"""Lengths of the prompts and of the answers whose speed is measured."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of the tokens of the text, in their order."""

    logprobs: np.ndarray
    """float64 [n]: of the text's own tokens."""
    best: np.ndarray
    """int64 [n]: the most probable token at each position."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    engine: str
    format: str
    perplexity: float
    relative: float
    """Perplexity / float32's - 1."""
    error: float
    """Root mean square of the log-probabilities' differences from float32's."""
    wrong: float
    """Share of positions with another most probable token than float32's."""
    num_bytes: int
    speeds: tuple[float, ...] = ()
    """Tokens per second of 1 and 32 streams; empty: not measured."""


def windows_of(model: str | None, text: Path, num_tokens: int, width: int) -> list[list[int]]:
    """The text's tokens, cut into windows of `width` scored tokens that each begin anew."""
    tokenizer = Tokenizer(find_checkpoint(model).text())
    if model is None:
        encoded = (
            tokenizer.encode(each, add_special_tokens=False, parse_special_tokens=True)
            for each in documents("heldout", 0, num_tokens)
        )
        found, left = [], num_tokens
        while left > 0:
            found.append(next(encoded)[: left + 1])
            left -= len(found[-1]) - 1
        return found
    before = tokenizer.encode("")  # BOS, if the model has one: else the first token is not scored
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    if len(ids) <= num_tokens:
        raise SystemExit(f"{text} has only {len(ids)} tokens; --tokens must be less")
    first, last = (0, num_tokens) if before else (1, num_tokens + 1)
    starts = range(first, last, width)
    return [[*before, *ids[i - first : min(i + width, last)]] for i in starts]


@contextlib.contextmanager
def settings_of(model: str | None, name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The settings of the engine for a format."""
    weights = name.removesuffix(CACHE)
    chosen: dict[str, Any] = {"model": model, "kv_cache_dtype": "int8"}
    if weights == name:
        chosen["kv_cache_dtype"] = "model"
    if weights in OWN:
        yield chosen | OWN[weights]
    else:
        with rewritten(model, weights, folder) as file:
            yield chosen | {"model": str(file)}


@contextlib.contextmanager
def rewritten(model: str | None, kind: str, folder: Path) -> Iterator[Path]:
    """A copy of a GGUF file in which the matrices are of another kind."""
    path = locate(model)[0]
    if kind not in REWRITTEN or path.suffix != ".gguf":
        known = ", ".join([*OWN, *(REWRITTEN if path.suffix == ".gguf" else ())])
        raise SystemExit(f"{kind!r} is no format of {path.name} (there are: {known})")
    target = folder / f"{path.stem}-as-{kind}.gguf"
    write_as(path, kind, target)
    try:
        yield target
    finally:
        target.unlink()


def write_as(path: Path, kind: str, target: Path) -> None:
    """Write a GGUF file's numbers in another kind, with the types that llama.cpp would choose."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            outer, *inner = field.types
            writer.add_key_value(field.name, field.contents(), outer, inner[0] if inner else None)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        chosen = kind_for(kind, tensor.name, numbers.shape)
        by_hand = {Q.Q4_K: q4_k, Q.Q6_K: q6_k}.get(chosen)
        rows = gguf.quants.quantize(numbers, chosen) if by_hand is None else by_hand(numbers)
        writer.add_tensor(tensor.name, rows, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_for(kind: str, name: str, shape: tuple[int, ...]) -> Q:
    """The type of one tensor: heads are finer, and rows that no block divides have another type."""
    if len(shape) < 2 or kind == "f32":
        return Q.F32
    is_whole = shape[-1] % 256 == 0
    if kind == "q8_0" or (name in ("token_embd.weight", "output.weight") and not is_whole):
        return Q.Q8_0
    if name in ("token_embd.weight", "output.weight"):
        return Q.Q6_K
    return Q.Q4_0 if kind == "q4_0" else Q.Q4_K if is_whole else Q.Q5_0


class Ours:
    """The engine in this process."""

    def __init__(self, model: str | None, name: str, width: int, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        settings = self._stack.enter_context(settings_of(model, name, folder))
        self.num_bytes = plan_for(EngineConfig(**settings)).weight_bytes
        config = find_checkpoint(settings["model"]).config
        self._vocab_size = config.vocab_size
        room = min(config.max_seq_len, max(width, sum(SPEED_TOKENS)) + 8)
        llm = LLM(**settings, max_seq_len=room, max_batch_size=32)
        self._llm = self._stack.enter_context(llm)

    def scores(self, windows: Sequence[Sequence[int]]) -> Scores:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        found = self._llm.generate([list(ids) for ids in windows], params, use_tqdm=False)
        each = list(chain.from_iterable(output.prompt_logprobs or () for output in found))
        return Scores(
            np.array([one.logprob for one in each]), np.array([one.top[0][0] for one in each])
        )

    def rate(self, count: int) -> float:
        """Tokens per second of so many streams, with prompts that are new each time."""
        return ours(self._llm, count, *SPEED_TOKENS, vocab_size=self._vocab_size)

    def close(self) -> None:
        self._stack.close()


def joined(answers: Sequence[dict[str, Any]]) -> Scores:
    """What a peer has said of each window."""
    return Scores(
        np.concatenate([each["logprobs"] for each in answers]),
        np.concatenate([each["best"] for each in answers]),
    )


class Llama:
    """llama.cpp with a GGUF file: peers/score_llamacpp.py, and for its speed its own program, which
    is built for this machine."""

    def __init__(self, model: str | None, name: str, given: argparse.Namespace, folder: Path):
        self._stack = contextlib.ExitStack()
        if name == "blocks":
            self._file = locate(model)[0]
        else:
            self._file = self._stack.enter_context(rewritten(model, name, folder))
        self.num_bytes = self._file.stat().st_size
        script = HERE / "peers/score_llamacpp.py"
        command = [str(given.llamacpp_python), str(script), str(self._file), str(given.window + 2)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8",
        )  # fmt: skip

    def _ask(self, **job: Any) -> Any:
        """The answer to one job of the protocol in the script."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return json.loads(line)

    def scores(self, windows: Sequence[Sequence[int]]) -> Scores:
        return joined([self._ask(score=list(ids)) for ids in windows])

    def rate(self, count: int) -> float:
        return theirs(str(self._file), count, *SPEED_TOKENS)

    def close(self) -> None:
        self._process.communicate()
        self._stack.close()


class Folder:
    """An engine that reads a folder of safetensors: its worker in peers/."""

    def __init__(self, engine: str, name: str, folder: Path, log: Path) -> None:
        """`folder`: the same numbers as those of the model (peers/unpack_gguf.py)."""
        self._worker, self._seed = Worker(f"{engine}:{name}", folder, PEERS, log), 0
        export = folder.with_name(f"{folder.name}-openvino-{name.partition('-')[0]}")
        files = export.glob("*model.bin") if engine == "openvino" else folder.glob("*.safetensors")
        self.num_bytes = sum(file.stat().st_size for file in files)

    def scores(self, windows: Sequence[Sequence[int]]) -> Scores:
        return joined([self._worker.ask({"score": list(ids)}) for ids in windows])

    def rate(self, count: int) -> float:
        self._seed += 1
        length, num_tokens = SPEED_TOKENS
        job = {"num_requests": count, "input_len": length, "output_len": num_tokens}
        return count * num_tokens / self._worker.run(job | {"seed": self._seed})

    def close(self) -> None:
        self._worker.close()


def peer(engine: str, name: str, given: argparse.Namespace, folder: Path) -> Llama | Folder:
    """Another engine with a format."""
    if engine == "llamacpp":
        return Llama(given.model, name, given, folder)
    if given.folder is None:
        raise SystemExit(f"{engine} reads no GGUF file: --folder names the same as safetensors")
    log = (given.json or Path("quality.json")).with_suffix(f".{engine}-{name}.log")
    return Folder(engine, name, given.folder.resolve(), log)


def speeds_of(engine: Ours | Llama | Folder) -> tuple[float, ...]:
    """Tokens per second of 1 and 32 streams; the best of three runs."""
    return tuple(max(engine.rate(count) for _ in range(3)) for count in (1, 32))


def row_of(engine: str, name: str, scores: Scores, exact: Scores, num_bytes: int) -> Row:
    """The line of a format, beside what float32 gives."""
    perplexity, truth = (math.exp(-each.logprobs.mean()) for each in (scores, exact))
    return Row(
        engine,
        name,
        perplexity,
        perplexity / truth - 1,
        float(np.sqrt(np.square(scores.logprobs - exact.logprobs).mean())),
        float((scores.best != exact.best).mean()),
        num_bytes,
    )


def shown(row: Row) -> str:
    """A line of the table in Markdown."""
    cells = [row.engine, row.format, f"{row.perplexity:.3f}", f"{row.relative:+.2%}",
             f"{row.error:.4f}", f"{row.wrong:.2%}", f"{row.num_bytes / 1e6:,.1f} MB"]  # fmt: skip
    return "| " + " | ".join([*cells, *(f"{speed:,.1f}" for speed in row.speeds)]) + " |"


def options() -> argparse.Namespace:
    """The program's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: the shipped model")
    formats = f"any of {', '.join([*OWN, *REWRITTEN])}; {CACHE} after a name: int8 keys and values"
    parser.add_argument("--formats", default="bfloat16,int8,int4", help=formats)
    peers = "ENGINE:FORMAT,… of llamacpp (of the same formats), openvino, vllm and hf (of peers/)"
    parser.add_argument("--peers", default="", help=peers)
    parser.add_argument("--llamacpp-python", type=Path, help="one with llama-cpp-python")
    parser.add_argument("--folder", type=Path, help="the model for those without GGUF")
    parser.add_argument("--tokens", type=int, default=4000, help="default: 4000")
    parser.add_argument("--window", type=int, default=500, help="tokens that a window scores")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file instead of the text")
    parser.add_argument("--speed", action="store_true", help="measure tokens per second too")
    parser.add_argument("--json", type=Path, help="write the rows to a file, too")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    given = options()
    windows = windows_of(given.model, given.text, given.tokens, given.window)
    width, count = max(map(len, windows)), sum(len(ids) - 1 for ids in windows)
    print(f"{count:,} tokens in windows of at most {width}")
    head = ["engine", "format", "perplexity", "to float32", "log-prob. error", "other best token"]
    head += ["weights", *(["tok/s, 1", "tok/s, 32"] if given.speed else [])]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    rows: list[Row] = []
    exact: Scores | None = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def measure(engine: str, name: str, make: Callable[[], Ours | Llama | Folder]) -> None:
            nonlocal exact
            runner = make()
            try:
                scores = runner.scores(windows)
                exact = scores if exact is None else exact
                row = row_of(engine, name, scores, exact, runner.num_bytes)
                if given.speed:
                    row = Row(**asdict(row) | {"speeds": speeds_of(runner)})
            finally:
                runner.close()
            rows.append(row)
            print(shown(row), flush=True)

        for each in dict.fromkeys(["float32", *given.formats.split(",")]):
            measure("ours", each, functools.partial(Ours, given.model, each, width, folder))
        for each in filter(None, given.peers.split(",")):
            engine, _, variant = each.partition(":")
            measure(engine, variant, functools.partial(peer, engine, variant, given, folder))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
