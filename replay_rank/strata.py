"""Stratified targets of a draw, and their random stream."""

from __future__ import annotations

import numpy as np

from apex.state import require

STATE_DTYPE = np.dtype(np.uint64)
STATE = {"state": lambda value: type(value) is int and 0 <= value < 2**64}
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ODD = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


class Strata:
    """One uniform draw from each of k equal strata of the total mass (Schaul et al. 2016, appendix B.2.1).

    The stream is SplitMix64 (Steele et al. 2014): the n-th number is a hash of ``seed + n * gamma``. One
    64-bit number is its whole state, and every index draws at the same targets.

    Attributes:
        state: uint64[1]; a draw of k adds k times gamma.
    """

    def __init__(self, seed: int):
        self.state = np.array([seed], STATE_DTYPE)

    def state_dict(self) -> dict:
        """Return ``state``, an int in [0, 2^64)."""
        return {"state": int(self.state[0])}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``."""
        require(state, STATE)
        self.state[0] = state["state"]

    def uniforms(self, k: int) -> np.ndarray:
        """Return the next k numbers, float64[k] in [0, 1), multiples of 2^-52."""
        bits = self.state + _GAMMA * np.arange(1, k + 1, dtype=STATE_DTYPE)
        self.state += _GAMMA * np.array([k], STATE_DTYPE)
        for shift, factor in _ODD:
            bits = (bits ^ (bits >> shift)) * factor
        bits ^= bits >> np.uint64(31)
        return (bits >> np.uint64(12)) * 2.0**-52

    def targets(self, k: int, total: float) -> np.ndarray:
        """Return the next k targets ``(i + u_i) * (total / k)``, float64[k], ascending: one a stratum."""
        return (np.arange(k) + self.uniforms(k)) * (total / max(k, 1))
