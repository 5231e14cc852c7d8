"""Shared vocabulary of the Ape-X training system; imports no other folder."""

__version__ = "0.1.0"
