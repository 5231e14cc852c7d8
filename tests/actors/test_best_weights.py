"""``best.pt``, written by the evaluator: the evaluated weights, never a worse return over a better one."""

import errno
import os

import numpy as np
import pytest
import torch

from actors.best_weights import BestWeights
from actors.evaluator import Evaluator
from apex import checkpoint
from apex.config import load
from apex.envs import env_spec
from apex.look import Unreadable
from apex.metrics import Counters
from apex.policy import Policy
from apex.ports import Report
from apex.run_folder import RunFolder
from apex.topology import EVALUATOR, make
from learner.run_log import RunLog

pytestmark = pytest.mark.usefixtures("as_before")

CONFIG = load("cartpole", ["algorithm.hidden=8", "evaluator.episodes=2"])


class NoPort:
    """What an evaluator asks of a port while nothing is sent."""

    stopping, finished, handover = False, False, None
    poll_weights = staticmethod(lambda: False)
    request_weights = staticmethod(lambda steps, into: None)
    send_report = staticmethod(lambda vector: True)
    poll_refusals = staticmethod(dict)


@pytest.fixture
def policy():
    return Policy(CONFIG, env_spec(CONFIG.env), NoPort)


def kept(folder):
    return checkpoint.load(folder / "best.pt")["eval_return"]


def test_only_a_better_evaluation_replaces_what_is_there(tmp_path, policy):
    best = BestWeights(tmp_path)
    for learner_steps, eval_return in enumerate([-3.0, -4.0, 2.0, 2.0, 1.0, np.nan, np.inf]):
        policy.learner_steps = learner_steps
        best.offer(policy, eval_return)
    state = checkpoint.load(tmp_path / "best.pt")
    assert (state["eval_return"], state["learner_steps"], best.eval_return) == (2.0, 2, 2.0)
    assert set(state) == {"online", "learner_steps", "eval_return"}
    network = policy.network.state_dict()
    assert all(torch.equal(state["online"][name], tensor) for name, tensor in network.items())


@pytest.mark.parametrize(
    "on_disk, of_checkpoint, offered, expected", [(5, 9, 7, 5), (9, 5, 7, 9), (5, 6, 7, 7)]
)
def test_a_resumed_evaluator_keeps_the_larger_of_checkpoint_and_disk(
    tmp_path, policy, on_disk, of_checkpoint, offered, expected
):
    BestWeights(tmp_path).offer(policy, float(on_disk))
    evaluator = Evaluator(CONFIG, env_spec(CONFIG.env), NoPort, tmp_path)
    counters = Counters(EVALUATOR).state_dict()
    evaluator.load_state_dict({"counters": counters, "next_steps": 0, "best_return": float(of_checkpoint)})
    evaluator.best.offer(policy, float(offered))
    evaluator.close()
    assert kept(tmp_path) == expected


def test_a_torn_file_is_replaced_and_one_that_the_disk_does_not_give_is_not(tmp_path, policy, monkeypatch):
    path = tmp_path / "best.pt"
    BestWeights(tmp_path).offer(policy, 3.0)
    whole, stat = path.read_bytes(), os.stat

    def failing(asked, *args, **options):
        if str(asked) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(asked, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        with pytest.raises(Unreadable, match=r"best\.pt cannot be read: Input/output error"):
            Evaluator(CONFIG, env_spec(CONFIG.env), NoPort, tmp_path)
    assert path.read_bytes() == whole
    path.write_bytes(whole[: len(whole) // 2])
    BestWeights(tmp_path).offer(policy, 1.0)
    assert kept(tmp_path) == 1.0


def test_a_full_disk_costs_one_warning_and_the_next_better_return_is_tried(tmp_path, policy, capsys):
    best = BestWeights(tmp_path / "run" / "checkpoints")
    best.offer(policy, 5.0), best.offer(policy, 6.0)
    told = capsys.readouterr().err
    assert told == "apex: warning: without best.pt: No such file or directory; the run goes on\n"
    assert not (tmp_path / "run").exists(), "a run folder that is removed stays removed"
    (tmp_path / "run").mkdir()
    best.offer(policy, 4.0)
    assert kept(best.path.parent) == 4.0


def test_the_return_that_is_told_is_that_of_the_weights_that_are_kept(tmp_path):
    told = []
    port = type("Port", (NoPort,), {"send_report": staticmethod(lambda vector: told.append(vector) or True)})
    evaluator = Evaluator(CONFIG, env_spec(CONFIG.env), port, tmp_path)
    evaluator._begin()
    while evaluator._episodes is not None:
        evaluator.work()
    assert not told and kept(tmp_path) > 0, "kept before the learner can end the run because of it"
    evaluator.work()
    assert Counters.from_vector(EVALUATOR, told[0])["eval_return"] == kept(tmp_path)
    evaluator.close()


TARGET = {"run__stop_at_target": "true", "run__target_return": 5}


@pytest.mark.parametrize("limits", [{}, TARGET], ids=["steps", "target"])
def test_the_result_tells_of_no_better_return_than_the_best_weights(runs, limits):
    run = runs("run", **limits)
    run.train(60)
    result, best = run.folder.result(), checkpoint.load(run.folder.checkpoints / "best.pt")
    assert 0 < result["eval_return"] <= best["eval_return"] and best["learner_steps"] <= 60
    evaluator = next(role for role in run.roles if role.counters.role == EVALUATOR)
    assert evaluator.best.eval_return == best["eval_return"]


@pytest.mark.parametrize("reason, told", [("learner_steps", 7.0), ("signal", 7.0), ("target_return", 5.0)])
def test_a_late_evaluation_counts_unless_an_earlier_one_ended_the_run(tmp_path, reason, told):
    folder = RunFolder(tmp_path)
    run_log = RunLog(CONFIG, make(CONFIG), folder, "cartpole")
    for number, eval_return in enumerate([5.0, 7.0], 1):
        counters = Counters(EVALUATOR)
        counters.add("evaluations", number)
        counters.set("eval_return", eval_return)
        run_log.on_report(Report(EVALUATOR, 0, counters.vector()))
        run_log.reason = reason
    run_log.close()
    assert folder.result()["eval_return"] == told
