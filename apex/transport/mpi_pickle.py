"""``mpi-pickle``: lists of transitions through mpi4py's lower-case calls, which pickle. Only for comparison."""

from __future__ import annotations

from mpi4py import MPI

from apex.schema import Limits
from apex.topology import Topology
from apex.transport.pickled import Kind, PickledPort
from apex.transport.pickled import make_port as make_pickled_port
from apex.transport.pickled_form import Form

MPI.pickle.PROTOCOL = 5


def make_port(comm: MPI.Comm, topology: Topology, limits: Limits, form: Form) -> PickledPort:
    """Return this rank's port. Collective over ``comm``, which must have ``topology.size`` ranks."""
    return make_pickled_port(MpiWire(comm, topology), comm.rank, topology, limits, form)


class MpiWire:
    """Synchronous non-blocking sends and matched blocking receives of pickled objects; intake on a communicator of its own."""

    def __init__(self, comm: MPI.Comm, topology: Topology):
        self.topology = topology
        self._comms = {True: comm.Dup(), False: comm.Dup()}
        self._arriving: dict[bool, tuple | None] = {True: None, False: None}
        self._sends: list[tuple] = []

    def send(self, dest: int, kind: Kind, content, done=None) -> None:
        """Pickle ``content`` and start sending it; ``done()`` is called when the receiver has taken it."""
        request = self._comms[kind == Kind.INTAKE].issend(content, dest, int(kind))
        self._sends.append((request, f"{self.topology.name(dest)} to take {kind.name.lower()}", done))

    def receive(self, intake: bool) -> tuple | None:
        """Return ``(source, kind, content)`` of the oldest message if all of it has arrived, or None."""
        if self._arriving[intake] is None:
            status = MPI.Status()
            message = self._comms[intake].improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                return None
            self._arriving[intake] = message.irecv(), status.source, status.tag
        request, source, kind = self._arriving[intake]
        arrived, content = request.test()
        if not arrived:
            return None
        self._arriving[intake] = None
        return source, kind, content

    def open_sends(self) -> list[str]:
        """Name the sends that have not been taken."""
        return [what for _, what, _ in self._sends]

    def progress(self) -> None:
        """Complete sends."""
        still_open = []
        for entry in self._sends:
            if not entry[0].Test():
                still_open.append(entry)
            elif entry[2] is not None:
                entry[2]()
        self._sends = still_open

    def close(self) -> None:
        """Nothing is held."""
