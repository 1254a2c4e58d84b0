"""`python -m infer.server --model …` is `infer serve --model …`, for process managers."""

from __future__ import annotations

import sys

from infer.cli.entry import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
