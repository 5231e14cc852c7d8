"""Which replay rank an actor's next intake batch goes to."""

from __future__ import annotations


class IntakeCredits:
    """At most ``limit`` batches in flight from one actor to each replay rank, which take turns.

    A rank without a free credit is passed over. With credits pooled over all ranks, one that takes
    nothing (its rate limiter waits for samples) would end up holding them all, and starve the others
    of the very batches that the learner waits for. ``in_flight``, by replay index, and ``turn`` are all there is to it.
    """

    def __init__(self, replay_ranks: int, first: int, limit: int):
        self.in_flight = [0] * replay_ranks
        self.turn, self._limit = first % replay_ranks, limit

    def free(self) -> bool:
        """Whether a batch may be sent now."""
        return min(self.in_flight) < self._limit

    def take(self) -> int:
        """Return the replay index to send to; raises RuntimeError where no credit is free."""
        n = len(self.in_flight)
        for replay in ((self.turn + i) % n for i in range(n)):
            if self.in_flight[replay] < self._limit:
                self.in_flight[replay] += 1
                self.turn = (replay + 1) % n
                return replay
        raise RuntimeError("an intake batch was sent without a free credit")

    def give_back(self, replay: int) -> None:
        """The replay rank has received a batch."""
        self.in_flight[replay] -= 1
