"""Anthropic's API: messages, as a translation onto chats."""
