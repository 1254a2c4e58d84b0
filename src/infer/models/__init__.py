"""Model architectures: checkpoint configs, weights, and the equations of each decoder."""
