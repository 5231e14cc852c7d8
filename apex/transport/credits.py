"""Which replay rank an actor's next intake batch goes to."""

from __future__ import annotations


class IntakeCredits:
    """At most ``limit`` batches in flight from one actor to each replay rank, which take turns.

    They do so in rounds, each of which begins a golden section of a round further on. The environments of an actor
    fill batches in turn as well; were all rounds alike, the two turns would be in step where both numbers have a
    common divisor, and an environment would always meet the same ranks. Multiples of an irrational number are
    spread evenly however many are left out between two (Weyl 1916), so each environment meets all ranks alike.

    A rank without a free credit is passed over. With credits pooled over all ranks, one that takes
    nothing (its rate limiter waits for samples) would end up holding them all, and starve the others
    of the very batches that the learner waits for. ``in_flight``, by replay index, and ``turn`` are all there is to it.
    """

    def __init__(self, replay_ranks: int, first: int, limit: int):
        self.in_flight = [0] * replay_ranks
        self.turn, self._first, self._limit = 0, first, limit

    def free(self) -> bool:
        """Whether a batch may be sent now."""
        return min(self.in_flight) < self._limit

    def take(self) -> int:
        """Return the replay index to send to; raises RuntimeError where no credit is free."""
        n = len(self.in_flight)
        start = self._first + self.turn + _round_begins_at(self.turn // n, n)
        for replay in ((start + i) % n for i in range(n)):
            if self.in_flight[replay] < self._limit:
                self.in_flight[replay] += 1
                self.turn += 1
                return replay
        raise RuntimeError("an intake batch was sent without a free credit")

    def give_back(self, replay: int) -> None:
        """The replay rank has received a batch."""
        self.in_flight[replay] -= 1


_GOLDEN_SECTION = 0x9E3779B97F4A7C15  # of 2^64


def _round_begins_at(number: int, ranks: int) -> int:
    """Return 0..ranks - 1: by how much a round is shifted."""
    return (number * _GOLDEN_SECTION % 2**64) * ranks >> 64
