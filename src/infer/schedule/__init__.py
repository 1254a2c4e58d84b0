"""What runs in the next step: integers only, no tensors, no text, no clock of its own."""
