"""Conversations that the server keeps."""
