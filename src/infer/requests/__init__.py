"""The state of each request, as those see it who are not its engine."""
