"""The engine's greedy loop in 30 lines: three prompts in one batch, then a token each a step."""

from infer.cells import Batch, Context, RowSampling, load_model, sample

PROMPTS = ["Once upon a time", "One day, a little bird", "The fox said"]
NUM_TOKENS = 24


def main() -> None:
    """Continue all prompts side by side."""
    model = load_model()
    tokenizer = model.tokenizer()
    texts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    context = Context(model, num_cells=512, max_seqs=len(texts), raise_on_error=True)
    batch = Batch(512)
    for seq, tokens in enumerate(texts):
        for i, token in enumerate(tokens):
            batch.add(token, i, seq, logits=i + 1 == len(tokens))
    for _ in range(NUM_TOKENS):
        context.decode(batch)
        chosen = sample(context.logits(), [RowSampling(tokens=tokens) for tokens in texts])
        batch.clear()
        for seq, (tokens, result) in enumerate(zip(texts, chosen, strict=True)):
            tokens.append(result.token_id)
            batch.add(result.token_id, seq_ids=seq, logits=True)
    for tokens in texts:
        print(repr(tokenizer.decode(tokens)))


if __name__ == "__main__":
    main()
