"""The engine: a core that steps, façades around it, and the one place that puts it together."""
