"""Starts and follows the processes of a run."""
