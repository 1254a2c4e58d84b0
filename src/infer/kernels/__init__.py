"""Tensor operations by own kernels, each with an implementation in torch for other machines."""
