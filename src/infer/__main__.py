"""`python -m infer` is the `infer` command."""

from __future__ import annotations

from infer.cli.entry import main

if __name__ == "__main__":
    main()
