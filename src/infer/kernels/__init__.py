"""Tensor operations that are worth more than a call to torch; each says what it falls back to."""
