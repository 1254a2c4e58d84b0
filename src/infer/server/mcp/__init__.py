"""A client of MCP servers (Model Context Protocol), for the page."""
