"""Which rank gets which publish: from the learner, or from the first actor of a host without the learner."""

from __future__ import annotations

from typing import Any

import numpy as np

from apex.schema import align, aligned_bytes, weight_header
from apex.topology import LEARNER_RANK
from apex.transport.wire import Kind, Received, Wire

_NOTHING = np.zeros(0, np.uint8)
_SPARE = 2  # buffers of a relay beside one for each that is served: the newest, and the one that is arriving
_NONE = -1


def request_message(learner_steps: int) -> np.ndarray:
    """Return a request for weights of at least so many learner steps."""
    return np.array([learner_steps], np.int64).view(np.uint8)


def read_request(message: Received) -> int | None:
    """Return the learner steps that a request asks for, or None where they are fewer than 0."""
    wanted = np.empty(1, np.int64)
    message.into(wanted.view(np.uint8))
    while not message.arrived():
        pass
    return int(wanted[0]) if wanted[0] >= 0 else None


class WeightServer:
    """Holds publishes in memory that neighbours read in place, and the requests for them.

    A receiver that sleeps holds one publish, never more; so with ``rows`` for all receivers there is always a
    free one.
    """

    def __init__(self, wire: Wire, rows: int):
        self.requests: dict[int, int] = {}  # rank -> learner steps wanted
        self._wire, self._num_rows = wire, rows
        self._rows: list[np.ndarray] = []
        self._readers: list[int] = []
        self._newest = self._filling = _NONE

    @property
    def steps(self) -> int:
        """Learner steps of the newest publish, -1 before the first."""
        return -1 if self._newest == _NONE else weight_header(self._rows[self._newest])[1]

    def acquire(self, nbytes: int) -> np.ndarray:
        """Return a free buffer; fill it, then commit."""
        if not self._rows:
            self._rows = list(self._wire.allocate(self._num_rows, align(nbytes))[:, :nbytes])
            self._readers = [0] * self._num_rows
        idle = (i for i, readers in enumerate(self._readers) if not readers and i != self._newest)
        self._filling = next(idle, _NONE)
        if self._filling == _NONE:
            self._rows.append(aligned_bytes(nbytes))
            self._readers.append(0)
            self._filling = len(self._rows) - 1
        return self._rows[self._filling]

    def commit(self) -> None:
        """What was acquired is filled, and the newest publish."""
        self._newest = self._filling

    def answer(self, is_ending: bool) -> None:
        """Answer the requests for what is published now; while the run ends, answer all with nothing."""
        if not self.requests:
            return
        steps = self.steps
        for rank in [rank for rank, wanted in self.requests.items() if is_ending or steps >= wanted]:
            del self.requests[rank]
            self._refuse(rank) if is_ending else self._give(rank)

    def sent(self, token: int) -> None:
        """A receiver has taken a publish."""
        self._readers[token - 1] -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a run in one process resumes."""
        newest = None if self._newest == _NONE else self._rows[self._newest].copy()
        return {"newest": newest, "requests": {str(rank): wanted for rank, wanted in self.requests.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``."""
        if state["newest"] is not None:
            self.acquire(len(state["newest"]))[:] = state["newest"]
            self.commit()
        self.requests = {int(rank): wanted for rank, wanted in state["requests"].items()}

    def _give(self, rank: int) -> None:
        self._readers[self._newest] += 1
        self._wire.send(rank, Kind.WEIGHTS, self._rows[self._newest], self._newest + 1)

    def _refuse(self, rank: int) -> None:
        self._wire.send(rank, Kind.WEIGHTS, _NOTHING)


class Relay(WeightServer):
    """One copy of a publish for a whole host: its first actor requests it from the learner and forwards it.

    It keeps one request open there, for the fewest learner steps that any of them waits for. So the learner
    sends a publish to a host at most once, however many actors there are. The price: while that actor sleeps,
    no other of its host gets weights.
    """

    def __init__(self, wire: Wire, served: list[int]):
        super().__init__(wire, len(served) + _SPARE)
        self._me, self._served, self._nbytes = wire.rank, served, 0
        self._into = _NOTHING
        self._answer: bool | None = None  # to this rank's own request
        self.is_asking = False
        self._arriving: Received | None = None

    def request(self, min_learner_steps: int, into: np.ndarray) -> None:
        """This rank itself wants weights."""
        self._nbytes, self._into = len(into), into
        self.requests[self._me] = min_learner_steps

    def take(self, message: Received) -> bool:
        """Take a request of a rank that is served, or the learner's answer; return whether it was one."""
        if message.kind == Kind.WEIGHT_REQUEST:
            wanted = read_request(message)
            if wanted is not None:
                self.requests[message.source] = wanted
            return True
        if not self.is_asking or self._arriving is not None or message.nbytes not in (0, self._nbytes):
            return False
        if message.nbytes:
            message.into(self._rows[self._filling])
            self._arriving = message
        else:  # the run ends: so does the learner tell
            message.view()
            message.release()
            self.is_asking = False
        return True

    def progress(self, is_ending: bool) -> bool | None:
        """Answer requests, and ask for a newer publish where one is wanted; return this rank's own answer."""
        if self._arriving is not None and self._arriving.arrived():
            self._arriving, self.is_asking = None, False
            self.commit()
        self.answer(is_ending)
        if self.requests and not self.is_asking and self._nbytes and not is_ending:
            self.is_asking = True
            self.acquire(self._nbytes)
            self._wire.send(LEARNER_RANK, Kind.WEIGHT_REQUEST, request_message(min(self.requests.values())))
        answer, self._answer = self._answer, None
        return answer

    def _give(self, rank: int) -> None:
        if rank == self._me:
            self._into[:], self._answer = self._rows[self._newest], True
        else:
            super()._give(rank)

    def _refuse(self, rank: int) -> None:
        if rank == self._me:
            self._answer = False
        else:
            super()._refuse(rank)
