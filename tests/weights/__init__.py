"""Tests on published checkpoints, which ordinary packages of the Python index carry."""
