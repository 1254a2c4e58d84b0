"""The HTTP server: OpenAI's API over an `AsyncLLM`. `app.create_app` makes it, `serve.run` runs it.

A request passes `http.json_body` (bytes become JSON), `openai.schema` (a checked body),
`openai.to_engine` (the engine's requests), `openai.answers` and `openai.streaming`.
`http.error_responses` turns exceptions into answers. Everything that can be refused is refused
before the first byte of an answer, every error has OpenAI's body, and a client that leaves frees
its seat at once. The server does not import torch; only an engine in the same process does.
"""
