"""The HTTP server: OpenAI's API over an `AsyncLLM`. `app.create_app` makes it, `serve.run` runs it.

A request passes `body` (bytes → JSON), `validation`, `wire` and `inert` (→ model), `intake` (→ the
engine's requests), `answer` and `stream`; `failures` tells what went wrong. Everything that can be
refused is refused before the first byte; every error has OpenAI's body; a client that leaves frees
its seat at once. Imports no torch: the engine that is handed in may bring it.
"""
