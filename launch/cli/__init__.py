"""The `apex` command."""
