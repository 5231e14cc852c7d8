"""The pickled baselines of `apex compare`.

What arrives equals what was sent, and their ports keep the rules of `apex.ports`.
"""

import pickle

import numpy as np
import pytest

from apex.ports import IntakeEvent
from apex.schema import aligned_bytes, intake_nbytes, limits, weight_layout
from apex.topology import Topology
from apex.transport.local import LocalWorld
from launch.bench import synthetic
from launch.bench.pickled import Form, PickledWire, dumps
from launch.run import world
from launch.run.local import step_in_turn

CONFIG = synthetic.config(2)
FORM = Form(CONFIG, synthetic.SPEC)
TOPOLOGY = Topology(5, 1)
LIMITS = limits(CONFIG, synthetic.SPEC)


def travel(content):
    return pickle.loads(dumps(content))


# --- contents ---------------------------------------------------------------------------------------


def intake_message(rng, count, frames):
    """Return an intake message with pointers of every kind.

    Consecutive, zero frames, the same frame again.
    """
    message = aligned_bytes(intake_nbytes(FORM.intake, synthetic.SPEC, frames))
    message[:] = rng.integers(0, 256, message.shape, np.uint8)
    views = FORM._intake_views(message)
    views["header"][:] = count, frames, 1, 7
    for name in ("obs_frames", "next_obs_frames"):
        views[name][:] = rng.integers(-1, frames, views[name].shape)
        views[name][::2] = rng.integers(0, frames - 4, (25, 1)) + np.arange(4)
    for name in ("reward", "discount", "priority"):
        views[name][:] = rng.random(50)
    return message


@pytest.mark.parametrize("count, frames", [(50, 56), (50, 61), (1, 5), (17, 30)])
@pytest.mark.parametrize("seed", range(3))
def test_an_intake_batch_arrives_as_it_was_sent(count, frames, seed):
    rng = np.random.default_rng(seed)
    message, landing = intake_message(rng, count, frames), aligned_bytes(FORM.intake.nbytes)
    landing[:] = 0xA5  # the ring's place held another batch
    nbytes = FORM.intake_in(travel(FORM.intake_out(message)), landing)
    assert nbytes == len(message)
    sent, got = FORM._intake_views(message), FORM.intake.views(landing)
    assert got["header"].tolist() == [count, frames, 1, 7]
    for name in (
        "obs_frames",
        "next_obs_frames",
        "action",
        "reward",
        "discount",
        "priority",
        "param_version",
    ):
        assert np.array_equal(sent[name][:count], got[name][:count])
    used = np.unique([sent[name][:count] for name in ("obs_frames", "next_obs_frames")])
    used = used[used >= 0]
    assert np.array_equal(sent["frames"][used], got["frames"][used])


def test_what_travels_are_whole_stacks():
    message = synthetic.Batches(CONFIG, 0, 1).stamped(0, 3)
    _, transitions = travel(FORM.intake_out(message))
    views = FORM._intake_views(message)
    for row, (obs, next_obs, *_) in enumerate(transitions):
        assert np.array_equal(obs, views["frames"][views["obs_frames"][row]])
        assert np.array_equal(next_obs, views["frames"][views["next_obs_frames"][row]])
    assert len(dumps(FORM.intake_out(message))) > 50 * 2 * 4 * 84 * 84


def test_a_sample_batch_and_priorities_arrive_as_they_were_sent():
    rng = np.random.default_rng(0)
    sent, got = aligned_bytes(FORM.sample.nbytes), aligned_bytes(FORM.sample.nbytes)
    for name, view in FORM.sample.views(sent).items():
        view[:] = rng.integers(0, 100, view.shape) if name != "probability" else rng.random(view.shape)
    FORM.sample_in(travel(FORM.sample_out(sent)), got)
    assert np.array_equal(sent, got)
    priorities, returned = aligned_bytes(FORM.priority.nbytes), aligned_bytes(FORM.priority.nbytes)
    FORM.priority.views(priorities)["key"][:] = rng.integers(0, 2**62, 512)
    FORM.priorities_in(travel(FORM.priorities_out(priorities)), returned)
    assert np.array_equal(priorities, returned)


# --- ports ------------------------------------------------------------------------------------------


@pytest.fixture
def ports():
    return [
        world.make_port(PickledWire(wire, FORM), TOPOLOGY, LIMITS) for wire in LocalWorld(TOPOLOGY.size).wires
    ]


def test_synthetic_roles_over_pickled_ports_lose_nothing_and_end(ports, monkeypatch):
    monkeypatch.setattr(synthetic, "WARM_UP_S", 0.1)
    monkeypatch.setattr(synthetic, "_CHECKED", 1)
    learner = synthetic.SyntheticLearner(CONFIG, ports[0], True, 0.3, 0.0)
    replay = synthetic.MeasuredReplay(CONFIG, ports[1], 0, 2, True, 0.3)
    actors = [synthetic.SyntheticActor(CONFIG, ports[3 + i], i, 0.0) for i in range(2)]
    step_in_turn([learner, replay, synthetic.Idle(ports[2]), *actors])
    assert learner.batches > 0 and learner.damaged == 0
    assert replay.account.batches > 0 and replay.account.damaged == 0
    assert synthetic.lost_batches([actor.sent for actor in actors], [replay.account.received]) == 0
    replay.replay.check()
    found = replay.results()
    assert (
        found["transitions_per_s"] > 0
        and found["samples_per_s"] > 0
        and learner.results()["sample_ms_p50"] > 0
    )


def progress(ports, times=3):
    for _ in range(times):
        for port in ports:
            port.progress()


def test_an_actor_stops_at_its_credits_until_replay_takes_a_batch(ports):
    actor, replay = ports[3], ports[1]
    message = synthetic.Batches(CONFIG, 0, 1).stamped(0, 0)
    sent = 0
    while actor.can_send_intake():
        actor.send_intake(sent, message)
        sent += 1
    assert sent == LIMITS.intake_in_flight
    progress(ports)
    assert not actor.can_send_intake() and replay.poll(None) is None
    assert replay.poll(aligned_bytes(FORM.intake.nbytes)) == IntakeEvent(len(message), 0)
    progress(ports)
    assert actor.completed_intake() == [0] and actor.can_send_intake()


def test_weights_are_the_newest_once_new_enough_and_refused_at_the_end(ports):
    layout = weight_layout(5)
    message, into = aligned_bytes(layout.nbytes), aligned_bytes(layout.nbytes)
    learner, evaluator = ports[0], ports[2]
    evaluator.request_weights(10, into)
    for version, steps in ((1, 0), (2, 9), (3, 11)):
        layout.views(message)["header"][:] = version, steps
        learner.publish_buffer(len(message))[:] = message
        learner.publish()
        progress(ports)
        assert evaluator.poll_weights() == (steps > 10)
    assert layout.views(into)["header"].tolist() == [3, 11]
    ports[3].request_weights(99, into)
    progress(ports)
    learner.stop()
    for port in ports:
        port.finish()
    progress(ports, 6)
    assert all(port.finished for port in ports) and not ports[3].poll_weights()


def test_a_port_does_not_finish_while_a_request_for_samples_is_open(ports):
    learner, replay = ports[0], ports[1]
    learner.request_sample(0)
    progress(ports)
    learner.stop()
    for port in ports:
        port.finish()
    progress(ports, 6)
    assert not learner.finished and "sample" in learner.waits_for()
    assert replay.poll(None) is not None
    replay.refuse_sample()
    progress(ports, 6)
    assert all(port.finished for port in ports)
