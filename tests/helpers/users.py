"""Another user, and what a folder holds."""

import os

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a second user is needed, which only root can be")


def names_below(folder):
    """Return every path below, with what it leads to."""
    return sorted(
        (str(path.relative_to(folder)), path.is_file() and path.read_bytes()) for path in folder.rglob("*")
    )
