"""Counters, reports, rows of the log and their TensorBoard scalars."""

import json
import subprocess
import sys

import numpy as np
import pytest

from apex.metrics import MAX_REPORT, REPORT_FIELDS, ROW_FIELDS, Counters, Hub
from apex.tensorboard_log import TAGS, Scalars


class FakeClock:
    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


def report(role, **values):
    counters = Counters(role)
    for name, value in values.items():
        counters.set(name, value)
    return counters.vector()


def test_a_report_has_the_documented_fields_in_order():
    vector = report("replay", inserted=1, wait_s=10)
    assert vector.dtype == np.float64 and vector.shape == (len(REPORT_FIELDS["replay"]),)
    assert vector[0] == 1 and vector[REPORT_FIELDS["replay"].index("wait_s")] == 10
    assert MAX_REPORT == max(map(len, REPORT_FIELDS.values())) == 19


def test_add_accumulates_and_set_replaces():
    counters = Counters("actor")
    counters.add("episodes")
    counters.add("agent_steps", 16)
    counters.add("agent_steps", np.int64(16))
    counters.set("wait_s", 3)
    counters.set("wait_s", 4)
    assert (counters["episodes"], counters["agent_steps"], counters["wait_s"]) == (1, 32, 4)


@pytest.mark.parametrize("use", [lambda c: c.add("los"), lambda c: c.set("los", 1), lambda c: c["los"]])
def test_a_name_the_role_does_not_report_is_refused(use):
    with pytest.raises(KeyError, match="los"):
        use(Counters("learner"))


@pytest.mark.parametrize("role", REPORT_FIELDS)
def test_counters_survive_the_round_trip_through_a_padded_vector(role):
    values = np.arange(1.0, len(REPORT_FIELDS[role]) + 1)
    padded = np.concatenate([values, np.full(MAX_REPORT - len(values), -9.0)])
    counters = Counters.from_vector(role, padded)
    assert [counters[name] for name in REPORT_FIELDS[role]] == values.tolist()
    np.testing.assert_array_equal(counters.vector(), values)


def test_the_hub_takes_a_report_padded_to_the_length_of_the_longest(clock):
    hub, padded = Hub(1, 1, clock), np.full(MAX_REPORT, -9.0)
    padded[: len(REPORT_FIELDS["evaluator"])] = report("evaluator", evaluations=2, eval_return=5)
    hub.update("evaluator", 0, padded)
    row = hub.row()
    assert (row["evaluations"], row["eval_return"]) == (2, 5)


def test_a_report_of_the_wrong_length_or_rank_is_refused():
    hub = Hub(2, 1)
    with pytest.raises(ValueError, match="a report of actor has 15 to 19"):
        hub.update("actor", 0, np.zeros(5))
    with pytest.raises(IndexError, match="actor 2"):
        hub.update("actor", 2, Counters("actor").vector())
    with pytest.raises(IndexError):
        hub.update("actor", -1, Counters("actor").vector())
    with pytest.raises(KeyError):
        hub.update("critic", 0, np.zeros(10))


def test_before_any_report_a_row_holds_zero_counts_and_unknown_measurements(clock):
    row = Hub(2, 1, clock).row()
    assert tuple(row) == ROW_FIELDS
    unknown = {key for key, value in row.items() if value is None}
    rates = {
        "agent_steps_per_s",
        "transitions_per_s",
        "learner_steps_per_s",
        "learner_wait_pct",
        "actor_wait_pct",
    }
    measured = {"staleness", "loss", "td_error", "q_value", "grad_norm", "train_return", "eval_return"}
    assert unknown == rates | measured  # no time has passed, so no rate is known either
    assert all(row[key] == 0 for key in set(ROW_FIELDS) - unknown)


def test_rates_are_differences_over_the_time_since_the_previous_row(clock):
    hub = Hub(2, 1, clock)
    hub.update("actor", 0, report("actor", agent_steps=100, transitions=80))
    hub.update("actor", 1, report("actor", agent_steps=300, transitions=120))
    hub.update("learner", 0, report("learner", learner_steps=10))
    clock.now += 4
    row = hub.row()
    assert (row["agent_steps_per_s"], row["transitions_per_s"], row["learner_steps_per_s"]) == (
        100.0,
        50.0,
        2.5,
    )
    hub.update("actor", 1, report("actor", agent_steps=316, transitions=120))
    clock.now += 2
    row = hub.row()
    assert (row["agent_steps_per_s"], row["transitions_per_s"], row["learner_steps_per_s"]) == (8.0, 0.0, 0.0)
    assert (row["wall_s"], row["agent_steps"], row["transitions"], row["learner_steps"]) == (
        6.0,
        416,
        200,
        10,
    )


def test_a_lost_report_costs_nothing(clock):
    whole, lossy = Hub(1, 1, clock), Hub(1, 1, clock)
    for steps in (10, 25, 70):
        clock.now += 1
        whole.update("actor", 0, report("actor", agent_steps=steps))
        if steps != 25:
            lossy.update("actor", 0, report("actor", agent_steps=steps))
    assert whole.row() == lossy.row()


def test_a_report_overtaken_by_a_newer_one_is_ignored(clock):
    hub = Hub(1, 1, clock)
    hub.update("learner", 0, report("learner", learner_steps=20, loss=0.5))
    hub.update("learner", 0, report("learner", learner_steps=19, loss=0.9))
    row = hub.row()
    assert (row["learner_steps"], row["loss"]) == (20, 0.5)


def test_the_hub_keeps_its_own_copy_of_a_report(clock):
    hub, vector = Hub(1, 1, clock), report("actor", agent_steps=5)
    hub.update("actor", 0, vector)
    vector[:] = 99
    assert hub.row()["agent_steps"] == 5


def test_waits_are_percent_of_the_interval_with_the_mean_over_actors(clock):
    hub = Hub(2, 1, clock)
    hub.update("learner", 0, report("learner", wait_s=1))
    hub.update("actor", 0, report("actor", wait_s=2))
    hub.update("actor", 1, report("actor", wait_s=4))
    clock.now += 8
    row = hub.row()
    assert (row["learner_wait_pct"], row["actor_wait_pct"]) == (12.5, 37.5)
    hub.update("learner", 0, report("learner", wait_s=5))
    clock.now += 2
    row = hub.row()
    assert (row["learner_wait_pct"], row["actor_wait_pct"]) == (100.0, 0.0)  # a late report is capped


def test_train_return_is_the_mean_over_episodes_finished_since_the_previous_row(clock):
    hub = Hub(2, 1, clock)
    hub.update("actor", 0, report("actor", episodes=2, return_sum=-30))
    hub.update("actor", 1, report("actor", episodes=1, return_sum=-12))
    assert hub.row()["train_return"] == -14.0
    assert hub.row()["train_return"] is None
    hub.update("actor", 1, report("actor", episodes=3, return_sum=-32))
    row = hub.row()
    assert (row["train_return"], row["episodes"]) == (-10.0, 5)


def test_replay_values_are_summed_over_replay_ranks(clock):
    hub = Hub(1, 2, clock)
    hub.update(
        "replay", 0, report("replay", inserted=100, sampled=300, size=50, capacity=100, stale_updates=1)
    )
    hub.update("replay", 1, report("replay", inserted=60, sampled=20, size=25, capacity=100))
    row = hub.row()
    assert (row["replay_size"], row["replay_fill"], row["samples_per_insert"]) == (75, 0.375, 2.0)
    assert row["stale_updates"] == 1


def test_restarts_of_environments_are_those_of_all_actors_and_the_evaluator(clock):
    hub = Hub(2, 1, clock)
    hub.update("actor", 0, report("actor", env_restarts=1))
    hub.update("actor", 1, report("actor", env_restarts=2))
    assert hub.row()["env_restarts"] == 3
    hub.update("evaluator", 0, report("evaluator", env_restarts=4))
    assert hub.row()["env_restarts"] == 7


def test_gauges_are_passed_on_as_they_are(clock):
    hub = Hub(1, 1, clock)
    learner = dict(loss=0.25, td_error=0.5, q_value=-3, grad_norm=8, staleness=1.5, param_version=7)
    hub.update("learner", 0, report("learner", **learner))
    evaluator = dict(evaluations=3, eval_return=412.5, eval_episodes=20, eval_version=6)
    hub.update("evaluator", 0, report("evaluator", **evaluator))
    row = hub.row()
    assert {key: row[key] for key in learner | evaluator} == learner | evaluator


def test_a_row_is_strict_json_of_plain_numbers_even_when_the_loss_is_not_finite(clock):
    hub = Hub(1, 1, clock)
    hub.update("learner", 0, report("learner", learner_steps=3, loss=np.nan, q_value=np.inf, grad_norm=1))
    hub.update("actor", 0, report("actor", episodes=1, return_sum=np.nan))
    clock.now += 1
    row = hub.row()
    json.dumps(row, allow_nan=False)
    assert {type(value) for value in row.values()} <= {int, float, type(None)}
    assert type(row["learner_steps"]) is int and type(row["agent_steps_per_s"]) is float
    assert row["loss"] is None and row["q_value"] is None and row["train_return"] is None


def test_the_last_row_measures_from_the_row_before_the_previous_one(clock):
    hub = Hub(1, 1, clock)
    for steps in (1000, 2000):
        clock.now += 10
        hub.update("learner", 0, report("learner", learner_steps=steps))
        hub.row()
    clock.now += 0.001
    hub.update("learner", 0, report("learner", learner_steps=2010))
    row = hub.row(last=True)
    assert row["learner_steps"] == 2010
    assert row["learner_steps_per_s"] == pytest.approx(1010 / 10.001)


def test_every_metric_of_a_row_has_a_distinct_grouped_tag():
    assert set(TAGS) == set(ROW_FIELDS) and len(set(TAGS.values())) == len(TAGS)
    assert {tag.split("/")[0] for tag in TAGS.values()} == {"run", "actor", "replay", "learner", "evaluator"}


def test_scalars_are_read_back_from_tensorboard_with_one_point_for_each_evaluation(tmp_path, clock):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    hub, scalars = Hub(1, 1, clock), Scalars(tmp_path)
    for steps, evaluations, eval_return in ((10, 0, np.nan), (20, 1, 50), (30, 1, 50), (40, 2, 50)):
        clock.now += 1
        hub.update("learner", 0, report("learner", learner_steps=steps, loss=steps / 100))
        hub.update("evaluator", 0, report("evaluator", evaluations=evaluations, eval_return=eval_return))
        scalars.write(hub.row())
    scalars.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()

    def points(tag):
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]

    assert points("learner/loss") == [(10, 0.1), (20, 0.2), (30, 0.3), (40, 0.4)]
    assert points("evaluator/eval_return") == [(20, 50), (40, 50)]
    tags = set(events.Tags()["scalars"])
    assert {"replay/size", "actor/agent_steps_per_s", "learner/wait_pct", "run/wall_s"} <= tags
    assert "actor/train_return" not in tags  # never known in this run


def test_the_log_and_its_views_import_nothing_heavy():
    code = (
        "import sys, apex.metrics, apex.run_folder, apex.tensorboard_log, launch.run.view, launch.cli.plot;"
        "print({'torch', 'mpi4py', 'rich', 'matplotlib', 'tensorboard'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
