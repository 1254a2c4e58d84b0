"""API keys, their limits, and what tenants share."""
