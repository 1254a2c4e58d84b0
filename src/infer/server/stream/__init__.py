"""Streaming answers: rendering of events (`chunks`, `events`), their framing (`sse`), delivery.

`delivery` owns the life of a streamed answer and asks a renderer what to write; the renderers hold
no engine and no socket.
"""
