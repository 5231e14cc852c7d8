"""What arrives over MPI, looked at before it is received: who sent it, what it is, and how long it is.

A receive into a buffer that is too short is no way to refuse a message: Open MPI 5.0.11 reports MPI_ERR_TRUNCATE, but has by then
written the whole message, beyond the end of the buffer (over TCP and with copies straight from the sender's memory). So no receive
is posted before its message is here; every message is matched first (MPI_Improbe), and is received only where it fits.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from apex.refusals import Refusals


class Arrived:
    """A message that has been matched; it is to be received once, by one of the methods."""

    def __init__(self, message: MPI.Message, status: MPI.Status):
        self._message = message
        self.source, self.tag, self.nbytes = status.source, status.tag, status.Get_count(MPI.BYTE)

    def into(self, buffer: np.ndarray) -> MPI.Request:
        """Begin to receive into the front of ``buffer``, uint8, which must have room."""
        if self.nbytes > len(buffer):
            raise ValueError(f"a message of {self.nbytes} bytes was let into a buffer of {len(buffer)}")
        return self._message.Irecv([buffer[: self.nbytes], MPI.BYTE])

    def take(self) -> np.ndarray:
        """Receive a small message; return its payload (uint8)."""
        payload = np.empty(self.nbytes, np.uint8)
        self._message.Recv([payload, MPI.BYTE])
        return payload


def probe(comm: MPI.Comm, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Arrived | None:
    """Match a message if there is one."""
    status = MPI.Status()
    message = comm.Improbe(source, tag, status)
    return None if message is None else Arrived(message, status)


class Bin:
    """Takes messages that nobody wants, one at a time and without waiting, and counts those that nobody should have sent."""

    def __init__(self, refusals: Refusals, tried):
        """``tried(call)`` is what a call of MPI gives, None where a rank is lost that it needs."""
        self._refusals, self._tried, self._going = refusals, tried, []

    def drop(self, arrived: Arrived, sender: str) -> None:
        """Refuse a message."""
        self._refusals.add(f"a message of {sender} that is not asked for or malformed (tag {arrived.tag}, {arrived.nbytes} bytes)")
        self.swallow(arrived)

    def swallow(self, arrived: Arrived) -> None:
        """Receive a message only to be rid of it, and so that its sender is."""
        buffer = np.empty(arrived.nbytes, np.uint8)
        self._going.append((arrived.into(buffer), buffer))

    def settle(self) -> None:
        """Free what has been received."""
        if self._going:
            self._going = [entry for entry in self._going if self._tried(entry[0].Test) is False]

    @property
    def is_empty(self) -> bool:
        """Whether all has been received."""
        return not self._going
