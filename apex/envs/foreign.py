"""What environments raise is told in one line: their code is not ours and may raise anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from apex.config import ConfigError, EnvConfig

T = TypeVar("T")
_MOST_CHARACTERS = 300


class Failed(NamedTuple):
    """A call raised ``error``."""

    error: BaseException


@contextlib.contextmanager
def named(env: EnvConfig, what: str = "cannot be made") -> Iterator[None]:
    """Turn every exception of the environment's code into a :class:`ConfigError` that names ``env.id``."""
    try:
        yield
    except ConfigError as refusal:
        if str(refusal).startswith("env."):
            raise
        raise ConfigError(f"env.id = '{env.id}': {refusal}") from refusal
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and the panics of extension modules are no Exception
        raise ConfigError(f"env.id = '{env.id}' {what}: {in_one_line(error)}") from error


def attempt(call: Callable[[], T]) -> T | Failed:
    """Return the result of a call into an environment's code, or what it raised; Ctrl-C passes."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above
        return Failed(error)


def in_one_line(error: BaseException) -> str:
    """Return the type and the text of ``error``, at most some 300 characters, in one line."""
    try:
        text = "".join(map(_shown, " ".join(str(error).split())))
    except Exception:  # its text is made by code that is not ours either
        text = ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _shown(character: str) -> str:
    """Return a character as a terminal may be given it: control characters are escaped."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()
