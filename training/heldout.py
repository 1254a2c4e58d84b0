"""Write held-out text: `python training/heldout.py --count 200 > heldout.txt`.

Owns nothing but this command: the documents come from the seed range of grammar.py that
training never touches, so quality (perplexity) can be measured on them later, with any
engine. One JSON string per line; the markup of special tokens is part of the text.
"""

from __future__ import annotations

import argparse
import json

from grammar import documents


def main() -> None:
    """Print the documents."""
    parser = argparse.ArgumentParser(description="Write held-out documents, one per line.")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    for text in documents("heldout", options.start, options.count):
        print(json.dumps(text, ensure_ascii=False))


if __name__ == "__main__":
    main()
