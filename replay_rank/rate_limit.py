"""When a replay rank may be sampled and when it may be inserted into.

With D = samples_per_insert * inserted - sampled (the samples still owed), M = samples_per_insert *
min_size and E = error_buffer * M:

    may sample B   when  inserted >= min_size  and  D - B >= M - E
    may insert     when  inserted <  min_size  or   D     <= M + E

so the ratio of samples to inserts after warm-up stays at ``samples_per_insert``, within a band.
"""

from __future__ import annotations

from apex.config import Config, ConfigError
from apex.state import is_count, require

STATE = {"inserted": is_count, "sampled": is_count}


class RateLimiter:
    """The rule above for one of ``replay.ranks`` replay ranks.

    Raises :class:`apex.config.ConfigError` if samples and inserts could block each other.
    """

    def __init__(self, config: Config):
        replay = config.replay
        self.ratio = replay.samples_per_insert
        self.min_size = -(-replay.min_size // replay.ranks)
        center = self.ratio * self.min_size
        band = replay.error_buffer * center
        self.low, self.high = center - band, center + band
        self.inserted = self.sampled = 0
        self._refuse_impossible(config, band)

    def may_sample(self, batch_size: int) -> bool:
        """Whether a batch of ``batch_size`` may be drawn."""
        if self.inserted < self.min_size:
            return False
        return not self.ratio or self._owed() - batch_size >= self.low

    def may_insert(self) -> bool:
        """Whether one more intake batch may be inserted."""
        return not self.ratio or self.inserted < self.min_size or self._owed() <= self.high

    def count(self, inserted: int = 0, sampled: int = 0) -> None:
        """Record transitions inserted and sampled."""
        self.inserted += inserted
        self.sampled += sampled

    def state_dict(self) -> dict:
        """Return ``inserted`` and ``sampled``, transitions."""
        return {"inserted": self.inserted, "sampled": self.sampled}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``."""
        require(state, STATE)
        self.inserted, self.sampled = state["inserted"], state["sampled"]

    def _owed(self) -> float:
        return self.ratio * self.inserted - self.sampled

    def _refuse_impossible(self, config: Config, band: float) -> None:
        """Reject a band narrower than B: both sides block when high < D < low + B."""
        if not self.ratio or 2 * band >= config.learner.batch_size:
            return
        minimum = _min_band(config.learner.batch_size, self.ratio * self.min_size)
        narrow = f"replay.error_buffer = {config.replay.error_buffer} is too narrow"
        raise ConfigError(
            f"{narrow}: samples and inserts could block each other; the least is {minimum} with these "
            "replay.min_size, samples_per_insert and learner.batch_size"
        )


def _min_band(batch_size: int, center: float) -> str:
    """Return the smallest accepted error_buffer to four digits, rounded up where the nearest is too small."""
    digits = [f"{batch_size / (2 * center) * up:.4g}" for up in (1.0, 1.0005, 1.001)]
    return next(text for text in digits if 2 * float(text) * center >= batch_size)
