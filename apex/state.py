"""States: what an object returns from ``state_dict`` and takes in ``load_state_dict``.

A state is a dictionary with text as its keys. A leaf is a NumPy array or what JSON can hold; a dictionary inside is
a state again. Arrays are copies, so that a state does not change while a thread writes it. ``load_state_dict``
raises ValueError, TypeError or KeyError for a state that does not fit; :class:`apex.checkpoint.Reader` turns that
into a refusal of one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Check = Callable[[Any], bool]


def split(state: Mapping, path: str = "") -> tuple[dict, dict[str, np.ndarray]]:
    """Return the plain values of a state, nested as they were, and its arrays by path (``"intake/pool"``)."""
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
    """Put arrays back where ``split`` took them from; changes and returns ``values``. Raises TypeError where one does not fit."""
    for path, array in arrays.items():
        *folders, name = path.split("/")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = array
    return values


def fill(array: np.ndarray, state: Mapping, name: str) -> None:
    """Copy ``state[name]`` into ``array``; raises ValueError where its dtype or shape is another, KeyError where there is none."""
    held = state[name]
    if not isinstance(held, np.ndarray) or (held.dtype, held.shape) != (array.dtype, array.shape):
        raise ValueError(f"'{name}' is no {array.dtype}{list(array.shape)}")
    array[...] = held


def require(state: object, checks: Mapping[str, Check]) -> None:
    """Raise ValueError naming the first value of ``state`` that is missing or of another kind."""
    if not isinstance(state, dict):
        raise ValueError("no usable 'values'")
    wrong = next((name for name, is_right in checks.items() if name not in state or not is_right(state[name])), None)
    if wrong is not None:
        raise ValueError(f"no usable '{wrong}'")


def fits(checks: Mapping[str, Check]) -> Check:
    """Return the check of a state inside another, see :func:`require`."""
    return lambda value: isinstance(value, dict) and all(name in value and check(value[name]) for name, check in checks.items())


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
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(is_right, value))


def table_of(is_right: Check) -> Check:
    """Return the check of a dictionary with numbers as its keys, in decimal."""
    return lambda value: isinstance(value, dict) and all(key.isdecimal() and is_right(held) for key, held in value.items())
