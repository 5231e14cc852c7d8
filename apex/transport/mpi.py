"""The roles over MPI: make_port, actors and replay ranks; the learner is in ``mpi_learner``."""

from __future__ import annotations

from collections import deque

import numpy as np
from mpi4py import MPI

from apex.ports import IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.schema import ALIGNMENT, Limits, aligned_bytes
from apex.topology import ACTOR, EVALUATOR, LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.checked import Arrived
from apex.transport.credits import IntakeCredits
from apex.transport.mpi_learner import MpiLearnerPort
from apex.transport.mpi_newcomer import Joining, meeting
from apex.transport.mpi_port import (
    INTAKE,
    PRIORITY,
    REFUSAL,
    REPLACE,
    SAMPLE,
    SAMPLE_REQUEST,
    STOP,
    WEIGHT_REQUEST,
    WEIGHTS,
    MpiPort,
    met_at_start,
    ranks_here,
)
from apex.transport.mpi_relay import Relay
from apex.transport.mpi_replace import Newcomer, Replacements
from apex.transport.mpi_ways import INTAKES, MESSAGES, Meeting
from apex.transport.process import own_process
from apex.transport.shared import REFUSED, Peer, borrow

_TURNS = 8


def make_port(comm: MPI.Comm, topology: Topology, limits: Limits, share: bool = True, command: list[str] | None = None) -> MpiPort:
    """Return this rank's port. Collective over ``comm``, which must have ``topology.size`` ranks.

    With ``share``, ranks of one host lend each other intake batches, sample batches and publishes in
    memory (see ``apex.transport.shared``); without, all goes through messages. With ``command`` the loss of an
    acting rank is survived, and the command is what starts a process in its place (see ``mpi_replace``).
    """
    kinds = {LEARNER: MpiLearnerPort, REPLAY: MpiReplayPort, EVALUATOR: MpiActorPort, ACTOR: MpiActorPort}
    role, _ = topology.role(comm.rank)
    met = met_at_start(comm, limits, share)
    port = kinds[role](Meeting.of(comm, command is not None), topology, limits, met, ranks_here(comm))
    if command is not None:
        processes = comm.allgather((MPI.Get_processor_name(), *own_process()))
        without_actors = [LEARNER_RANK, *topology.replay_ranks_range]
        if comm.rank in without_actors:
            port.tolerate(Replacements(comm, without_actors, command, met[0]), processes)
    return port


def meet(joining: Joining, topology: Topology):
    """Return what :func:`join` needs of a process that takes the place of an acting rank that was lost."""
    return meeting(joining)


def join(met, topology: Topology, limits: Limits) -> MpiPort:
    """Return the port of that process."""
    there, desk, peers = met
    return MpiActorPort(there, topology, limits, (desk, peers), there.about["ranks_here"])


class MpiActorPort(MpiPort):
    """Actor and evaluator (see ``apex.ports.ActorPort``)."""

    def __init__(self, meeting: Meeting, topology: Topology, limits: Limits, met, ranks_here: int):
        super().__init__(meeting, topology, limits, met, ranks_here)
        self._weights_into: np.ndarray | None = None
        self._weights: MPI.Request | bool | None = None  # False: the run is ending, there will be none
        self._weights_from, self._relay = LEARNER_RANK, None
        self._find_relay()
        self._credits = IntakeCredits(topology.replay_ranks, self.index, limits.intake_in_flight)
        self._completed: list[int] = []

    def request_weights(self, min_learner_steps: int, into: np.ndarray) -> None:
        """Note where they are to go, then ask."""
        if self._weights_into is not None or self.stopping:
            return
        self._weights_into = into
        if self._relay is not None:
            self._relay.request(min_learner_steps, into)
            return
        self._weights = None
        wanted = np.array([min_learner_steps], np.int64)
        self._send(wanted.view(np.uint8), self._weights_from, WEIGHT_REQUEST, "request for weights")

    def poll_weights(self) -> bool:
        """Whether the publish has arrived, as a message or lent; a refusal means that the run is ending."""
        if self._weights_into is None:
            return False
        if self._relay is not None:
            arrived = self._relay.poll()
        else:
            arrived = self._take_weights() if self._weights_from in self.peers else self._receive_weights()
        if arrived is None:
            return False
        self._weights_into = None
        return arrived

    def _receive_weights(self) -> bool | None:
        """Return whether the answer is a publish; None while there is none."""
        if not self._weights:
            return self._weights
        return True if self.ways.tried(self._weights.Test) else None

    def _take_weights(self) -> bool | None:
        """The same, of a publish that is lent."""
        lender = self.peers[self._weights_from]
        if not lender.has_sent():
            return None
        message = borrow(lender, lambda nbytes: nbytes == len(self._weights_into), self.refusals)
        if message is REFUSED:
            return None
        if message is not None:
            self._weights_into[: len(message)] = message
        lender.give_back()
        return message is not None

    def intake_memory(self, rows: int, nbytes: int) -> np.ndarray:
        """Return uint8[rows, nbytes] that replay ranks of this host read in place."""
        if self.peers.keys().isdisjoint(self.topology.replay_ranks_range):
            return aligned_bytes(rows, nbytes)
        return self._desk.make_outbox(rows * nbytes).reshape(rows, nbytes)

    def can_send_intake(self) -> bool:
        """Whether fewer than ``actor.in_flight`` batches are on the wire to some replay rank."""
        return self._credits.free()

    def send_intake(self, token: int, message: np.ndarray) -> None:
        """Send to the next replay rank that has a free credit."""
        replay = self._credits.take()
        dest = self.topology.replay_ranks_range[replay]
        self._send_or_lend(message, dest, INTAKE, "intake batch", lambda: self._intake_done(token, replay))

    def completed_intake(self) -> list[int]:
        """Return the tokens of received batches."""
        done, self._completed = self._completed, []
        return done

    def progress(self) -> None:
        """Also relay weights, and take the answer to an open weight request while the run ends."""
        if self._relay is not None:
            self._relay.progress()
        if self.stopping:
            self.poll_weights()
        super().progress()

    def _take(self, arrived: Arrived) -> None:
        if self._relay is not None and self._relay.take(arrived):
            return
        asked = self._weights_into is not None and self._weights is None and self._relay is None and self._weights_from not in self.peers
        if asked and (arrived.source, arrived.tag) == (LEARNER_RANK, WEIGHTS) and arrived.nbytes == len(self._weights_into):
            self._weights = arrived.into(self._weights_into)
        elif asked and (arrived.source, arrived.tag, arrived.nbytes) == (LEARNER_RANK, WEIGHTS, len(REFUSAL)) and self.stopping:
            arrived.take()
            self._weights = False
        else:
            super()._take(arrived)

    def _intake_done(self, token: int, replay: int) -> None:
        self._credits.give_back(replay)
        self._completed.append(token)

    def _find_relay(self) -> None:
        """Of the actors on a host without the learner, the first asks it for all. (The learner knows what it gave the evaluator.)"""
        here = [rank for rank in self.topology.actor_ranks if rank in self.peers or rank == self.rank]
        if self.role != ACTOR or LEARNER_RANK in self.peers or len(here) == 1 or self.ways.tolerant:
            return  # where an actor may be lost, none depends on another
        if here[0] == self.rank:
            self._relay = Relay(self, here[1:])
        else:
            self._weights_from = here[0]

    def _is_receiving(self) -> bool:
        own = self._weights is not None and self._weights is not False
        return own or (self._relay is not None and self._relay.is_receiving())

    def _open_receives(self) -> list[str]:
        relayed = [] if self._relay is None else self._relay.open()
        return relayed if self._weights_into is None else [f"weights from {self.topology.name(self._weights_from)}", *relayed]


class MpiReplayPort(MpiPort):
    """Replay rank (see ``apex.ports.ReplayPort``)."""

    def __init__(self, meeting: Meeting, topology: Topology, limits: Limits, met, ranks_here: int):
        super().__init__(meeting, topology, limits, met, ranks_here)
        self._replacements: Replacements | None = None
        self._free_samples = self._make_samples()
        lent, learner, intake = self._poll_lent, self._poll_learner, self._poll_intake
        self._orders = [(learner, lent, intake), (intake, lent, learner), *[(lent, learner, intake)] * (_TURNS - 2)]
        self._turn = 0
        self._actor_of = {rank: actor for actor, rank in enumerate(topology.actor_ranks)}
        self._lenders: deque[Peer] = deque()
        self._find_lenders()
        self._priorities = aligned_bytes(limits.priority_nbytes)
        self._from_learner: MPI.Request | SampleRequestEvent | None = None  # heard, and not handed out; a request is for priorities
        self._asked = 0  # sample requests that have not been answered
        self._arriving: tuple[MPI.Request, int, int] | None = None

    def _make_samples(self) -> list[np.ndarray]:
        """Return the buffers of sample batches. The learner reads them in place on this host, one more than are on their way."""
        nbytes, count = self.limits.sample_nbytes, self.limits.prefetch
        if LEARNER_RANK not in self.peers:
            return [aligned_bytes(nbytes) for _ in range(count)]
        stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
        return list(self._desk.make_outbox((count + 1) * stride).reshape(count + 1, stride)[:, :nbytes])

    def tolerate(self, replacements: Replacements, processes: list) -> None:
        """Survive the loss of acting ranks, and help to replace them."""
        self._replacements = replacements

    def progress(self) -> None:
        """Also meet a process that takes a lost one's place, and help to start the next."""
        if self._replacements is not None:
            self._replace(self._replacements)
        super().progress()

    def poll(self, landing: np.ndarray | None):
        """Return a message of the learner or intake received straight into ``landing``, by turns where there are both.

        To look for what is lent costs next to nothing, to ask MPI as much as a small copy; so MPI is asked first in
        only two polls of ``_TURNS``.
        """
        self._turn = (self._turn + 1) % len(self._orders)
        for look in self._orders[self._turn]:
            event = look(landing)
            if event is not None:
                return event
        return None

    def sample_buffer(self) -> np.ndarray | None:
        """Take a buffer whose last batch the learner has received; ``send_sample`` is to follow."""
        return self._free_samples.pop() if self._free_samples else None

    def send_sample(self, buffer: np.ndarray) -> None:
        """Send the filled buffer."""
        self._asked -= 1
        self._send_or_lend(buffer, LEARNER_RANK, SAMPLE, "sample batch", lambda: self._free_samples.append(buffer))

    def refuse_sample(self) -> None:
        """Send the answer that there is none."""
        self._asked -= 1
        self._refuse(LEARNER_RANK, SAMPLE, "refusal of a sample")

    @property
    def quiet(self) -> bool:
        """Whether no batch is arriving and no message of the learner waits."""
        return self._arriving is None and self._from_learner is None

    def _poll_learner(self, landing: np.ndarray | None) -> PriorityEvent | SampleRequestEvent | None:
        if self._from_learner is None:
            super()._hear()
        heard = self._from_learner
        if heard is None or isinstance(heard, SampleRequestEvent):
            self._from_learner = None
            return heard
        if not self.ways.tried(heard.Test):
            return None
        self._from_learner = None
        return PriorityEvent(self._priorities)

    def _hear(self) -> bool:
        """Hear the word to stop, before all else; the rest in ``poll``: the priorities handed out last are valid until then."""
        arrived = None if self.stopping else self.ways.probe(MESSAGES, LEARNER_RANK, STOP)
        if arrived is not None:
            self._take(arrived)
        return arrived is not None

    def _take(self, arrived: Arrived) -> None:
        what = (arrived.source, arrived.tag, arrived.nbytes)
        if what == (LEARNER_RANK, SAMPLE_REQUEST, 0) and self._asked < self.limits.prefetch:
            arrived.take()
            self._asked += 1
            self._from_learner = SampleRequestEvent()
        elif what == (LEARNER_RANK, REPLACE, 0) and self._replacements is not None:
            arrived.take()
            self._replacements.ask({})  # the learner may be ready for the next when this rank is not yet
        elif what == (LEARNER_RANK, PRIORITY, self.limits.priority_nbytes):
            # Large enough to need the learner's help on its way: a blocking receive would wait for a training step.
            self._from_learner = arrived.into(self._priorities)
        else:
            super()._take(arrived)

    def _poll_lent(self, landing: np.ndarray | None) -> IntakeEvent | None:
        """Copy a batch from an actor's memory on this host to where it will live."""
        if landing is None or self._arriving is not None:  # while a message is arriving there nothing else may go there
            return None
        for _ in range(len(self._lenders)):
            peer = self._lenders[0]
            self._lenders.rotate(-1)
            if peer.has_sent():
                message = borrow(peer, lambda nbytes: nbytes <= len(landing), self.refusals)
                if message is REFUSED:
                    return None
                landing[: len(message)] = message
                peer.give_back()
                return IntakeEvent(len(message), self._actor_of[peer.rank])
        return None

    def _poll_intake(self, landing: np.ndarray | None) -> IntakeEvent | None:
        if self._arriving is None and landing is not None:
            arrived = self.ways.probe(INTAKES)
            if arrived is not None and not (arrived.tag == INTAKE and arrived.source in self._actor_of and arrived.nbytes <= len(landing)):
                return self._drop(arrived)
            if arrived is not None:
                self._arriving = arrived.into(landing), arrived.nbytes, arrived.source
        if self._arriving is None:
            return None
        request, nbytes, source = self._arriving
        has_arrived = self.ways.tried(request.Test)
        if has_arrived is False:
            return None
        self._arriving = None
        return IntakeEvent(nbytes, self._actor_of[source]) if has_arrived else None  # its sender was lost on the way

    def _replace(self, replacements: Replacements) -> None:
        """Meet who has joined, and only then begin what the learner has begun."""
        if self.stopping:
            replacements.hurry()
        outcome = replacements.ended()
        if isinstance(outcome, Newcomer):
            if not self.ways.is_gone(outcome.rank):  # the learner has seen the loss, this rank has not
                self._lose(outcome.rank)
            self.ways.join(outcome.rank, outcome.comms)
            if outcome.peer is not None:
                self.peers[outcome.rank] = outcome.peer
            self._find_lenders()
        asked = replacements.next()
        if asked is not None:
            replacements.begin(asked)

    def _find_lenders(self) -> None:
        self._lenders = deque(self.peers[rank] for rank in self.topology.actor_ranks if rank in self.peers)

    def _lose(self, rank: int) -> None:
        super()._lose(rank)
        self._find_lenders()

    def _is_receiving(self) -> bool:
        return self._arriving is not None or isinstance(self._from_learner, MPI.Request)

    def _open_receives(self) -> list[str]:
        """Name what has been taken but not yet handed out (its sender may already be done with it), and who is still to join."""
        arriving = [] if self._arriving is None else [f"an intake batch from {self.topology.name(self._arriving[2])}"]
        if self._from_learner is not None:
            arriving.append(f"a message of {self.topology.name(LEARNER_RANK)} to be handled")
        return arriving + ["a new process to join"] * (self._replacements is not None and self._replacements.busy)
