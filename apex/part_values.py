"""What each part of a checkpoint holds, so that one which is whole, but not of this program, is refused in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY

Check = Callable[[Any], bool]
_ANSWERING = (ACTOR, EVALUATOR)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _list_of(is_right: Check, length: int | None = None) -> Check:
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(is_right, value))


def _table_of(is_right: Check) -> Check:
    """Return the check of a dictionary with numbers as its keys, in decimal."""
    return lambda value: isinstance(value, dict) and all(key.isdecimal() and is_right(held) for key, held in value.items())


def _is_state(value: object) -> bool:
    counters = value.get("counters") if isinstance(value, dict) else None
    return isinstance(counters, dict) and all(map(_is_number, counters.values()))


def _are_answers(value: object) -> bool:
    are_states = _table_of(_is_state)
    return isinstance(value, dict) and all(role in _ANSWERING and are_states(held) for role, held in value.items())


def _are_counters(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_file(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and _is_count(value[1])


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(is_right(value.get(name)) for name, is_right in _OF_RECORD.items())


_OF_RECORD: dict[str, Check] = {
    "wall_s": _is_amount, "eval_return": _is_number, "eval_episodes": _is_amount, "evaluations": _is_amount,
}  # fmt: skip
_OF_LEARNER: dict[str, Check] = {
    "record": _is_record, "answers": _are_answers, "counters": _are_counters, "smallest": _list_of(_is_number),
    "param_version": _is_count, "turn": _is_count, "requested": _is_count,
}  # fmt: skip
_OF_REPLAY: dict[str, Check] = {
    **dict.fromkeys(("inserted", "sampled", "stale_updates", "landing", "places", "generation", "open_requests"), _is_count),
    "slots": lambda value: _is_count(value) and value > 0, "strata": lambda value: type(value) is int and 0 <= value < 2**64,
    "limiter": _list_of(_is_count, 2), "counters": _are_counters,
}  # fmt: skip
_OF_RING: dict[str, Check] = {"segments": _table_of(_is_file)}
_ARRAYS = {"mass": "f", "generation": "i", "count": "i", "segment": "i", "row": "i"}


def fault(role: str, values: Any, has_ring: bool) -> str | None:
    """Return the name of the first value of a part of ``role`` that is missing or of another kind, or None."""
    checks = {LEARNER: _OF_LEARNER, REPLAY: _OF_REPLAY | (_OF_RING if has_ring else {})}.get(role, {})
    if not isinstance(values, dict):
        return "values"
    return next((name for name, is_right in checks.items() if name not in values or not is_right(values[name])), None)


def fault_of_arrays(values: dict, arrays: dict[str, np.ndarray]) -> str | None:
    """Return the first array of a replay part, whose ``values`` are right, that does not fit them, or None.

    mass is float64[slots]; generation, count, segment and row are whole numbers, one a place of the ring.
    """
    wrong = next((name for name, kind in _ARRAYS.items() if name not in arrays or arrays[name].dtype.kind != kind), None)
    if wrong is not None:
        return wrong
    places = arrays["count"].size
    shapes = {name: (places,) for name in _ARRAYS} | {"mass": (values["slots"],)}
    wrong = next((name for name, shape in shapes.items() if arrays[name].shape != shape), None)
    wrong = wrong or next((name for name in ("generation", "count") if arrays[name].min(initial=0) < 0), None)
    if wrong is None and (values["landing"] >= places or values["slots"] % places):
        wrong = "count"
    return wrong
