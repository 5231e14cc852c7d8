"""Every random stream of a run, from ``run.seed``: one for each role and index, reproducible."""

from __future__ import annotations

import numpy as np

_STREAMS = ("learner", "replay", "actor", "environments")


def generator(seed: int, stream: str, index: int = 0, life: int = 0) -> np.random.Generator:
    """Return the generator of a stream (``learner``, ``replay``, ``actor``), index and life."""
    return np.random.default_rng(_sequence(seed, stream, index, life))


def integer(seed: int, stream: str, index: int = 0, attempt: int = 0) -> int:
    """Return one integer in [0, 2^31) for a stream: the seed of a library with a generator of its own."""
    return int(_sequence(seed, stream, index, attempt).generate_state(1)[0] >> 1)


def state_dict(rng: np.random.Generator) -> dict:
    """Return the state of a generator of this module as plain numbers."""
    state = rng.bit_generator.state
    return {**state["state"], "has_uint32": state["has_uint32"], "uinteger": state["uinteger"]}


def load_state_dict(rng: np.random.Generator, state: dict) -> None:
    """Restore a generator from ``state_dict``. Raises as NumPy does for a wrong state."""
    inner = {"state": state["state"], "inc": state["inc"]}
    rest = {"has_uint32": state["has_uint32"], "uinteger": state["uinteger"]}
    rng.bit_generator.state = {**rng.bit_generator.state, "state": inner, **rest}


def environment_seed(seed: int, first_environment: int, resumed_at: int = 0, attempt: int = 0) -> int:
    """Return the seed of an actor's first environment; environment i of the run gets ``base + i``.

    ``resumed_at``, learner steps, gives a run that goes on other episodes than those it began with;
    ``attempt`` does the same for environments that are made anew because they failed.

    Consecutive seeds from one hashed base keep all environments of a run apart (an actor seeds its
    vector with s, s+1, ...) and runs with neighbouring seeds apart from each other.
    """
    base = integer(seed, "environments", resumed_at, attempt) >> 1
    return base + first_environment


def _sequence(seed: int, stream: str, index: int, attempt: int = 0) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, _STREAMS.index(stream), index, *([attempt] if attempt else [])])
