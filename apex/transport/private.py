"""What the ranks of a job have and nobody else: a token, and on one host a folder for their sockets."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Iterable

from apex.config import ConfigError

TOKEN_VARIABLE = "APEX_TOKEN"
_SHORTEST, _LONGEST = 16, 64  # bytes
_MAKES_ONE = f"""`export {TOKEN_VARIABLE}=$(python3 -c "import secrets; print(secrets.token_hex(16))")` makes a good one"""


def read_token(text: str) -> bytes:
    """Return the bytes of a token written in hex; raises :class:`ConfigError` where others could guess it."""
    try:
        token = bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{TOKEN_VARIABLE} is not written in hex; {_MAKES_ONE}") from None
    if not _SHORTEST <= len(token) <= _LONGEST:
        raise ConfigError(f"{TOKEN_VARIABLE} has {len(token)} bytes, not {_SHORTEST} to {_LONGEST}; {_MAKES_ONE}")
    return token


def missing_token() -> ConfigError:
    """Return the refusal of a part of a job that has no token: each part would make one of its own."""
    return ConfigError(f"{TOKEN_VARIABLE} is not set; all launchers of a job need the same token; {_MAKES_ONE}")


def check_folder(path: str) -> None:
    """Raise ValueError where another user could put a socket of theirs into the folder, or open one that is there."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{path} is no folder")
    if found.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to another user")
    if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{path} is open to other users; `chmod 700 {path}` closes it")


class Badges:
    """How the ranks of a job know each other: 33 bytes for each rank, made from the job's token.

    The badge of one rank gives neither the token nor the badge of another (HMAC, RFC 2104).
    """

    def __init__(self, token: bytes, ranks: Iterable[int]):
        # ZeroMQ itself makes names that begin with a zero byte.
        self._of = {rank: b"r" + hmac.digest(token, b"apex-mpi badge of rank %d" % rank, "sha256") for rank in ranks}

    def of(self, rank: int) -> bytes:
        """Return the badge of a rank."""
        return self._of[rank]

    def rank(self, badge: bytes) -> int | None:
        """Return the rank that a badge belongs to, or None where it is not of this job."""
        return next((rank for rank, known in self._of.items() if hmac.compare_digest(known, badge)), None)
