"""Who is lost, who is silent, and who takes which place on the ladder. The ports are made here.

``test_tolerance`` has real ones.
"""

import numpy as np
import pytest

from actors.actor import Actor
from actors.exploration import actor_epsilons
from apex.config import load
from apex.control import EpsilonAssignment
from apex.envs import env_spec
from apex.metrics import Counters, Hub
from apex.ports import LOST, NOT_REPLACED, REPLACED, Change
from apex.schema import aligned_bytes
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology
from learner import supervisor
from learner.supervisor import Supervisor

TOPOLOGY = Topology(6, 1)  # three actors, of ranks 3 to 5
CONFIG = load("cartpole", [
    "run.fault_tolerance=actors", "run.heartbeat_timeout_s=10", "run.shutdown_timeout_s=8",
    "run.max_replacements=2",
])  # fmt: skip


class Port:
    stopping, handover = False, None

    def __init__(self):
        self.changes, self.replaced, self.killed, self.left = [], [], [], set()

    def poll_changes(self):
        changes, self.changes = self.changes, []
        return changes

    def replace(self, rank, about):
        self.replaced.append((rank, about))

    def kill(self, rank):
        self.killed.append(rank)
        return True

    def awaited(self):
        return self.left


class Checkpoints:
    def __init__(self):
        self.owing, self.absent, self.told = set(), set(), {}

    def on_loss(self, rank):
        self.absent.add(rank)

    def on_replacement(self, rank):
        self.absent.discard(rank)

    def assign(self, rank, assignment):
        if rank not in self.owing:
            self.told[rank] = assignment
        return rank not in self.owing


class RunLog:
    def __init__(self, path):
        self.hub, self.folder = Hub(3, 1), type("Folder", (), {"path": path})


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


@pytest.fixture
def it(tmp_path, clock):
    return Supervisor(CONFIG, TOPOLOGY, Port(), Counters(LEARNER), RunLog(tmp_path), Checkpoints())


def let_pass(it, clock, seconds: float) -> None:
    """Step as a learner does, twice a second."""
    for _ in range(int(2 * seconds)):
        clock.now += 0.5
        it.step()


def test_a_new_process_begins_with_the_counters_of_the_old_one_and_its_own_number(it):
    vector = Counters(ACTOR).vector() + 7
    it.run_log.hub.update(ACTOR, 1, vector)
    for _ in range(2):
        it.port.changes = [Change(4, LOST, "killed")]
        it.step()
    (rank, first), (_, second) = it.port.replaced
    assert (
        rank == 4 and first["counters"] == vector.tolist() and first["folder"] == str(it.run_log.folder.path)
    )
    assert first["life"] != second["life"]
    assert it.counters["actors_lost"] == 2 and it.checkpoints.absent == {4}
    it.port.changes = [Change(4, REPLACED, "")]
    it.step()
    assert it.counters["actors_replaced"] == 1 and it.checkpoints.absent == set()


def test_the_third_loss_of_one_rank_ends_the_run_and_those_of_others_do_not_count(it):
    it.port.changes = [Change(rank, LOST, "killed") for rank in (4, 4, 3, 3, 5)]
    it.step()
    it.port.changes = [Change(4, LOST, "killed")]
    with pytest.raises(
        RuntimeError,
        match=r"actor 1 \(rank 4\) was lost again .* after 2 replacements \(run.max_replacements\)",
    ):
        it.step()


def test_who_sends_no_report_for_too_long_is_ended_and_nobody_else(it, clock):
    for _ in range(40):
        for role, index in ((ACTOR, 0), (ACTOR, 2), (EVALUATOR, 0)):
            it.on_report(role, index)
        it.on_report(ACTOR, 1) if clock.now < 1004 else None
        let_pass(it, clock, 0.5)
    assert set(it.port.killed) == {4}


def test_nobody_is_silent_while_the_learner_itself_was_held_up(it, clock):
    for rank in range(3):
        it.on_report(ACTOR, rank)
    it.on_report(EVALUATOR, 0)
    clock.now += 60.0
    it.step()
    assert it.port.killed == []
    let_pass(it, clock, 11.0)
    assert sorted(it.port.killed) == [2, 3, 4, 5]


def test_a_process_that_still_starts_is_given_time(it, clock):
    let_pass(it, clock, 100.0)
    assert it.port.killed == []
    let_pass(it, clock, 25.0)
    assert sorted(it.port.killed) == [2, 3, 4, 5]


def test_while_the_run_ends_only_who_is_awaited_is_ended_in_time_and_nobody_is_replaced(it, clock):
    it.port.stopping, it.port.left = True, {1, 4}  # 1 is a replay rank, for which 4 may wait
    let_pass(it, clock, 5.0)
    assert it.port.killed == []
    it.port.left = {4}
    let_pass(it, clock, 1.5)
    assert it.port.killed == [], "it has had no time yet"
    let_pass(it, clock, 1.0)
    assert it.port.killed == [4]
    it.port.changes = [Change(4, LOST, "killed")]
    it.step()
    assert it.port.replaced == []


def test_while_the_run_ends_an_actor_is_ended_that_a_replay_rank_at_work_waits_for(it, clock):
    it.port.stopping, it.port.left = True, {1, 4}
    for _ in range(6):
        it.on_report(REPLAY, 0)
        let_pass(it, clock, 0.5)
    assert it.port.killed == [4]


def test_who_hangs_after_its_last_report_is_ended_while_there_is_still_time_to_end_without_it(it, clock):
    it.port.stopping, it.port.left = True, {4}
    let_pass(it, clock, 0.5)
    it.on_report(ACTOR, 1)
    let_pass(it, clock, CONFIG.run.shutdown_timeout_s / 2 + 1)
    assert it.port.killed == [4]


def test_where_nobody_takes_a_lost_actors_place_those_left_share_the_whole_ladder(it):
    it.checkpoints.owing = {5}
    it.port.changes = [Change(4, LOST, "killed"), Change(4, NOT_REPLACED, "no slots")]
    it.step()
    assert set(it.checkpoints.told) == {3}
    it.checkpoints.owing = set()
    it.step()
    rungs = it.checkpoints.told
    assert rungs == {3: EpsilonAssignment(0, 2), 5: EpsilonAssignment(1, 2)}
    whole = np.concatenate([actor_epsilons(CONFIG.actor, *rung) for rung in rungs.values()])
    ladder = np.concatenate([actor_epsilons(CONFIG.actor, index, 3) for index in range(3)])
    assert (whole[0], whole[-1]) == (ladder[0], ladder[-1])


def test_whoever_joins_where_another_is_lost_for_good_takes_its_part_of_the_shared_ladder(it):
    it.port.changes = [
        Change(4, LOST, "killed"),
        Change(5, LOST, "killed"),
        Change(4, NOT_REPLACED, "no slots"),
    ]
    it.step()
    assert it.checkpoints.told[3] == EpsilonAssignment(0, 1), (
        "the only one that is there has the whole ladder"
    )
    it.port.changes = [Change(5, REPLACED, "")]
    it.step()
    assert [it.checkpoints.told[rank] for rank in (3, 5)] == [
        EpsilonAssignment(0, 2),
        EpsilonAssignment(1, 2),
    ]


def test_a_run_without_any_actor_fails_and_waits_for_none(it):
    it.port.changes = [Change(rank, what, "no slots") for rank in (2, 3, 4) for what in (LOST, NOT_REPLACED)]
    it.step()
    it.port.changes = [Change(5, LOST, "killed")]
    it.step()
    it.port.changes = [Change(5, NOT_REPLACED, "no slots")]
    with pytest.raises(
        RuntimeError, match="the last actor was lost, and no process can be started: no slots"
    ):
        it.step()


def test_an_actor_explores_from_its_new_place_on_and_answers():
    answers, rung = [], EpsilonAssignment(1, 2)
    port = type(
        "ActorPort",
        (Port,),
        {"intake_memory": staticmethod(aligned_bytes), "acknowledge": staticmethod(answers.append)},
    )
    actor = Actor(CONFIG, env_spec(CONFIG.env), port, 2, 3)
    actor.on_request(rung)
    assert (actor.epsilons == actor_epsilons(CONFIG.actor, 1, 2)).all() and len(answers) == 1
    actor.close()


def test_a_new_process_explores_and_resets_otherwise_than_the_one_before(tmp_path):
    seeds = []
    for life in (0, 1, 2):
        about = {"life": life, "counters": (Counters(ACTOR).vector() + life).tolist()}
        port = type("ActorPort", (Port,), {"intake_memory": staticmethod(aligned_bytes), "handover": about})
        actor = Actor(CONFIG, env_spec(CONFIG.env), port, 2, 3)
        seeds.append((actor.env_seed, actor.rng.random()))
        assert actor.counters["agent_steps"] == life
        actor.close()
    assert len({env for env, _ in seeds}) == len({draw for _, draw in seeds}) == 3
