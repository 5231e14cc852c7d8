"""What the ranks of a job have and nobody else: a token, and on one host a folder for their sockets."""

from __future__ import annotations

import os
import stat

from apex import variables
from apex.config import ConfigError

_SHORTEST, _LONGEST = 16, 64  # bytes
_COMMAND = 'python3 -c "import secrets; print(secrets.token_hex(16))"'
_MAKES_ONE = f"`export {variables.TOKEN}=$({_COMMAND})` makes a good one"


def read_token(text: str) -> bytes:
    """Return the bytes of a token written in hex; raises :class:`ConfigError` where others could guess it."""
    try:
        token = bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{variables.TOKEN} is not written in hex; {_MAKES_ONE}") from None
    if not _SHORTEST <= len(token) <= _LONGEST:
        raise ConfigError(
            f"{variables.TOKEN} has {len(token)} bytes, not {_SHORTEST} to {_LONGEST}; {_MAKES_ONE}"
        )
    return token


def given_token() -> bytes | None:
    """Return the token in the environment, or None; raises :class:`ConfigError` as :func:`read_token`."""
    given = os.environ.get(variables.TOKEN, "")
    return read_token(given) if given else None


def missing_token() -> ConfigError:
    """Return the refusal of a part of a job that has no token: each part would make one of its own."""
    return ConfigError(
        f"{variables.TOKEN} is not set; all launchers of a job need the same token; {_MAKES_ONE}"
    )


def check_folder(path: str) -> None:
    """Raise ValueError where another user could put a socket into the folder, or open one there."""
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
