"""Engines that may die: how each is reached, several as one, and what outlives any of them."""
