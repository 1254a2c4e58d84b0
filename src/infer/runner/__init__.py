"""From a plan to sampled tokens: the tensors of a step, the cache's storage, the sampler."""
