"""The asyncio façade of an engine, with its processing of input and output; no torch."""
