"""What a transport between processes must stand.

A rank of any role that stops for long, and an end with everything on its way.

A new transport is tested by one fixture and an empty subclass; its program plays ``stress_endless`` as one
rank:

    from disturbance import RANKS, Disturbance, EndlessStorm

    @pytest.fixture
    def storm(start, tmp_path):
        return EndlessStorm(start, tmp_path / "storm", lambda folder: [...the command of RANKS ranks...])

    class TestMyTransportDisturbed(Disturbance):
        pass
"""

import contextlib
import json
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
from ledger import INTAKE
from port_conformance import judge_rounds
from stress_endless import SCENARIO

from apex.topology import Topology

RANKS = 5
TOPOLOGY = Topology(RANKS, 1)
ROLES = {"learner": 0, "replay": 1, "evaluator": 2, "actor": 3}
STOP_S, SETTLES_S, LOOKS_EVERY_S = 4.0, 1.0, 0.5
EVENT_S = 120.0  # for what takes well under a second where nobody else computes
PUBLISHES = 200  # while a receiver sleeps
_ACTING = TOPOLOGY.num_actors + 1
# For each: pyzmq tells in its own thread that a buffer is free, perhaps after the next request.
_NOT_YET_FREE = 3
PUBLISH_BUFFERS = (
    1 + _NOT_YET_FREE
) * _ACTING + 4  # one for each, the newest, the next, and the evaluator's last two
_LEDGER_NBYTES = 4 << 20  # for what is sent meanwhile
LARGEST_RISE = (
    SCENARIO.limits.prefetch * SCENARIO.limits.sample_nbytes
    + _ACTING * SCENARIO.weight_nbytes
    + _LEDGER_NBYTES
)
"""Bytes that may come to be on their way to or from one rank that were not before.

Without credits there would be no limit.
"""


class EndlessStorm:
    """A job in which all ranks send until told to end, once it has begun."""

    def __init__(self, start, folder: Path, command, env=None):
        folder.mkdir()
        self.folder = folder
        self.job = start(command(folder), env)
        self.until_traffic(least=20)  # buffers of all kinds have been used
        self.pids = [self.job.rank(rank) for rank in range(RANKS)]

    def status(self, rank: int, name: str):
        """Return what a rank last said of itself."""
        path = self.folder / f"status-{rank}"
        return json.loads(path.read_bytes())[name] if path.exists() else 0

    def until(self, holds, what: str) -> None:
        """Wait for an event."""
        self.job.wait_until(holds, EVENT_S, what)

    def until_all(self, name: str, more: int, ranks=range(RANKS)) -> None:
        """Wait until what each of these ranks counts under ``name`` has risen by ``more``."""
        before = {rank: self.status(rank, name) for rank in ranks}
        for rank in ranks:
            self.until(
                lambda rank=rank: self.status(rank, name) >= before[rank] + more,
                f"{more} more {name!r} of {TOPOLOGY.name(rank)}",
            )

    def until_traffic(self, least: int = 3) -> None:
        """Wait until every rank has sent and received more."""
        self.until_all("sent", least)
        self.until_all("received", least)

    @contextlib.contextmanager
    def stopped(self, rank: int):
        """A rank stands still, as where its machine swaps or a debugger holds it."""
        os.kill(self.pids[rank], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[rank], signal.SIGCONT)

    def memory(self) -> dict[int, int]:
        """Return rank -> bytes of its own, with its share of what ranks lend each other."""
        return {rank: memory_of(pid) for rank, pid in enumerate(self.pids)}

    def largest_rise(self, seconds: float) -> dict[int, int]:
        """Watch the memory this long; return rank -> bytes by which it was at most more than at first."""
        first, rise, end = self.memory(), dict.fromkeys(range(RANKS), 0), time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(LOOKS_EVERY_S)
            rise = {rank: max(rise[rank], now - first[rank]) for rank, now in self.memory().items()}
        return rise

    def ask_to_end(self) -> None:
        """Have every rank ask the learner to end the storm."""
        (self.folder / "end").touch()

    def problems(self, within_s: float) -> dict[str, list[str]]:
        """Wait for the end, in order; return what the ledgers of both ends of all messages say was wrong."""
        ended = self.job.wait(within_s)
        assert ended.returncode == 0, ended.stderr[-4000:]
        outcome = judge_rounds(TOPOLOGY, SCENARIO, [[self.left(rank)["ledger"] for rank in range(RANKS)]])
        assert outcome["counts"][INTAKE] > 0
        return {kind: texts for kind, texts in outcome["problems"].items() if texts}

    def left(self, rank: int) -> dict:
        """Return what a rank has left: its ``ledger``, and how many messages it has ``refused``."""
        return pickle.loads((self.folder / f"rank-{rank}").read_bytes())


def memory_of(pid: int) -> int:
    """Return the bytes in memory that a process alone answers for.

    Its own, and its share of memory that is shared.

    Without files, such as libraries: a share of theirs changes whenever any process of the machine starts or
    ends.
    """
    fields = dict(
        line.split(":") for line in (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    )
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))


class Disturbance:
    """Tests of a ``storm`` that goes on (see :class:`EndlessStorm`)."""

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_a_rank_stopped_for_seconds_makes_no_other_grow_and_then_goes_on_with_nothing_lost(self, storm):
        for role, rank in ROLES.items():
            with storm.stopped(rank):
                time.sleep(SETTLES_S)  # what credits there are is used
                others = [other for other in range(RANKS) if other != rank]
                reports = [storm.status(other, "reports") for other in others]
                rise = storm.largest_rise(STOP_S - SETTLES_S)
                more = [storm.status(other, "reports") - before for other, before in zip(others, reports)]
                assert max(rise.values()) < LARGEST_RISE, (role, rise)
                assert storm.status(ROLES["learner"], "publish buffers") <= PUBLISH_BUFFERS
                assert role != "learner" or max(more) <= 1, "a report was sent before the last one was taken"
            storm.until_traffic()
        storm.ask_to_end()
        assert storm.problems(EVENT_S) == {}
        assert [storm.left(rank)["refused"] for rank in range(RANKS)] == [0] * RANKS

    def test_a_sleeping_actor_and_evaluator_cost_a_learner_that_publishes_one_buffer_each(self, storm):
        with storm.stopped(ROLES["actor"]), storm.stopped(ROLES["evaluator"]):
            storm.until_all("published", PUBLISHES, [ROLES["learner"]])
            assert storm.status(ROLES["learner"], "publish buffers") <= PUBLISH_BUFFERS
        storm.until_traffic()
        storm.ask_to_end()
        assert storm.problems(EVENT_S) == {}

    def test_all_ranks_end_with_everything_on_its_way(self, storm, figure):
        learner, replay = ROLES["learner"], ROLES["replay"]
        acting = [rank for rank in range(RANKS) if rank not in (learner, replay)]
        with storm.stopped(replay):
            for rank in (learner, *acting):  # credits are used, samples asked for, weights asked for
                storm.until(
                    lambda rank=rank: storm.status(rank, "full"),
                    f"all that {TOPOLOGY.name(rank)} may have open",
                )
            with storm.stopped(learner):
                storm.until_all("steps", 200, acting)  # a report of each is on its way
                storm.ask_to_end()
                storm.until(lambda: all(storm.status(rank, "ending") for rank in acting), "requests to stop")
            # Priorities and a publish, and the word to stop, before replay has taken what came earlier.
            storm.until(
                lambda: all(storm.status(rank, "stopping") for rank in (learner, *acting)), "the word to stop"
            )
        since = time.monotonic()
        assert storm.problems(EVENT_S) == {}
        transport = type(self).__name__.removeprefix("Test")
        figure(
            f"s until all ranks had ended with everything on its way, {transport}", time.monotonic() - since
        )
