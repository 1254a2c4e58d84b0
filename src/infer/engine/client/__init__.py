"""The asyncio façade: input, output, and the engine as its clients see it. No torch."""
