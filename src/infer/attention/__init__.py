"""Attention over a paged KV cache: the layout of a step, and the backends that compute it."""
