"""Texts of strangers: templates, grammars and patterns, in processes that may die of them."""
