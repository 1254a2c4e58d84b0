"""Sessions: conversations that the server stores."""
