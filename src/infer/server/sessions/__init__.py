"""Sessions: conversations that the server stores."""

NO_SESSIONS = "off"
"""Value of the setting `sessions` for a server that keeps none."""
