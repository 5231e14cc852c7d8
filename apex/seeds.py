"""Every random stream of a run, derived from ``run.seed``: different for each role and index, reproducible."""

from __future__ import annotations

import numpy as np

_STREAMS = ("learner", "replay", "actor", "environments")


def generator(seed: int, stream: str, index: int = 0) -> np.random.Generator:
    """Return the generator of one stream (``learner``, ``replay`` or ``actor``) and role index."""
    return np.random.default_rng(_sequence(seed, stream, index))


def integer(seed: int, stream: str, index: int = 0) -> int:
    """Return one integer in [0, 2^31) for a stream: the seed of a library with a generator of its own."""
    return int(_sequence(seed, stream, index).generate_state(1)[0] >> 1)


def environment_seed(seed: int, first_environment: int, attempt: int = 0) -> int:
    """Return the seed of an actor's first environment; environment i of the run gets ``base + i``.

    Another base is taken for each ``attempt`` at making environments that have failed.

    Consecutive seeds from one hashed base keep all environments of a run apart (an actor seeds its
    vector with s, s+1, ...) and runs with neighbouring seeds apart from each other.
    """
    base = integer(seed, "environments", attempt) >> 1
    return base + first_environment


def _sequence(seed: int, stream: str, index: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, _STREAMS.index(stream), index])
