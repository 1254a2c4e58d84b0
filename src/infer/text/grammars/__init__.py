"""Grammars: the compiler, and the check of a grammar before its request is accepted."""
