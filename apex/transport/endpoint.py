"""What every endpoint does over any wire: reports, requests of the learner, refusals, and the end of the run.

The end is exact. A rank whose sends have been taken and whose questions have been answered tells the
learner that it has finished. Once all have, the learner tells all that the run is done, and only then does
anybody leave; so no rank leaves while another still sends to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from apex.control import ACKS, REQUESTS, Ack, Request, as_json
from apex.metrics import REPORT_FIELDS
from apex.ports import LOST, Change, PeerLost, Waking
from apex.processes import end_process
from apex.refusals import Refusals
from apex.schema import Limits
from apex.topology import LEARNER_RANK, Topology
from apex.transport.wire import CONTROLS, KINDS, Allowed, Kind, Received, Sent, Wire

MESSAGES_PER_PROGRESS = 64  # a flood of small messages must not keep a rank from its work
_REPORT = 1  # token
_SHOWN = 4  # of what a rank waits for


class Endpoint:
    """What every role may ask (see ``apex.ports.Port``)."""

    def __init__(self, wire: Wire, topology: Topology, limits: Limits):
        self.wire, self.rank, self.topology, self.limits = wire, wire.rank, topology, limits
        self.role, self.index = topology.role(wire.rank)
        self.ranks_here, self.handover = wire.ranks_on_host, wire.handover
        self.refusals: Refusals = wire.refusals
        self.refusals.owner = topology.name(wire.rank)
        self.stopping = self.finished = False
        self._finishing = self._sent_finished = self._all_done = False
        self._asked_to_stop = False
        self._report_is_free = True
        self._request: Request | None = None
        wire.allowed = self._allowed()

    # --- what a role asks ---

    @property
    def refused(self) -> int:
        """Messages refused so far."""
        return self.refusals.count

    def refuse(self, kind: str, why: str) -> None:
        """Count a message whose content the role rejects."""
        self.refusals.add(kind, why)

    def poll_refusals(self) -> dict[str, int]:
        """Return kind -> messages refused since the last call."""
        return self.refusals.poll()

    def waking(self) -> Waking:
        """Return how messages wake this rank."""
        return self.wire.waking()

    def progress(self) -> None:
        """Let messages move, act on losses and control messages, and step towards the end."""
        wire = self.wire
        wire.progress()
        for change in wire.changes():
            self._on_change(change)
        for sent in wire.completed():
            self._on_sent(sent)
        self._answer()
        for _ in range(MESSAGES_PER_PROGRESS):
            if not (
                self._take_control() or self._take_message()
            ):  # by turns, as they may come over one socket
                break
        self._exchange()
        self._step_to_the_end()

    def send_report(self, vector: np.ndarray) -> bool:
        """Send the counters unless the last report has not been taken yet."""
        if not self._report_is_free:
            return False
        self._report_is_free = False
        self.wire.send_control(
            LEARNER_RANK, {"kind": "report", "values": vector.tolist()}, _REPORT, urgent=False
        )
        return True

    def poll_request(self) -> Request | None:
        """Return what the learner asks for."""
        request, self._request = self._request, None
        return request

    def acknowledge(self, ack: Ack) -> None:
        """Tell the learner that the last request is fulfilled."""
        self.wire.send_control(LEARNER_RANK, as_json(ack))

    def request_stop(self) -> None:
        """Ask the learner once, unless the run ends already: the learner may be gone."""
        if not self._asked_to_stop and not self.stopping:
            self._asked_to_stop = True
            self.wire.send_control(LEARNER_RANK, {"kind": "stop request"})

    def finish(self) -> None:
        """Tell the learner as soon as everything of this rank has been received."""
        self._finishing = True

    def waits_for(self) -> str:
        """Name the messages that are not complete."""
        sends = [f"{self.topology.name(dest)} to take a {kind}" for dest, kind in self.wire.open_sends()]
        parts = sends + self._open_receives() + self.wire.pending()
        return "; ".join(parts[:_SHOWN]) or (
            "the other ranks to finish" if self._sent_finished else "messages"
        )

    def close(self) -> None:
        """Free what the wire holds; what was sent last still leaves."""
        self.wire.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a run in one process resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``."""

    # --- what a role's endpoint refines ---

    def _peers_of(self, kind: Kind) -> list[int]:
        """Return the ranks from which this one takes a kind of data message."""
        return [
            r
            for r in range(self.topology.size)
            if r != self.rank and self.topology.role(r)[0] in KINDS[kind].senders
        ]

    def _answer(self) -> None:
        """Answer what was received before."""

    def _take_message(self) -> bool:
        """Receive a data message that needs no call of the role; return whether there was one."""
        return False

    def _exchange(self) -> None:
        """Act on what has arrived."""

    def _on_sent(self, sent: Sent) -> None:
        if sent.kind == Kind.CONTROL:
            self._report_is_free = True

    def _on_change(self, change: Change) -> None:
        """A rank is lost, or has been replaced."""
        if (
            change.what == LOST
            and not self.topology.is_acting(change.rank)
            and not self._may_leave(change.rank)
        ):
            raise PeerLost(f"{self.topology.name(change.rank)} was lost, and the run needs it: {change.why}")

    def _open_receives(self) -> list[str]:
        """Name the requests of this rank without an answer; it cannot leave before."""
        return [] if self._request is None else ["its own turn to take a request"]

    # --- checks ---

    def _allowed(self) -> Allowed:
        takes = [kind for kind, spec in KINDS.items() if self.role in spec.receivers]
        return {
            (source, kind): KINDS[kind].nbytes(self.limits)
            for kind in takes
            for source in self._peers_of(kind)
        }

    def _reject(self, message: Received, why: str = "not asked for") -> None:
        message.reject(
            f"a {message.kind} of {self.topology.name(message.source)} ({message.nbytes} bytes): {why}"
        )

    # --- control messages ---

    def _take_control(self) -> bool:
        arrived = self.wire.poll_control()
        if arrived is not None:
            self._on_control(*arrived)
        return arrived is not None

    def _on_control(self, source: int, message: dict[str, Any]) -> None:
        """Act on a control message, or refuse it."""
        kind = str(message.get("kind"))
        control = CONTROLS.get(kind)
        is_known = (
            control is not None
            and self.role in control.receivers
            and self.topology.role(source)[0] in control.senders
        )
        has_fields = control is not None and all(
            type(message.get(name)) is wanted for name, wanted in control.fields.items()
        )
        if not (is_known and has_fields and self._act(source, kind, message)):
            self._refuse_control(source, kind)

    def _act(self, source: int, kind: str, message: dict[str, Any]) -> bool:
        """Act on a control message whose fields are right; return whether it was expected."""
        if kind == "stop":
            self.stopping = True
            self.wire.begin_end()
        elif kind == "done" and self._sent_finished:
            self._all_done = True
        elif kind in REQUESTS:
            request = REQUESTS[kind](**{name: message[name] for name in CONTROLS[kind].fields})
            if request.fault() is not None:
                return False
            self._request = request
        elif kind == "kill" and _are_int64(message["pid"], message["began"]):
            end_process(message["pid"], message["began"])
        else:
            return False
        return True

    def _refuse_control(self, source: int, kind: str) -> None:
        name = self.topology.name(source)
        why = f"a control message of {name} that is unexpected or malformed ({kind[:40]})"
        self.refuse("control", why)

    # --- the end ---

    def _step_to_the_end(self) -> None:
        if (
            self._all_done
        ):  # so all that this rank has sent was taken, though it may not know yet: the takers may be gone
            self.finished = not self._open_receives() and not self.wire.pending()
        elif self.stopping and self._finishing and not self._sent_finished and not self._is_open():
            self._sent_finished = True
            self.wire.send_control(LEARNER_RANK, {"kind": "finished"})

    def _is_open(self) -> bool:
        """Whether a send or a request of this rank is still open."""
        return bool(self.wire.open_sends() or self._open_receives() or self.wire.pending())

    def _may_leave(self, rank: int) -> bool:
        """Whether the loss of a rank is its orderly end: each leaves once it knows that the run is done."""
        return self._all_done or (self._sent_finished and rank != LEARNER_RANK)


def report_length(topology: Topology, rank: int) -> int:
    """Return the values in a report of a rank."""
    return len(REPORT_FIELDS[topology.role(rank)[0]])


def are_floats(values: list[Any], length: int) -> bool:
    """Whether a list of JSON holds so many numbers."""
    return len(values) == length and all(type(value) is float or _are_int64(value) for value in values)


def acknowledgement(kind: str, message: dict[str, Any]) -> Ack | None:
    """Return the acknowledgement that a control message holds, None where its values are wrong."""
    ack = ACKS[kind](**{name: message[name] for name in CONTROLS[kind].fields})
    return ack if ack.fault() is None else None


def _are_int64(*values: object) -> bool:
    return all(type(value) is int and -(2**63) <= value < 2**63 for value in values)
