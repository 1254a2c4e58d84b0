"""Model architectures: what a checkpoint says, its tensors, and the equations."""
