"""Grammars: their compiler, and how a grammar is tried before it is accepted."""
