"""Making an engine from a configuration: checkpoint, hardware, memory plan, assembly."""
