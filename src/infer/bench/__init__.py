"""`infer bench`: planned requests, a driver that sends them, what came of it. Used by `cli`."""
