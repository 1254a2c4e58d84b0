"""Conversion between text and token ids: tokenizers, chat templates, stop strings, tool calls.

`Tokenizer` is the main class. The façades, the server and the command line use it; the engine's
core works on token ids only. It uses `tokenizers` and `jinja2`, and gives the same results as
transformers.
"""
