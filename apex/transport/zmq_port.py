"""What the ports over ZeroMQ share: the kinds of messages, how ranks meet, and a member's way to the learner."""

from __future__ import annotations

import socket
import time

import numpy as np

from apex.ports import WORDS, Waking
from apex.refusals import Refusals, Refusing
from apex.schema import Limits
from apex.topology import LEARNER_RANK, Topology
from apex.transport.process import end_process, own_process
from apex.transport.zmq_link import Hub, Link, Message, wait
from apex.transport.zmq_world import World

HELLO, WELCOME, INTAKE, INTAKE_TAKEN, SAMPLE_REQUEST, SAMPLE, NO_SAMPLE, PRIORITY, WEIGHT_REQUEST = range(1, 10)
WEIGHTS, NO_WEIGHTS, REPORT, REPORT_TAKEN, STOP_REQUEST, STOP, FINISHED, DONE, ANNOUNCEMENT, ANSWER, KILL = range(10, 21)
_LOOKS_FOR_CUTS_EVERY_S = 0.25
MESSAGES_PER_PROGRESS = 64  # a flood of small messages must not keep the learner from training


class ZmqPort(Refusing):
    """What every role may ask (see ``apex.ports.Port``): binds a hub, connects links, and knows that all have met."""

    def __init__(self, world: World, topology: Topology, limits: Limits):
        self.rank, self.topology, self.limits = world.rank, topology, limits
        self.role, self.index = topology.role(world.rank)
        self.stopping = self.finished = self._finishing = False
        self.about = world.about
        owner = topology.name(self.rank)
        self.refusals, self._looks_for_cuts_at = Refusals(owner), 0.0
        callers, largest = self._callers()
        self._hub = world.hub(callers, owner, largest) if callers else None
        if self.about is None:
            self._endpoints = world.allgather(self._hub and self._hub.endpoint)
            self._processes = world.allgather([socket.gethostname(), *own_process()])
            self.ranks_here = [host for host, *_ in self._processes].count(socket.gethostname())
        else:
            self._endpoints, self.ranks_here = self.about["endpoints"], self.about["ranks_here"]
        self._links: dict[int, Link] = {rank: world.link(self._endpoints[rank], rank, owner) for rank in self._called()}
        self._meet(callers)

    @property
    def refused(self) -> int:
        """Messages of strangers, malformed and oversized ones, and such as the role has refused."""
        return sum(box.refused for box in self._boxes()) + self.refusals.count

    def tolerate(self, world: World) -> None:
        """Survive the loss of acting ranks."""
        if self._hub is not None:
            self._hub.may_lose = frozenset(range(self.topology.evaluator_rank, self.topology.size))

    def waking(self) -> Waking:
        """Every message ends a wait."""
        return Waking(wait=lambda seconds: wait(self._boxes(), seconds))

    def finish(self) -> None:
        """Say so to the learner as soon as everything of this rank has been received."""
        self._finishing = True

    def waits_for(self) -> str:
        """Name the messages of this rank that are not complete."""
        return "; ".join(self._open()[:4]) or ("the other ranks to finish" if self._finishing else "messages")

    def close(self) -> None:
        """Close the sockets; what was sent last still leaves."""
        for box in self._boxes():
            box.close()

    def _look_for_cuts(self) -> None:
        """Count connections that were cut, now and then; while the run ends ranks leave by themselves."""
        now = time.monotonic()
        if self._hub is not None and now >= self._looks_for_cuts_at and not self._finishing:
            self._looks_for_cuts_at = now + _LOOKS_FOR_CUTS_EVERY_S
            self._hub.count_cuts()

    def _callers(self) -> tuple[list[int], int | None]:
        """Return the ranks that connect to this one, and the most bytes that one of their messages may have."""
        return [], None

    def _called(self) -> list[int]:
        """Return the ranks that this one connects to."""
        return [LEARNER_RANK]

    def _open(self) -> list[str]:
        """Say what this rank still waits for; it cannot leave before."""
        return []

    def _boxes(self) -> list[Hub | Link]:
        return [*self._links.values(), *([self._hub] if self._hub else [])]

    def _meet(self, callers: list[int]) -> None:
        """Greet whom this rank connects to; return when all have met, so that no message can come too early for its receiver."""
        for link in self._links.values():
            link.send(HELLO)
        missing = set(callers)
        while missing:
            missing.discard(self._greeting(self._hub, HELLO))
        for rank in callers:
            self._hub.send(rank, WELCOME)
        for link in self._links.values():
            while self._greeting(link, WELCOME) is None:
                pass

    @staticmethod
    def _greeting(box: Hub | Link, kind: int) -> int | None:
        """Wait for a message; return who sent it if it is a greeting."""
        box.socket.poll()
        message = box.receive()
        if message is None or (message.kind == kind and not message.has_payload):
            return message and message.rank
        return box.refuse()


class ZmqMemberPort(ZmqPort):
    """What actors, the evaluator and replay ranks share: a link to the learner, one report on its way, the end."""

    def __init__(self, world: World, topology: Topology, limits: Limits):
        self._report_free = True
        self._asked_to_stop = self._told_finished = False
        self._announcement: np.ndarray | None = None
        super().__init__(world, topology, limits)
        self._learner = self._links[LEARNER_RANK]

    def progress(self) -> None:
        """Take what the learner has sent, and tell it when this rank is through."""
        self._look_for_cuts()
        lost = self._learner.is_lost()
        for _ in range(MESSAGES_PER_PROGRESS):
            message = self._learner.receive()
            if message is None:
                break
            self._hear(message)
        if lost and message is None and not self.finished:
            raise ConnectionError(f"the connection to {self.topology.name(LEARNER_RANK)} has broken")
        if self._finishing and not self._told_finished and not self._open():
            self._told_finished = True
            self._learner.send(FINISHED)

    def send_report(self, vector: np.ndarray) -> bool:
        """Send the counters unless the learner has not taken the last report yet."""
        if not self._report_free:
            return False
        self._report_free = False
        self._learner.send(REPORT, 0, vector.view(np.uint8))
        return True

    def poll_announcement(self) -> np.ndarray | None:
        """Return what the learner has announced."""
        announcement, self._announcement = self._announcement, None
        return announcement

    def answer(self, words: np.ndarray) -> None:
        """Send a copy to the learner."""
        self._learner.send(ANSWER, 0, words.astype(np.int64).view(np.uint8))

    def request_stop(self) -> None:
        """Ask the learner once, and not while the run ends already: it may be gone."""
        if not self._asked_to_stop and not self.stopping:
            self._asked_to_stop = True
            self._learner.send(STOP_REQUEST)

    def _hear(self, message: Message) -> None:
        if message.has_payload and message.kind == ANNOUNCEMENT:
            words = self._learner.take(8 * WORDS)
            if words is not None:
                self._announcement = words.view(np.int64).copy()
        elif message.has_payload and message.kind == KILL:
            process = self._learner.take(16)
            if process is not None:
                end_process(*process.view(np.int64).tolist())
        elif message.has_payload:
            self._learner.refuse()
        elif message.kind == STOP:
            self.stopping = True
        elif message.kind == REPORT_TAKEN and not self._report_free:
            self._report_free = True
        elif message.kind == DONE and self._told_finished:
            self.finished = True
        else:
            self._learner.refuse()

    def _open(self) -> list[str]:
        report = [] if self._report_free else [f"{self.topology.name(LEARNER_RANK)} to take a report"]
        return report if self._announcement is None else ["its own turn to hear an announcement", *report]
