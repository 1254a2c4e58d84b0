"""Deciding what the next step computes, with integers only: no tensors, no text, no clock."""
