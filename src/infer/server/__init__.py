"""The HTTP server: OpenAI's API over an `AsyncLLM`. `app.create_app` makes it, `serve.run` runs it.

Everything that can be refused is refused before the first byte; every error has OpenAI's body; a
client that leaves frees its seat at once. Knows the engine's façade, the types, the errors and the
tokenizer. Imports no torch: the engine that is handed in may bring it.
"""
