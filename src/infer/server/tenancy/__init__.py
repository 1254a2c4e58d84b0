"""API keys, their limits, and prefixes that they share."""
