"""Between the strings callers see and token ids: tokenizers, chat templates, stop strings.

`Tokenizer` is the way in. Façades, server and command line use it; the engine's core does not know
that it exists. It needs `tokenizers` and `jinja2`, and reproduces what transformers gives.
"""
