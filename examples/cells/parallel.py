"""Parallel completions of one prompt: its cells are computed once and shared by all sequences."""

from infer import SamplingParams
from infer.cells import Batch, Context, RowSampling, load_model, sample

PROMPT = "Once upon a time, in a small house near the river, there lived"
NUM_COMPLETIONS, NUM_TOKENS = 4, 24


def main() -> None:
    """Draw four completions with four seeds."""
    model = load_model()
    tokenizer = model.tokenizer()
    prompt = list(tokenizer.encode(PROMPT))
    context = Context(model, num_cells=256, max_seqs=NUM_COMPLETIONS, raise_on_error=True)
    context.decode(Batch.of(prompt))
    for seq in range(1, NUM_COMPLETIONS):
        context.seq_cp(0, seq)
    texts = [list(prompt) for _ in range(NUM_COMPLETIONS)]
    sampling = SamplingParams(temperature=0.8, top_p=0.95)
    logits = context.logits().repeat(NUM_COMPLETIONS, axis=0)
    for _ in range(NUM_TOKENS):
        rows = [RowSampling(tokens=t, sampling=sampling, seed=i) for i, t in enumerate(texts)]
        batch = Batch(NUM_COMPLETIONS)
        for seq, result in enumerate(sample(logits, rows)):
            texts[seq].append(result.token_id)
            batch.add(result.token_id, seq_ids=seq, logits=True)
        context.decode(batch)
        logits = context.logits()
    for tokens in texts:
        print(repr(tokenizer.decode(tokens[len(prompt) :])))
    status = context.status()
    num_tokens = sum(map(len, texts))
    print(f"{status.num_used} cells for {num_tokens} tokens, {status.num_shared} of them shared")


if __name__ == "__main__":
    main()
