"""States: what an object returns from ``state_dict`` and takes in ``load_state_dict``.

A state is a dictionary with text as keys. A leaf is a NumPy array or what JSON can hold; a dictionary inside
is a state again. Arrays are copies, so that a state does not change while a thread writes it.
``load_state_dict`` raises ValueError, TypeError or KeyError for a state that does not fit.
:class:`apex.checkpoint.Reader` turns that into one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Check = Callable[[Any], bool]
Checks = Mapping[str, "Check | Checks"]


class Unfit(ValueError):
    """A state of another program or configuration; the message names the value."""


def split(state: Mapping, path: str = "") -> tuple[dict, dict[str, np.ndarray]]:
    """Return the plain values of a state, nested as before, and its arrays by path (``"intake/pool"``)."""
    values, arrays = {}, {}
    for name, held in state.items():
        if isinstance(held, np.ndarray):
            arrays[path + name] = held
        elif isinstance(held, dict):
            values[name], inside = split(held, f"{path}{name}/")
            arrays |= inside
        else:
            values[name] = held
    return values, arrays


def join(values: dict, arrays: Mapping[str, np.ndarray]) -> dict:
    """Put arrays back where ``split`` found them; change and return ``values``. May raise TypeError."""
    for path, array in arrays.items():
        *folders, name = path.split("/")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = array
    return values


def fill(array: np.ndarray, state: Mapping, name: str) -> None:
    """Copy ``state[name]`` into ``array``; raises :class:`Unfit` unless it has the same dtype and shape."""
    held = state.get(name)
    if not isinstance(held, np.ndarray) or (held.dtype, held.shape) != (array.dtype, array.shape):
        raise Unfit(f"no usable '{name}', {array.dtype}{list(array.shape)}")
    array[...] = held


def require(state: Any, checks: Checks, path: str = "") -> None:
    """Raise :class:`Unfit` naming, by path, the first value of ``state`` that is missing or of another kind.

    ``checks`` is name -> check, or for a state inside a dictionary again.
    """
    if not isinstance(state, dict):
        raise Unfit(f"no usable '{path[:-1] or 'values'}'")
    for name, check in checks.items():
        if isinstance(check, Mapping):
            require(state.get(name), check, f"{path}{name}/")
        elif name not in state or not check(state[name]):
            raise Unfit(f"no usable '{path}{name}'")


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 that fits into 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def is_word(value: Any) -> bool:
    """Whether it is a whole number of 64 bits with a sign."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_number(value: Any) -> bool:
    """Whether it is a number, infinities and NaN included."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def is_amount(value: Any) -> bool:
    """Whether it is a finite number from 0."""
    return is_number(value) and 0 <= value < math.inf


def list_of(is_right: Check, length: int | None = None) -> Check:
    """Return the check of a list, of ``length`` items where that is given."""
    return lambda held: isinstance(held, list) and length in (None, len(held)) and all(map(is_right, held))


def table_of(is_right: Check) -> Check:
    """Return the check of a dictionary with numbers as its keys, in decimal."""
    return lambda held: (
        isinstance(held, dict) and all(map(str.isdecimal, held)) and all(map(is_right, held.values()))
    )


def are_numbers(value: Any) -> bool:
    """Whether it is a table of text -> number, such as counters are."""
    return isinstance(value, dict) and all(map(is_number, value.values()))
