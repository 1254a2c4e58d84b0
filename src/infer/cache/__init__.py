"""Which pages of the KV cache belong to whom: integers only, no tensors, stdlib only."""
