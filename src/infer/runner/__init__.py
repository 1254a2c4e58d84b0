"""Executing a plan: the tensors of a step, the KV cache's storage, and the sampler."""
