"""The learner's port, over any wire."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from apex.control import ACKS, Request, as_json
from apex.ports import LOST, REPLACED, Acknowledged, Change, Report
from apex.processes import end_process
from apex.schema import Limits, aligned_bytes
from apex.topology import LEARNER_RANK, Topology
from apex.transport.endpoint import Endpoint, acknowledgement, are_floats, report_length
from apex.transport.weights import WeightServer, read_request
from apex.transport.wire import Held, Kind, Received, Sent, Wire

_TO_LEARNER = frozenset([Kind.SAMPLE, Kind.WEIGHT_REQUEST])
_SPARE_PUBLISHES = 2  # beside one for each acting rank: the newest, and the one being written
_NOTHING = np.zeros(0, np.uint8)


class _Request:
    """A sample request: open until its answer has been taken."""

    def __init__(self, replay: int):
        self.replay = replay
        self.message: Received | None = None


class LearnerEndpoint(Endpoint):
    """Learner (see ``apex.ports.LearnerPort``)."""

    def __init__(self, wire: Wire, topology: Topology, limits: Limits):
        super().__init__(wire, topology, limits)
        self.stop_requested = False
        self._requests: deque[_Request] = deque()
        self._given_out: Received | None = None
        self._priorities: list[np.ndarray] = []
        self._free_priorities: list[int] = []
        self._weights = WeightServer(wire, topology.num_actors + 1 + _SPARE_PUBLISHES)
        self._unfinished = set(range(1, topology.size))
        self._last_requests: dict[int, Request] = {}  # by rank: what goes after all else
        self._away: set[int] = set()  # lost, and not replaced
        self._asked_to_kill = 0
        self._reports: list[Report] = []
        self._acks: list[Acknowledged] = []
        self._changes: list[Change] = []

    def request_sample(self, replay: int) -> None:
        """Request a sample batch; answers are returned in the order of the requests."""
        self._requests.append(_Request(replay))
        self.wire.send(self.topology.replay_ranks_range[replay], Kind.SAMPLE_REQUEST, _NOTHING)

    def poll_sample(self) -> tuple[int, np.ndarray] | None:
        """Return ``(replay index, batch)`` of the oldest request once it is here; release the last."""
        self._release_sample()
        if not self._requests or self._requests[0].message is None or not self._requests[0].message.arrived():
            return None
        self._given_out, replay = self._requests[0].message, self._requests.popleft().replay
        return replay, self._given_out.view()

    def priority_buffer(self) -> np.ndarray:
        """Return a free buffer, uint8[limits.priority_nbytes], for :meth:`send_priorities`."""
        if not self._free_priorities:
            self._priorities.append(aligned_bytes(self.limits.priority_nbytes))
            self._free_priorities.append(len(self._priorities) - 1)
        return self._priorities[self._free_priorities[-1]]

    def send_priorities(self, replay: int) -> None:
        """Send the buffer that was filled."""
        row = self._free_priorities.pop()
        self.wire.send(
            self.topology.replay_ranks_range[replay], Kind.PRIORITY, self._priorities[row], row + 1
        )

    def wants_weights(self, learner_steps: int) -> bool:
        """Whether a rank waits for a publish of at most so many learner steps."""
        return any(wanted <= learner_steps for wanted in self._weights.requests.values())

    def publish_buffer(self, nbytes: int) -> np.ndarray:
        """Return a free buffer."""
        return self._weights.acquire(nbytes)

    def publish(self) -> None:
        """Make the filled buffer the newest publish, and answer the ranks that wait for it."""
        self._weights.commit()
        self._weights.answer(self.stopping)

    def request(self, rank: int, request: Request) -> None:
        """Send a request; while the run ends, only once the rank has taken all else: it must not overtake."""
        if self.stopping:
            self._last_requests[rank] = request
        else:
            self.wire.send_control(rank, as_json(request))

    def poll_reports(self) -> list[Report]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def poll_acks(self) -> list[Acknowledged]:
        """Return the acknowledgements since the last call."""
        acks, self._acks = self._acks, []
        return acks

    def poll_changes(self) -> list[Change]:
        """Return which acting ranks were lost or replaced since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def replace(self, rank: int, handover: dict[str, Any]) -> None:
        """Have a new process take the place of a lost rank."""
        self.wire.replace(rank, handover | {"replay_ranks": self.topology.replay_ranks})

    def awaited(self) -> set[int]:
        """Return the ranks that the end of the run waits for: to finish, or to receive that all is done."""
        leaving = {dest for dest, _ in self.wire.open_sends()} if self._sent_finished else set()
        return self._unfinished | leaving

    def kill(self, rank: int) -> bool:
        """Kill a rank's process, here or through a rank of its host; return whether there was a way."""
        host, pid, began = self.wire.processes[rank]
        near = [
            r
            for r, (there, *_) in enumerate(self.wire.processes)
            if there == host and r != rank and r not in self._away
        ]
        if LEARNER_RANK in near:
            return end_process(pid, began)
        if near:  # another each time: the first may hang as well
            self._asked_to_kill += 1
            self.wire.send_control(
                near[self._asked_to_kill % len(near)], {"kind": "kill", "pid": pid, "began": began}
            )
        return bool(near)

    def stop(self) -> None:
        """Tell every other rank."""
        if not self.stopping:
            self.stopping = True
            self.wire.begin_end()
            self._tell_all({"kind": "stop"})

    def poll_request(self) -> None:
        """The learner receives no requests."""

    def send_report(self, vector: np.ndarray) -> bool:
        """The learner's own report needs no message."""
        self._reports.append(Report(self.role, self.index, vector.copy()))
        return True

    def request_stop(self) -> None:
        """A signal arrived at the learner itself."""
        self.stop_requested = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a run in one process resumes: arrays and plain values."""
        requests = [
            [r.replay, None if r.message is None else r.message.view().copy()] for r in self._requests
        ]
        return {"requests": requests, "weights": self._weights.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``."""
        for replay, array in state["requests"]:
            request = _Request(replay)
            if array is not None:
                request.message = Held(self.topology.replay_ranks_range[replay], Kind.SAMPLE, array)
            self._requests.append(request)
        self._weights.load_state_dict(state["weights"])

    def _answer(self) -> None:
        self._weights.answer(self.stopping)  # before new requests come: the role may publish first

    def _take_message(self) -> bool:
        message = self.wire.receive(_TO_LEARNER)
        if message is not None:
            (self._take_sample if message.kind == Kind.SAMPLE else self._take_request)(message)
        return message is not None

    def _exchange(self) -> None:
        if self.stopping:
            self._drop_samples()
            taking = {dest for dest, _ in self.wire.open_sends()} if self._last_requests else set()
            for rank in self._last_requests.keys() - taking:
                self.wire.send_control(rank, as_json(self._last_requests.pop(rank)))

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in range(1, self.topology.size):
            self.wire.send_control(rank, message)

    def _take_sample(self, message: Received) -> None:
        """Assign a batch, or a refusal at the end, to the oldest request to its sender without an answer."""
        asked = (
            r
            for r in self._requests
            if r.message is None and self.topology.replay_ranks_range[r.replay] == message.source
        )
        request = next(asked, None)
        if request is None or not (
            message.nbytes == self.limits.sample_nbytes or (not message.nbytes and self.stopping)
        ):
            self._reject(message)
        else:
            message.view()
            request.message = message

    def _take_request(self, message: Received) -> None:
        wanted = read_request(message)
        if wanted is None:
            name = self.topology.name(message.source)
            self.refuse("weight_request", f"a request of {name} for weights of fewer than 0 learner steps")
        elif message.source not in self._away:
            self._weights.requests[message.source] = wanted

    def _drop_samples(self) -> None:
        self._release_sample()
        while (
            self._requests and self._requests[0].message is not None and self._requests[0].message.arrived()
        ):
            self._given_out = self._requests.popleft().message
            self._release_sample()

    def _release_sample(self) -> None:
        if self._given_out is not None:
            self._given_out.release()
            self._given_out = None

    def _act(self, source: int, kind: str, message: dict[str, Any]) -> bool:
        if kind == "report" and are_floats(message["values"], report_length(self.topology, source)):
            self._reports.append(Report(*self.topology.role(source), np.array(message["values"], np.float64)))
        elif kind in ACKS and (ack := acknowledgement(kind, message)) is not None:
            self._acks.append(Acknowledged(*self.topology.role(source), ack))
        elif kind == "stop request":
            self.stop_requested = True
        elif kind == "finished" and self.stopping:
            self._unfinished.discard(source)
        else:
            return False
        return True

    def _on_sent(self, sent: Sent) -> None:
        if sent.kind == Kind.PRIORITY:
            self._free_priorities.append(sent.token - 1)
        elif sent.kind == Kind.WEIGHTS:
            self._weights.sent(sent.token)
        else:
            super()._on_sent(sent)

    def _on_change(self, change: Change) -> None:
        super()._on_change(change)
        if change.what == LOST:
            if self._sent_finished:  # every rank had finished, and leaves
                return
            self._away.add(change.rank)
            self._unfinished.discard(change.rank)
            self._weights.requests.pop(change.rank, None)
            if self.stopping:
                self.wire.replace(change.rank, None)
        elif change.what == REPLACED:
            self._away.discard(change.rank)
            self._unfinished.add(change.rank)
            if self.stopping:
                self.wire.send_control(change.rank, {"kind": "stop"})
        self._changes.append(change)

    def _step_to_the_end(self) -> None:
        """Once all have finished, tell them that the run is done; leave when they have taken that."""
        if self._sent_finished:
            self.finished = not self.wire.open_sends()
        elif (
            self.stopping
            and self._finishing
            and not (self._unfinished or self._last_requests or self._is_open())
        ):
            self._sent_finished = True
            self._tell_all({"kind": "done"})
            self.finished = not self.wire.open_sends()

    def _open_receives(self) -> list[str]:
        samples = [
            f"a sample batch from {self.topology.name(self.topology.replay_ranks_range[r.replay])}"
            for r in self._requests
        ]
        unfinished = (
            [f"{self.topology.name(rank)} to finish" for rank in sorted(self._unfinished)]
            if self._finishing
            else []
        )
        return samples + unfinished
