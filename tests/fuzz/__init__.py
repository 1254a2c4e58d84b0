"""Fuzzing of a server and of its parts; each program also runs for hours by itself."""
