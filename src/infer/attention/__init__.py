"""Attention over a paged cache: the layout of a step, and backends that share one contract."""
