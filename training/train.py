"""Train the model that ships with the package: `python training/train.py --out FOLDER`.

Owns the whole run: tokenizer, training on generated text, held-out loss, twenty unselected
samples, evaluation, model card. A folder is always replaced as a whole, so that readers of
it never see half a checkpoint. The text is in grammar.py, the network in model.py, the
measurements in evaluate.py, the card in card.py.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from card import Run, write_card
from evaluate import evaluate
from grammar import BEGIN, END, documents
from model import Llama, Shape
from packing import batches, endless_batches
from tokenizer import build_tokenizer, write_tokenizer

HELD_OUT_DOCUMENTS = 1000
TOKENIZER_DOCUMENTS = 20_000
WARM_UP = 120
FLAT = 0.3
"""The share of the run at the highest learning rate."""
SAVE_EVERY = 250
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "model.safetensors", "README.md")  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    out: Path
    steps: int
    minutes: float
    rate: float
    seed: int
    threads: int
    state: Path | None
    note: str


def learning_rate(step: int, done: float, options: Options) -> float:
    """Return the rate: a linear warm-up, then flat, then half a cosine down to almost nothing."""
    if step < WARM_UP:
        return options.rate * (step + 1) / WARM_UP
    decayed = max(0.0, (done - FLAT) / (1 - FLAT))
    return options.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * decayed)))


def make_optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for all else.

    Muon needs about half the tokens of AdamW here; on a CPU tokens are what costs.
    """
    inner = [weight for name, weight in model.named_parameters()
             if weight.dim() == 2 and name.startswith("layers")]  # fmt: skip
    known = {id(weight) for weight in inner}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    return [
        torch.optim.Muon(inner, lr=0.0, weight_decay=0.05, momentum=0.95,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0, weight_decay=0.0, betas=(0.9, 0.97), fused=True),
    ]  # fmt: skip


class Trainer:
    """A model, its compiled loss, and the rotations for each row length."""

    def __init__(self, shape: Shape) -> None:
        self.model = Llama(shape)
        self._loss = torch.compile(self.model, dynamic=False)
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        length = tokens.shape[1]
        if length not in self._rotations:
            self._rotations[length] = self.model.rotations(length)
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = self._loss(tokens, targets, *self._rotations[length])
        return result


def held_out_loss(trainer: Trainer, tokenizer: Tokenizer) -> float:
    """Return the mean loss over the held-out documents, in nats per token."""
    texts = list(documents("heldout", 0, HELD_OUT_DOCUMENTS))
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, targets in batches(tokenizer, texts, "heldout"):
            known = int((targets >= 0).sum())
            total += float(trainer.loss(tokens, targets)) * known
            count += known
    return total / count


def publish(model: Llama, tokenizer: Tokenizer, out: Path, card: str | None = None) -> None:
    """Write the checkpoint to a folder inside, then move each file into place."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as name:
        folder = Path(name)
        write_tokenizer(tokenizer, folder, model.shape.positions)
        config = model.shape.config(
            tokenizer.encode(BEGIN, add_special_tokens=False).ids[0],
            tokenizer.encode(END, add_special_tokens=False).ids[0],
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(model.checkpoint(), folder / "model.safetensors", metadata={"format": "pt"})
        if card is not None:
            (folder / "README.md").write_text(card, encoding="utf-8")
        for file in FILES:
            if (folder / file).exists():
                (folder / file).chmod(0o644)
                shutil.move(folder / file, out / file)


@dataclass
class Progress:
    """How far a run is, over all its sittings."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save_state(
    file: Path, progress: Progress, model: Llama, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Write all that a later sitting needs to go on."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    part = file.with_suffix(".part")
    torch.save({"progress": asdict(progress), "model": model.state_dict(), "states": states}, part)
    part.replace(file)


def load_state(file: Path, model: Llama, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Read what save_state wrote."""
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["states"], strict=True):
        optimizer.load_state_dict(state)
    return Progress(**saved["progress"])


def train(trainer: Trainer, tokenizer: Tokenizer, options: Options) -> Progress:
    """Run until the steps or the minutes are used up; return what was done."""
    optimizers = make_optimizers(trainer.model)
    progress = Progress()
    if options.state is not None and options.state.exists():
        progress = load_state(options.state, trainer.model, optimizers)
    started = time.monotonic() - progress.seconds
    for tokens, targets in islice(endless_batches(tokenizer), progress.step, None):
        progress.seconds = time.monotonic() - started
        done = max(progress.step / options.steps, progress.seconds / 60 / options.minutes)
        if done >= 1:
            break
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(progress.step, done, options)
        loss = trainer.loss(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        progress.step += 1
        progress.tokens += int((targets >= 0).sum())
        if progress.step % 40 == 0:
            print(f"step {progress.step} ({done:.1%}) loss {loss.item():.4f} "
                  f"tokens {progress.tokens}", flush=True)  # fmt: skip
        if options.state is not None and progress.step % SAVE_EVERY == 0:
            save_state(options.state, progress, trainer.model, optimizers)
    return progress


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model of infer.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=60, help="stop after this time")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--state", type=Path, help="file to save the state to and go on from")
    parser.add_argument("--note", default="", help="what the model card should say as well")
    found = parser.parse_args()
    return Options(found.out, found.steps, found.minutes, found.rate, found.seed, found.threads,
                   found.state, found.note)  # fmt: skip


def main() -> None:
    """Do everything."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    shape = Shape()
    tokenizer = build_tokenizer(documents("train", 0, TOKENIZER_DOCUMENTS), shape.vocab)
    trainer = Trainer(shape)
    progress = train(trainer, tokenizer, options)
    loss = held_out_loss(trainer, tokenizer)
    print(f"held-out loss {loss:.4f} nats per token", flush=True)
    publish(trainer.model, tokenizer, options.out)
    run = Run(
        parameters=sum(weight.numel() for weight in trainer.model.parameters()),
        steps=progress.step, tokens=progress.tokens,
        seconds=progress.seconds, loss=loss, note=options.note,
        command=f"python training/train.py --out {options.out} --steps {options.steps} "
        f"--minutes {options.minutes} --rate {options.rate} --seed {options.seed} "
        f"--threads {options.threads}",
    )  # fmt: skip
    report = evaluate(options.out)
    publish(trainer.model, tokenizer, options.out, write_card(run, report))


if __name__ == "__main__":
    main()
