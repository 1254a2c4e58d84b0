"""Tool calls: the formats in which models write them, and the description of tools in prompts."""
