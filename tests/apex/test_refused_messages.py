"""Messages that a rank refuses are counted by kind; the log, TensorBoard and the view show the counts."""

import numpy as np

from apex import topology as topologies
from apex.config import load
from apex.envs import env_spec
from apex.metrics import ROW_FIELDS, Counters
from apex.refusals import KINDS, Refusals
from apex.run_folder import RunFolder
from apex.schema import limits
from apex.tensorboard_log import TAGS
from apex.transport.wire import Kind, refusal_kind
from launch.run import local, view
from launch.run.roles import build

REPLAY_RANK, ACTOR_RANK = 1, 3
SETTINGS = [
    "run.transport=local", "run.max_learner_steps=40", "run.log_period_s=0.05", "actor.envs=2",
    "replay.min_size=50",
    "learner.batch_size=8", "learner.checkpoint_period=1000", "evaluator.period=1000",
]  # fmt: skip


def test_a_run_logs_by_kind_what_its_ranks_have_refused(tmp_path, capfd, one_torch_thread):
    config = load("cartpole", SETTINGS)
    spec, topology, folder = env_spec(config.env), topologies.make(config), RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    ports = local.make_ports(topology, limits(config, spec))
    roles = [
        build(config, spec, topology, rank, port, folder, "cartpole", None, None)
        for rank, port in enumerate(ports)
    ]
    for _ in range(3):
        ports[ACTOR_RANK].wire.send_control(0, {"kind": "no such kind"})
        ports[0].wire.send_control(REPLAY_RANK, {"kind": "report", "values": []})
    ports[0].wire.send(REPLAY_RANK, Kind.PRIORITY, np.zeros(1, np.uint8))
    local.step_in_turn(roles)
    roles[0].close()
    row = list(folder.rows())[-1]
    assert {kind: row[f"refused_{kind}"] for kind in KINDS} == dict.fromkeys(KINDS, 0) | {
        "control": 6,
        "priority": 1,
    }
    told = [line for line in capfd.readouterr().err.splitlines() if "refused" in line]
    assert sorted(line.split(" refused ")[0] for line in told) == [
        "apex: learner (rank 0)",
        *["apex: replay 0 (rank 1)"] * 2,
    ], told


def test_the_first_refusal_of_each_kind_is_printed_and_every_one_is_counted(capfd):
    refusals = Refusals("actor 3 (rank 6)")
    for number in range(3):
        refusals.add("control", f"control message {number}")
        refusals.add("weights", f"publish {number}")
    assert capfd.readouterr().err.splitlines() == [
        "apex: actor 3 (rank 6) refused control message 0; more of this kind are only counted",
        "apex: actor 3 (rank 6) refused publish 0; more of this kind are only counted",
    ]
    assert refusals.count == 6 and refusals.poll() == {"control": 3, "weights": 3}
    refusals.add("control", "one more")
    assert refusals.count == 7 and refusals.poll() == {"control": 1} and refusals.poll() == {}


def test_every_kind_of_message_has_a_kind_of_refusal_and_a_metric():
    assert {refusal_kind(kind) for kind in (*Kind, 0, 99)} == set(KINDS)
    assert all(
        f"refused_{kind}" in ROW_FIELDS and TAGS[f"refused_{kind}"] == f"run/refused_{kind}" for kind in KINDS
    )


def test_the_view_shows_the_total_unless_it_is_zero():
    row = dict.fromkeys(ROW_FIELDS) | {"wall_s": 1.0}
    assert "refused" not in view.line(row) + str(view.table(row, "").caption)
    row |= {"refused_control": 4, "refused_intake": 1}
    assert "5 messages refused" in view.line(row) and "5 messages refused" in str(view.table(row, "").caption)


def test_counters_of_a_checkpoint_without_these_counts_begin_them_at_zero():
    state = {
        name: value
        for name, value in Counters("replay").state_dict().items()
        if not name.startswith("refused_")
    }
    counters = Counters("replay")
    counters.load_state_dict(state | {"inserted": 5.0})
    assert counters["inserted"] == 5 and counters["refused_control"] == 0
