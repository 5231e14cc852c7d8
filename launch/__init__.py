"""The `apex` command: checks a run before it starts, starts it, shows it, and says how it ended."""
