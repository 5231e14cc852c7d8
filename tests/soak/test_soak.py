"""`make soak`: a real run that goes on for long.

No rank grows, and the counters of both ends agree when it has ended.

Not part of `make test`. Settings: SOAK_SECONDS, SOAK_PRESET and SOAK_TRANSPORTS, each run that long over each
transport.
"""

import json
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from disturbance import memory_of
from places import HELPERS, ROOT

from apex import config as configuration
from apex import topology as topologies
from apex.metrics import REPORT_FIELDS
from apex.run_folder import RunFolder
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY

SECONDS = int(os.environ.get("SOAK_SECONDS", "600"))
PRESET = os.environ.get("SOAK_PRESET", "cartpole")
TRANSPORTS = os.environ.get("SOAK_TRANSPORTS", "mpi zmq").split()
EVERY_S = 1.0
STARTS_S, WARM_S, ENDS_S = 120, 600, 60
SLEEPS_FROM_S, SLEEPS_S = (
    30,
    60,
)  # an actor, where the run is long enough for that to be over in its first half
# The ring takes memory only as it fills, so it is to be full before anything is measured.
OVERRIDES = (
    "replay.capacity=10000", "replay.min_size=1000", "run.stop_at_target=false",
    "run.max_learner_steps=1000000000",
    "run.max_wall_s=0", "run.log_period_s=1",
)  # fmt: skip
MIB = 1 << 20
GROWTH_PER_HOUR = 8 * MIB
FLOOR = MIB / 2  # blocks that the allocator takes late
NOISES = 3.0


class Trend(NamedTuple):
    """The least-squares line through the second half of a rank's samples. Bytes and seconds."""

    start: float  # of all samples, the first
    end: float  # and the last
    slope: float  # per second
    noise: float  # standard deviation from the line
    span: float  # of the second half

    @property
    def rise(self) -> float:
        """What the line rises over the second half."""
        return self.slope * self.span

    @property
    def allowed(self) -> float:
        """The most that it may: 8 MiB an hour, half a MiB, and three times the noise."""
        return GROWTH_PER_HOUR * self.span / 3600 + FLOOR + NOISES * self.noise


def trend(seconds: np.ndarray, nbytes: np.ndarray) -> Trend:
    """Return the trend of samples float64[n]."""
    half = len(seconds) // 2
    x, y = seconds[half:], nbytes[half:]
    slope, intercept = np.polyfit(x, y, 1)
    return Trend(nbytes[0], nbytes[-1], slope, float(np.std(y - (slope * x + intercept))), x[-1] - x[0])


class TestTheTrend:
    SECONDS = np.arange(600.0)

    def _of(self, nbytes) -> Trend:
        return trend(self.SECONDS, nbytes + np.random.default_rng(0).normal(0, 0.2 * MIB, 600))

    def test_a_leak_of_a_kilobyte_in_every_hundredth_of_a_second_is_seen(self):
        leak = self._of(1024 * 100 * self.SECONDS)
        assert leak.rise > leak.allowed
        assert leak.slope == pytest.approx(1024 * 100, rel=0.01)

    def test_noise_and_a_rise_that_ended_in_the_first_half_are_not(self):
        calm = self._of(50 * MIB * np.minimum(self.SECONDS / 250, 1.0))
        assert abs(calm.rise) < calm.allowed


@pytest.mark.slow
@pytest.mark.timeout(STARTS_S + WARM_S + SECONDS + ENDS_S + 60)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_rank_of_a_long_run_grows_and_the_counters_of_both_ends_agree(start, tmp_path, capsys, transport):
    config, command = _run(transport, tmp_path / "runs")
    topology, counters = topologies.make(config), tmp_path / "counters"
    counters.mkdir()
    job = start(command, {"PYTHONPATH": f"{HELPERS / 'counters'}:{ROOT}", "COUNTERS_FOLDER": str(counters)})
    folder = _until_warm(job, tmp_path / "runs")
    samples = _sample(job, [job.rank(rank) for rank in range(topology.size)], topology.actor_ranks[-1])
    job.process.send_signal(signal.SIGINT)
    ended = job.wait(ENDS_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    trends = {
        topology.name(rank): trend(samples[:, 0], samples[:, 1 + rank]) for rank in range(topology.size)
    }
    totals = totals_of(counters)
    assert len(list(counters.iterdir())) == topology.size, "every rank tells"
    with capsys.disabled():
        print(
            f"\n{PRESET} over {transport}, {SECONDS} s once replay is full\n"
            f"{_table(trends)}\n{_lines(totals)}"
        )
    assert not {name: t for name, t in trends.items() if t.rise > t.allowed}
    _check_counters(config, totals, folder)


def _run(transport: str, directory: Path) -> tuple:
    """Return the configuration of the run, and its command."""
    overrides = [*OVERRIDES, f"run.directory={directory}"]
    try:
        config = configuration.load(PRESET, [*overrides, f"run.transport={transport}"])
    except configuration.ConfigError as error:
        pytest.fail(str(error), pytrace=False)
    return config, command_of(transport, overrides)


def command_of(transport: str, overrides: list[str]) -> list[str]:
    """Return the command of a run."""
    settings = [text for value in overrides for text in ("--set", value)]
    return [sys.executable, "-m", "launch.cli.main", "train", PRESET, "--transport", transport, *settings]


def _until_warm(job, directory: Path) -> RunFolder:
    """Wait until replay is full and weights have been evaluated twice; return the run folder."""
    job.wait_until((directory / "latest").exists, STARTS_S, "a run folder")
    folder = RunFolder(directory / "latest")

    def is_warm() -> bool:
        time.sleep(EVERY_S)
        row = (folder.rows() or [{"replay_fill": 0, "evaluations": 0}])[-1]
        return row["replay_fill"] == 1.0 and row["evaluations"] >= 2

    job.wait_until(is_warm, WARM_S, "a full replay and two evaluations")
    return folder


def _sample(job, pids: list[int], sleeper: int) -> np.ndarray:
    """Return float64[samples, 1 + ranks].

    Time and memory of each rank, every second, while rank ``sleeper`` sleeps for a minute.
    """
    rows, began, signals = (
        [],
        time.monotonic(),
        {SLEEPS_FROM_S: signal.SIGSTOP, SLEEPS_FROM_S + SLEEPS_S: signal.SIGCONT},
    )
    if SECONDS / 2 <= SLEEPS_FROM_S + SLEEPS_S:
        signals = {}
    while (now := time.monotonic() - began) < SECONDS:
        assert job.process.poll() is None, "the run has ended by itself"
        for when in [when for when in signals if when <= now]:
            os.kill(pids[sleeper], signals.pop(when))
        rows.append([now, *map(memory_of, pids)])
        time.sleep(max(0.0, began + len(rows) * EVERY_S - time.monotonic()))
    return np.array(rows)


def totals_of(folder: Path) -> dict[str, dict[str, float]]:
    """Return role -> counter -> value, summed over the ranks of the role, as each counted at its end."""
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    totals = defaultdict(lambda: defaultdict(float))
    for values in told:
        role = values.pop("role")
        for name, value in values.items():
            totals[role][name] += value
    return totals


def _check_counters(config: configuration.Config, totals: dict, folder: RunFolder) -> None:
    """Check that what one end counts as sent the other counts as received."""
    actor, replay, learner, evaluator = (totals[role] for role in (ACTOR, REPLAY, LEARNER, EVALUATOR))
    steps, batch, published = learner["learner_steps"], config.learner.batch_size, learner["param_version"]
    assert replay["inserted"] == actor["transitions"] > 0
    assert steps * batch <= replay["sampled"] <= (steps + config.learner.prefetch) * batch
    assert published == 1 + steps // config.learner.publish_period
    assert 0 < evaluator["eval_version"] <= published
    last = folder.rows()[-1]
    assert (last["transitions"], last["learner_steps"]) == (actor["transitions"], steps), (
        "the last reports came to the log"
    )


def _table(trends: dict[str, Trend]) -> str:
    lines = [f"{'MiB':22}{'start':>8}{'end':>8}{'per hour':>10}{'rise':>8}{'allowed':>9}{'noise':>8}"]
    for name, t in trends.items():
        values = t.start, t.end, 3600 * t.slope, t.rise, t.allowed, t.noise
        lines.append(
            f"{name:22}"
            + "".join(f"{value / MIB:{width}.2f}" for value, width in zip(values, (8, 8, 10, 8, 9, 8)))
        )
    return "\n".join(lines)


def _lines(totals: dict) -> str:
    """Return the counters of each role on a line."""
    return "\n".join(
        f"{role}: " + ", ".join(f"{name} {totals[role][name]:.10g}" for name in REPORT_FIELDS[role])
        for role in REPORT_FIELDS
    )
