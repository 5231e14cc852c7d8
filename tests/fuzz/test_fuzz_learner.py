"""What a learner hears: samples, reports and answers that hold anything at all.

And announcements, which the other ranks hear.
"""

import json
import math
import random
import struct

import numpy as np
import pytest
import torch
from mutations import EDGES, mutate, overwrite
from small_checkpoints import verify

from apex.checkpoint import Part, complete
from apex.config import load
from apex.control import CheckpointAck, CheckpointRequest, EpsilonAck
from apex.metrics import REPORT_FIELDS
from apex.ports import SampleRequestEvent
from apex.run_folder import RunFolder
from apex.schema import EnvSpec, aligned_bytes, limits, sample_layout
from apex.topology import make
from launch.run.local import make_ports
from learner.learner import Learner
from learner.run_log import RunLog
from replay_rank.service import ReplayService

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SPEC, BATCH = EnvSpec((4,), "float32", 1, 2), 16
SAMPLES, REPORTS, ANSWERS, ANNOUNCEMENTS = 1_000, 20_000, 10_000, 5_000
SETTINGS = [
    f"learner.batch_size={BATCH}",
    "algorithm.hidden=8",
    "actor.count=2",
    "replay.min_size=100",
    "learner.max_skipped_steps=1000000",
    "run.max_learner_steps=100000000",
    "run.stop_at_target=false",
    "learner.checkpoint_period=100000000",
    "run.transport=local",
    "replay.error_buffer=9",
    "run.log_period_s=1000",
]


class World:
    """A real learner in a world of one process, whose other ranks say what the test has them say."""

    def __init__(self, folder):
        self.config = load("cartpole", [*SETTINGS, f"run.directory={folder}"])
        self.topology = make(self.config)
        self.folder = RunFolder(folder)
        self.folder.checkpoints.mkdir()
        self.ports = make_ports(self.topology, limits(self.config, SPEC))
        self.run_log = RunLog(self.config, self.topology, self.folder, "cartpole")
        self.learner = Learner(self.config, SPEC, self.ports[0], self.topology, self.run_log)

    @property
    def refused(self) -> int:
        return self.ports[0].refused

    def progress(self) -> None:
        """Let the messages of all ranks move."""
        for port in self.ports[1:]:
            port.progress()
        self.ports[0].progress()

    def acknowledge(self, role: str, index: int, ack) -> None:
        """Have a rank acknowledge a request."""
        self.ports[self.topology.rank(role, index)].acknowledge(ack)
        self.ports[0].progress()

    def answer_request(self, message: bytes) -> None:
        """Have the replay rank answer a request, and the learner take it."""
        self.learner.step(), self.ports[1].progress()
        while not isinstance(self.ports[1].poll(None), SampleRequestEvent):
            pass
        buffer = self.ports[1].sample_buffer()
        buffer[:] = np.frombuffer(message, np.uint8)
        self.ports[1].send_sample(buffer)
        self.learner.step()


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.run_log.scalars.close()


def good_sample(rng: np.random.Generator) -> bytes:
    layout = sample_layout(SPEC, BATCH)
    message = aligned_bytes(layout.nbytes)
    views = layout.views(message)
    views["size"][0], views["total"][0], views["minimum"][0] = 1000, 500.0, 0.001
    views["key"][:], views["probability"][:] = rng.integers(1, 10**6, BATCH), rng.uniform(1e-5, 1e-2, BATCH)
    views["action"][:], views["param_version"][:] = rng.integers(0, 2, BATCH), 1
    for name in ("reward", "discount", "obs", "next_obs"):
        views[name][...] = rng.random(views[name].shape)
    return message.tobytes()


def sample_is_good(message: bytes) -> bool:
    """Whether a learner may compute with it, in plain Python."""
    fields = sample_layout(SPEC, BATCH).fields
    read = {
        name: struct.unpack_from(f"<{n}{code}", message, fields[name].offset)
        for name, code, n in (
            ("total", "d", 1),
            ("minimum", "d", 1),
            ("probability", "d", BATCH),
            ("action", "i", BATCH),
        )
    }
    masses = (
        0 < read["minimum"][0] <= read["total"][0] < math.inf and read["minimum"][0] / read["total"][0] > 0
    )
    masses = masses and min(read["probability"]) >= 0.999 * read["minimum"][0] / read["total"][0]
    return masses and all(0 < p <= 1 for p in read["probability"]) and all(0 <= a < 2 for a in read["action"])


def test_a_sample_batch_is_trained_on_skipped_or_refused_and_the_networks_stay_finite(world, tried, tmp_path):
    tried.least = SAMPLES
    rng, nprng, learner = random.Random(1), np.random.default_rng(1), world.learner
    outcomes = {"trained": 0, "skipped": 0, "refused": 0}
    front = sample_layout(SPEC, BATCH).fields["obs"].offset
    for _ in range(SAMPLES):
        good = good_sample(nprng)
        width = rng.choice([4, 8])
        message = (
            overwrite(rng, good[:front], width) + good[front:]
            if rng.random() < 0.7
            else overwrite(rng, good, width)
        )
        message = good if rng.random() < 0.1 else message
        before = learner.train.learner_steps, learner.counters["skipped_steps"], world.refused
        world.answer_request(message)
        after = learner.train.learner_steps, learner.counters["skipped_steps"], world.refused
        change = [int(b - a) for a, b in zip(before, after)]
        assert sum(change) == 1, change
        assert (change[2] == 0) == sample_is_good(message)
        outcomes["trained"], outcomes["skipped"], outcomes["refused"] = (
            n + c for n, c in zip(outcomes.values(), change)
        )
        assert (learner.importance.smallest > 0).all()
        for path in (world.folder.path / "skipped").glob(
            "*"
        ):  # kept for people; here there would be too many
            path.unlink()
        tried()
    learner.train.check_finite()
    assert min(outcomes.values()) > SAMPLES / 50, outcomes
    steps = learner.train.learner_steps
    world.answer_request(good_sample(nprng))
    assert (
        learner.train.learner_steps == steps + 1
        and torch.isfinite(next(learner.train.online.parameters())).all()
    )


REAL = {"loss", "td_error", "q_value", "grad_norm", "staleness", "eval_return", "return_sum"}


def report_is_good(role: str, values) -> bool:
    for field, value in zip(REPORT_FIELDS[role], values):
        if field == "eval_return" and math.isinf(value):
            return False
        if field not in REAL and not 0 <= value <= 2**53:
            return False
    return True


def test_a_report_of_any_numbers_is_taken_or_refused_and_the_log_stays_strict_json(world, tried):
    tried.least = REPORTS
    rng, taken = random.Random(2), 0
    senders = [("actor", 0), ("actor", 1), ("replay", 0), ("evaluator", 0)]
    for number in range(REPORTS):
        role, index = rng.choice(senders)
        values = struct.pack(
            f"<{len(REPORT_FIELDS[role])}d", *(rng.random() * 100 for _ in REPORT_FIELDS[role])
        )
        values = (mutate(rng, values) if rng.random() < 0.3 else overwrite(rng, values)).ljust(
            len(values), b"\0"
        )[: len(values)]
        vector, before = np.frombuffer(values, np.float64), world.refused
        assert world.ports[world.topology.rank(role, index)].send_report(vector)
        world.progress(), world.progress()  # it is taken, and its sender knows
        world.learner._poll_reports()
        good = report_is_good(role, vector.tolist())
        assert (world.refused == before) == good, vector
        taken += good
        tried()
        if number % 100 == 0:
            json.dumps(world.run_log.hub.row(), allow_nan=False)
    assert REPORTS / 10 < taken < REPORTS * 0.9
    row = world.run_log.write_row()
    assert json.loads((world.folder.path / "metrics.jsonl").read_text().splitlines()[-1]) == json.loads(
        json.dumps(row)
    )


def acknowledged(number: int, error: int = 0) -> CheckpointAck:
    """Return what a rank says that has written its part of a checkpoint."""
    return CheckpointAck(number, error, {"counters": {"episodes": 1.0}})


def test_an_acknowledgement_of_no_requested_checkpoint_changes_nothing(world, tried):
    tried.least = ANSWERS
    rng, checkpoints = random.Random(3), world.learner.checkpoints
    checkpoints.start(0, world.learner._copy_state)
    number, pending = checkpoints._number, set(checkpoints._pending)
    senders = [("replay", 0), ("evaluator", 0), ("actor", 0), ("actor", 1)]
    for _ in range(ANSWERS):
        ack = acknowledged(rng.choice([*EDGES, 2, number]), rng.choice([*EDGES, 2]))
        if ack.number == number and ack.fault() is None:
            ack = ack._replace(error=-1) if rng.random() < 0.5 else EpsilonAck()
        before = world.refused
        world.acknowledge(*rng.choice(senders), ack)
        checkpoints.poll()
        assert (
            world.refused == before + 1
            and checkpoints._pending == pending
            and not checkpoints._writing.all_acknowledged.is_set()
        )
        tried()
    for sender in senders:
        if sender[0] != "evaluator":
            Part(checkpoints._writing.partial, "{}-{}".format(*sender)).finish({})
        world.acknowledge(*sender, acknowledged(number))
    checkpoints.poll()
    assert checkpoints._writing is None and [
        verify(folder)["learner_steps"] for folder in complete(world.folder.checkpoints)
    ] == [0]
    before = world.refused
    world.acknowledge("actor", 0, acknowledged(number))
    checkpoints.poll()
    assert world.refused == before + 1, "a second answer"


def test_a_request_of_any_numbers_is_acknowledged_or_refused(tmp_path, tried):
    tried.least = ANNOUNCEMENTS
    rng, config = random.Random(4), load("cartpole", [*SETTINGS, f"run.directory={tmp_path}"])
    ports = make_ports(make(config), limits(config, SPEC))
    service = ReplayService(config, SPEC, ports[1], 0, tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    answered = 0
    for _ in range(ANNOUNCEMENTS):
        request = CheckpointRequest(
            rng.choice([5, 6, *EDGES]), rng.choice([0, 100, *EDGES]), rng.choice([0, 1, 4, *EDGES])
        )
        good = 0 <= request.base < request.number and request.learner_steps >= 0
        before = ports[1].refused
        ports[0].request(1, request)
        service.step(), service.step(), ports[0].progress()
        acks = ports[0].poll_acks()
        assert (ports[1].refused - before, len(acks)) == (int(not good), int(good)), request
        assert not good or (acks[0].ack.number == request.number and acks[0].ack.error > 0), (
            "there is no such folder"
        )
        answered += good
        tried()
    assert answered > ANNOUNCEMENTS / 20
    assert list((tmp_path / "checkpoints").iterdir()) == []
