"""A token tree verified in one pass: greedy decoding that computes several guesses at once.

Guesses are the tokens that have followed the same token before, in the text so far. Each leaf of
the tree is a sequence, and an inner node belongs to the sequences of all its leaves. The path that
the model agrees with is kept, and the other leaves are removed.
"""

from itertools import pairwise

from infer.cells import Batch, Context, load_model

PROMPT = (
    'One day, a little fox met a big bear. The little fox said, "Hello, big bear!" The big bear'
    ' said, "Hello, little fox!" The little fox said, "'
)
DEPTH, BRANCHES, NUM_TOKENS = 3, 2, 60
Node = tuple[int, list["Node"]]


def guesses(tokens: list[int], token: int, depth: int) -> list[Node]:
    """Trees of the tokens that have followed `token`, the latest first."""
    if not depth:
        return []
    followed = [b for a, b in pairwise(tokens) if a == token]
    distinct = list(dict.fromkeys(reversed(followed)))[:BRANCHES]
    return [(each, guesses(tokens, each, depth - 1)) for each in distinct]


def leaves_of(node: Node) -> int:
    """Number of leaves."""
    return sum(map(leaves_of, node[1])) or 1


def main() -> None:
    """Decode with trees; the tokens are those of plain greedy decoding."""
    model = load_model()
    tokenizer = model.tokenizer()
    tokens = list(tokenizer.encode(PROMPT))
    num_prompt = len(tokens)
    max_seqs = 1 + BRANCHES**DEPTH
    context = Context(model, num_cells=256, max_seqs=max_seqs, raise_on_error=True)
    context.decode(Batch.of(tokens))
    tokens.append(int(context.logits_ith(-1).argmax()))
    num_passes = 1
    while len(tokens) < num_prompt + NUM_TOKENS:
        root: Node = (tokens[-1], guesses(tokens, tokens[-1], DEPTH))
        batch, children = Batch(64), dict[int, dict[int, int]]()
        leaf_of: dict[int, int] = {}

        def grow(node: Node, pos: int, first: int, parent: int) -> None:
            seqs = range(first, first + leaves_of(node))
            index = batch.add(node[0], pos, seqs, logits=True)  # noqa: B023
            children.setdefault(parent, {})[node[0]] = index  # noqa: B023
            leaf_of[index] = first  # noqa: B023
            for child in node[1]:
                grow(child, pos + 1, first, index)
                first += leaves_of(child)

        for leaf in range(1, 1 + leaves_of(root)):
            context.seq_cp(0, leaf)
        grow(root, len(tokens) - 1, 1, -1)
        context.decode(batch)
        num_passes += 1
        node, kept = children[-1][root[0]], 1
        while True:
            tokens.append(int(context.logits_ith(node).argmax()))
            following = children.get(node, {}).get(tokens[-1])
            if following is None:
                break
            node, kept = following, kept + 1
        start = context.seq_pos_max(0) + 1
        context.seq_cp(leaf_of[node], 0, start, start + kept)
        context.seq_keep(0)
    print(repr(tokenizer.decode(tokens[: num_prompt + NUM_TOKENS])))
    print(f"{len(tokens) - num_prompt} tokens in {num_passes} passes")


if __name__ == "__main__":
    main()
