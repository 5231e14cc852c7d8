"""`make soak`, second part: a run that loses an actor every few seconds comes to its count of transitions,
and nothing else is lost.

What each process of an actor sent, and what of it was taken, it writes into a file in memory as it goes, so
that it is known of those that were killed too.
"""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from places import HELPERS
from test_soak import PRESET, ROOT, SECONDS, TRANSPORTS, command_of, totals_of

from apex import config as configuration
from apex.run_folder import RunFolder

ACTORS = 3
TRANSITIONS = 500 * SECONDS
OVERRIDES = (
    "run.stop_at_target=false", "run.max_learner_steps=1000000000", "run.max_wall_s=0", "run.log_period_s=1",
    "run.fault_tolerance=actors",
    "run.max_replacements=1000000", f"actor.count={ACTORS}",
)  # fmt: skip
PAUSE_S = (3.0, 8.0)  # between two kills
STARTS_S, JOINS_S, ENDS_S = 120, 180, 60


def lives(folder: Path) -> dict[int, tuple[float, float]]:
    """Return pid -> transitions (sent, taken) of every process that an actor had."""
    return {int(path.name): tuple(np.fromfile(path, np.float64)) for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(STARTS_S + 4 * SECONDS + JOINS_S + ENDS_S)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_with_actors_killed_at_random_loses_only_what_the_dead_held(start, tmp_path, capsys, transport):
    counters, sent = tmp_path / "counters", tmp_path / "sent"
    counters.mkdir(), sent.mkdir()
    overrides = [*OVERRIDES, f"run.directory={tmp_path / 'runs'}"]
    config = configuration.load(PRESET, [*overrides, f"run.transport={transport}"])
    env = {
        "PYTHONPATH": f"{HELPERS / 'counters'}:{ROOT}",
        "COUNTERS_FOLDER": str(counters),
        "SENT_FOLDER": str(sent),
    }
    job = start(command_of(transport, overrides), env)
    job.wait_until(lambda: len(lives(sent)) == ACTORS, STARTS_S, "the actors")
    folder = RunFolder(tmp_path / "runs" / "latest")
    killed = _kill(job, sent, folder)
    job.wait_until(lambda: _row(folder, "actors_replaced") == len(killed), JOINS_S, "the last replacements")
    job.process.send_signal(signal.SIGINT)
    ended = job.wait(ENDS_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = lives(sent)
    inserted = totals_of(counters)["replay"]["inserted"]
    held = {pid: told[pid][0] - told[pid][1] for pid in killed}
    with capsys.disabled():
        print(f"\n{PRESET} over {transport}: {len(killed)} actors killed in {SECONDS} s")
        print(f"{inserted:.0f} transitions inserted, {TRANSITIONS} asked for")
        print(
            f"sent {sum(s for s, _ in told.values()):.0f}; the dead held {sum(held.values()):.0f}, "
            f"at most {max(held.values()):.0f} each"
        )
    assert _row(folder, "actors_lost") == _row(folder, "actors_replaced") == len(killed) > 0
    assert inserted >= TRANSITIONS
    sure = {
        pid: taken if pid in killed else sent for pid, (sent, taken) in told.items()
    }  # of the living all arrives
    assert sum(sure.values()) <= inserted <= sum(sent for sent, _ in told.values())
    assert max(held.values()) <= config.actor.in_flight * config.actor.intake_batch


def _kill(job, sent: Path, folder: RunFolder) -> set[int]:
    """Kill one actor after the other at random, until time and transitions are enough; return whom."""
    rng, killed, end = random.Random(0), set(), time.monotonic() + SECONDS
    latest = time.monotonic() + 4 * SECONDS
    while time.monotonic() < end or _row(folder, "transitions") < TRANSITIONS:
        assert job.process.poll() is None, "the run has ended by itself"
        assert time.monotonic() < latest, f"{_row(folder, 'transitions')} of {TRANSITIONS} transitions"
        pause = time.monotonic() + rng.uniform(*PAUSE_S)
        while time.monotonic() < pause:
            time.sleep(0.05)
        living = sorted(pid for pid in lives(sent) if pid not in killed)
        if time.monotonic() < end and living:
            victim = rng.choice(living)
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
    return killed


def _row(folder: RunFolder, name: str) -> int:
    rows = folder.rows()
    return rows[-1][name] if rows else 0
