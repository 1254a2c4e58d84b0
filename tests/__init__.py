"""Tests of `infer`, one folder for each room of the package."""
