"""An engine in a process of its own, started again whenever it dies."""
