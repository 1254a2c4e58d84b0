"""Beam search: beams are sequences, and a beam that branches is a copy that shares its cells."""

from dataclasses import dataclass

import numpy as np

from infer.cells import Batch, Context, load_model

PROMPT = "The little girl was very"
WIDTH, NUM_TOKENS = 4, 16


@dataclass
class Beam:
    """One hypothesis."""

    seq: int
    tokens: list[int]
    score: float


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of each row."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def main() -> None:
    """Find the most probable continuations."""
    model = load_model()
    tokenizer = model.tokenizer()
    prompt = list(tokenizer.encode(PROMPT))
    # Survivors get other sequences than their parents, so there are twice as many.
    context = Context(model, num_cells=512, max_seqs=2 * WIDTH, raise_on_error=True)
    context.decode(Batch.of(prompt))
    beams = [Beam(0, [], 0.0)]
    for step in range(NUM_TOKENS):
        scores = log_softmax(context.logits()) + np.array([[beam.score] for beam in beams])
        best = np.argsort(-scores, axis=None, kind="stable")[:WIDTH]
        free = WIDTH * ((step + 1) % 2)
        survivors = []
        for i, (row, token) in enumerate(zip(*np.unravel_index(best, scores.shape), strict=True)):
            parent = beams[row]
            context.seq_cp(parent.seq, free + i)
            score = float(scores[row, token])
            survivors.append(Beam(free + i, [*parent.tokens, int(token)], score))
        for beam in beams:
            context.seq_rm(beam.seq)
        beams, batch = survivors, Batch(WIDTH)
        for beam in beams:
            batch.add(beam.tokens[-1], seq_ids=beam.seq, logits=True)
        context.decode(batch)
    for beam in beams:
        print(f"{beam.score:.3f} {tokenizer.decode(beam.tokens)!r}")
    print(f"{context.status().num_used} cells in use")


if __name__ == "__main__":
    main()
