"""All roles in one process, stepped in turn: deterministic, for tests and debugging."""

from __future__ import annotations

from collections import deque

import numpy as np

from apex.ports import Answer, IntakeEvent, PriorityEvent, Report, SampleRequestEvent
from apex.refusals import Refusals, Refusing
from apex.schema import Limits, aligned_bytes, weight_header
from apex.topology import LEARNER, REPLAY, Topology
from apex.transport import local_state
from apex.transport.credits import IntakeCredits


class LocalWorld:
    """The mailboxes that the ports of one process share."""

    def __init__(self, topology: Topology, limits: Limits):
        self.topology, self.limits = topology, limits
        self.intake = [deque() for _ in range(topology.replay_ranks)]  # (actor port, token, message)
        self.to_replay = [deque() for _ in range(topology.replay_ranks)]  # _Request or PriorityEvent
        self.requests: deque[_Request] = deque()
        self.reports: list[Report] = []
        self.announcements: dict[int, np.ndarray] = {}  # by the rank they are for
        self.answers: list[Answer] = []
        self.newest: np.ndarray | None = None
        self.evaluator_publishes: deque[np.ndarray] = deque(maxlen=2)
        self.stop_requested = self.stopping = False
        self.open_ranks = set(range(topology.size))
        self.ports: dict[int, LocalPort] = {}

    def port(self, rank: int) -> LocalPort:
        """Return the port of a world rank."""
        role, _ = self.topology.role(rank)
        self.ports[rank] = {LEARNER: LocalLearnerPort, REPLAY: LocalReplayPort}.get(role, LocalActorPort)(self, rank)
        return self.ports[rank]

    @staticmethod
    def new_request(replay: int) -> _Request:
        """Return a request that nobody has answered."""
        return _Request(replay)

    def replay_ports(self) -> list[LocalReplayPort]:
        """Return the ports of the replay ranks, in replay index order."""
        return [self.ports[rank] for rank in self.topology.replay_ranks_range]

    @property
    def in_flight(self) -> int:
        """Messages sent but not received."""
        return sum(map(len, [*self.intake, *self.to_replay, self.requests, self.announcements]))


class _Request:
    """One sample request: open until ``message`` is set or it is refused."""

    def __init__(self, replay: int):
        self.replay, self.message, self.refused = replay, None, False


class LocalPort(Refusing):
    """What every role may ask (see ``apex.ports.Port``)."""

    def __init__(self, world: LocalWorld, rank: int):
        self.world, self.rank = world, rank
        self.role, self.index = world.topology.role(rank)
        self.ranks_here = world.topology.size
        self.refusals = Refusals(world.topology.name(rank))

    def progress(self) -> None:
        """Nothing moves by itself here."""

    def send_report(self, vector: np.ndarray) -> bool:
        """Append the report to the learner's list."""
        self.world.reports.append(Report(self.role, self.index, vector.copy()))
        return True

    def poll_announcement(self) -> np.ndarray | None:
        """Return what the learner has announced."""
        return self.world.announcements.pop(self.rank, None)

    def answer(self, words: np.ndarray) -> None:
        """Append the answer to the learner's list."""
        self.world.answers.append(Answer(self.role, self.index, words.copy()))

    def request_stop(self) -> None:
        """Set the flag that the learner reads."""
        self.world.stop_requested = True

    @property
    def stopping(self) -> bool:
        """The learner has ended the run."""
        return self.world.stopping

    def finish(self) -> None:
        """Count this rank as done."""
        self.world.open_ranks.discard(self.rank)

    @property
    def finished(self) -> bool:
        """All ranks are done and all mailboxes are empty."""
        return not self.world.open_ranks and not self.world.in_flight

    def waits_for(self) -> str:
        """Say what is not done."""
        names = [self.world.topology.name(rank) for rank in sorted(self.world.open_ranks)]
        return f"{self.world.in_flight} messages in flight and for {', '.join(names) or 'nobody'} to finish"


class LocalActorPort(LocalPort):
    """Actor and evaluator (see ``apex.ports.ActorPort``)."""

    about = None

    def __init__(self, world: LocalWorld, rank: int):
        super().__init__(world, rank)
        self._wanted: tuple[int, np.ndarray] | None = None
        self._credits = IntakeCredits(world.topology.replay_ranks, self.index, world.limits.intake_in_flight)
        self._completed: list[int] = []

    def request_weights(self, min_learner_steps: int, into: np.ndarray) -> None:
        """Note the wish; ``poll_weights`` fulfils it."""
        self._wanted = self._wanted or (min_learner_steps, into)

    def poll_weights(self) -> bool:
        """Copy the newest publish once it is new enough."""
        newest = self.world.newest
        if self._wanted is None or newest is None or weight_header(newest)[1] < self._wanted[0]:
            return False
        self._wanted[1][:] = newest
        self._wanted = None
        if self.rank == self.world.topology.evaluator_rank:
            self.world.evaluator_publishes.append(newest)
        return True

    def intake_memory(self, rows: int, nbytes: int) -> np.ndarray:
        """Return plain memory."""
        return aligned_bytes(rows, nbytes)

    def can_send_intake(self) -> bool:
        """Whether some replay rank's mailbox has room for one more of this actor's batches."""
        return self._credits.free()

    def send_intake(self, token: int, message: np.ndarray) -> None:
        """Put the batch into the mailbox of the next replay rank that has room."""
        self.world.intake[self._credits.take()].append((self, token, message))

    def completed_intake(self) -> list[int]:
        """Return the tokens of received batches."""
        done, self._completed = self._completed, []
        return done

    def received(self, token: int, replay: int) -> None:
        """The replay rank has taken the batch."""
        self._credits.give_back(replay)
        self._completed.append(token)


class LocalReplayPort(LocalPort):
    """Replay rank (see ``apex.ports.ReplayPort``)."""

    def __init__(self, world: LocalWorld, rank: int):
        super().__init__(world, rank)
        self._open: deque[_Request] = deque()

    def poll(self, landing: np.ndarray | None):
        """Return the learner's messages first, then intake."""
        if self.world.to_replay[self.index]:
            event = self.world.to_replay[self.index].popleft()
            if isinstance(event, _Request):
                self._open.append(event)
                return SampleRequestEvent()
            return event
        box = self.world.intake[self.index]
        if landing is None or not box:
            return None
        actor, token, message = box.popleft()
        landing[: len(message)] = message
        actor.received(token, self.index)
        return IntakeEvent(len(message), actor.index)

    def sample_buffer(self) -> np.ndarray:
        """Return a new buffer."""
        return aligned_bytes(self.world.limits.sample_nbytes)

    def send_sample(self, buffer: np.ndarray) -> None:
        """Answer the oldest open request."""
        self._open.popleft().message = buffer

    def refuse_sample(self) -> None:
        """Answer the oldest open request with nothing."""
        self._open.popleft().refused = True

    @property
    def quiet(self) -> bool:
        """Whether both mailboxes are empty."""
        return not self.world.to_replay[self.index] and not self.world.intake[self.index]


class LocalLearnerPort(LocalPort):
    """Learner (see ``apex.ports.LearnerPort``)."""

    def progress(self) -> None:
        """Forget refused requests."""
        while self.world.requests and self.world.requests[0].refused:
            self.world.requests.popleft()
        while self.stopping and self.world.requests and self.world.requests[0].message is not None:
            self.world.requests.popleft()

    def request_sample(self, replay: int) -> None:
        """Put a request into the replay rank's mailbox."""
        request = _Request(replay)
        self.world.requests.append(request)
        self.world.to_replay[replay].append(request)

    def poll_sample(self) -> tuple[int, np.ndarray] | None:
        """Return the oldest request's batch if it has been drawn."""
        if not self.world.requests or self.world.requests[0].message is None:
            return None
        request = self.world.requests.popleft()
        return request.replay, request.message

    def send_priorities(self, replay: int, message: np.ndarray) -> None:
        """Put a copy into the replay rank's mailbox."""
        self.world.to_replay[replay].append(PriorityEvent(message.copy()))

    def publish(self, message: np.ndarray) -> None:
        """Keep a copy as the newest."""
        self.world.newest = message.copy()

    def poll_reports(self) -> list[Report]:
        """Return the reports since the last call."""
        reports, self.world.reports = self.world.reports, []
        return reports

    def announce(self, rank: int, words: np.ndarray) -> None:
        """Keep a copy for the rank."""
        self.world.announcements[rank] = words.copy()

    def poll_answers(self) -> list[Answer]:
        """Return the answers since the last call."""
        answers, self.world.answers = self.world.answers, []
        return answers

    def state(self) -> tuple[dict[str, np.ndarray], dict]:
        """Return all that is on its way in this world: arrays and plain values."""
        return local_state.save(self.world)

    def restore(self, arrays: dict[str, np.ndarray], values: dict) -> None:
        """Put back what ``state`` returned; to be called once all ports have been made."""
        local_state.restore(self.world, arrays, values)

    def awaited(self) -> set[int]:
        """Return the ranks that are not done."""
        return set(self.world.open_ranks)

    def sent_to_evaluator(self, param_version: int) -> np.ndarray | None:
        """Return one of the last two publishes the evaluator was given."""
        return next((m for m in self.world.evaluator_publishes if weight_header(m)[0] == param_version), None)

    @property
    def stop_requested(self) -> bool:
        """Some role asked to end the run."""
        return self.world.stop_requested

    def stop(self) -> None:
        """Tell every role that the run ends."""
        self.world.stopping = True
