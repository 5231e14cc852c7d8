"""The error for what a user asked for and cannot get."""

from __future__ import annotations


class ConfigError(ValueError):
    """A preset, field or value that cannot be used; the message is one line for the user."""
