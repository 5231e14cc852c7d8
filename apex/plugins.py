"""Implementations that are found by name: each is a module of a package; no list names them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterable
from types import ModuleType

from apex.config import ConfigError, nearest


def names(path: Iterable[str], others: Collection[str] = ()) -> list[str]:
    """Return the implementations in a package's ``__path__``: modules but for ``_private`` and ``others``."""
    found = (module.name for module in pkgutil.iter_modules(path))
    return sorted(name for name in found if not name.startswith("_") and name not in others)


def load(package: str, name: str, known: Collection[str], refusal: str) -> ModuleType:
    """Return the module of an implementation.

    Raises :class:`ConfigError`, which begins with ``refusal``, for a name that is not ``known``, and
    ModuleNotFoundError where the module needs a package that is missing.
    """
    if name not in known:
        raise ConfigError(f"{refusal}; {nearest(name, known)}")
    return importlib.import_module(f"{package}.{name}")
