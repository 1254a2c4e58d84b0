"""From a configuration to an engine: checkpoint, hardware, memory plan, assembly."""
