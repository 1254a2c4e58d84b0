"""What happened to requests: traces, metrics, logs, spans."""
