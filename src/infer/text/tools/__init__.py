"""Tool calls: the formats in which models write them, and how models are shown tools."""
