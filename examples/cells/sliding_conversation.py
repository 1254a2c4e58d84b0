"""A story without end in 64 cells: when they are full, the middle is dropped and the gap is closed.

The beginning stays (`KEEP` tokens), the oldest half of the rest is removed, and what follows moves
forward: its keys are rotated to the new positions, and nothing is computed again.
"""

from infer import SamplingParams
from infer.cells import Batch, Context, DecodeStatus, RowSampling, load_model, sample

PROMPT = "Once upon a time there was a small fox who"
NUM_CELLS, KEEP, NUM_TOKENS = 64, 12, 160


def main() -> None:
    """Generate more than twice as many tokens as there are cells."""
    model = load_model()
    tokenizer = model.tokenizer()
    tokens = list(tokenizer.encode(PROMPT))
    num_prompt, num_slides = len(tokens), 0
    context = Context(model, num_cells=NUM_CELLS)
    context.decode(Batch.of(tokens))
    sampling = SamplingParams(temperature=0.7, top_p=0.9)
    while len(tokens) < num_prompt + NUM_TOKENS:
        row = RowSampling(tokens=tokens, sampling=sampling, seed=3)
        tokens.append(sample(context.logits(), [row])[0].token_id)
        while context.decode(Batch.of(tokens[-1:])) is DecodeStatus.NO_FREE_CELLS:
            dropped = (context.seq_pos_max(0) + 1 - KEEP) // 2
            context.seq_rm(0, KEEP, KEEP + dropped)
            context.seq_add(0, KEEP + dropped, -1, -dropped)
            num_slides += 1
    print(repr(tokenizer.decode(tokens)))
    print(f"{len(tokens)} tokens in {NUM_CELLS} cells, {num_slides} slides")


if __name__ == "__main__":
    main()
