"""One run of `apex compare`: a world of ranks in processes of its own, with a time limit."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from apex import envs, leftovers, processes, variables
from apex import topology as topologies
from apex.config import Config, ConfigError, load
from apex.run_folder import RunFolder
from apex.schema import intake_layout, intake_nbytes
from apex.topology import ACTOR, LEARNER, REPLAY
from launch.bench import synthetic
from launch.run import launchers

_STARTING_S = 40.0  # for the ranks to start and to end, on a busy machine
_PRESET_STARTING_S = 90.0
_LOOK_S = 0.25
_ENDS_S = 10.0  # a run of a preset that is told to end drains its messages and writes a checkpoint
_GONE_S = 5.0  # for the kernel to end what is killed
_MARK = "JOB_OF_COMPARISON"  # in the environment of every process of a job
_OUTER = ("OMPI_COMM_", "PMIX_", "PMI_", variables.PREFIX)  # an outer job's variables would mislead the ranks


@dataclass(frozen=True)
class Case:
    """One run: what is measured, and how the machine is kept meanwhile."""

    workload: str
    regime: str
    actors: int
    repetition: int
    transport: str


class Failed(RuntimeError):
    """A run did not give a result; the message is one line."""


def measure(case: Case, seconds: float, preset: str, limit_s: float = math.inf) -> dict:
    """Return the row of a run: every metric a number or None, and ``error`` where it failed."""
    row = {
        "transport": case.transport,
        "actors": case.actors,
        "regime": case.regime,
        "workload": case.workload,
    }
    row |= dict.fromkeys(synthetic.METRICS) | {"repetition": case.repetition}
    try:
        with (
            _load_generators((os.cpu_count() or 1) if case.regime == "busy" else 0),
            leftovers.folder("apex-compare-") as folder,
        ):
            if case.workload == "preset":
                row |= _preset(case, seconds, preset, folder, limit_s)
            else:
                row |= _synthetic(case, seconds, folder, limit_s)
    except Exception as error:  # whatever it is, the other runs go on
        what = "" if isinstance(error, (Failed, ConfigError)) else f"{type(error).__name__}: "
        row["error"] = f"{what}{error}".partition("\n")[0][:200]
    return row


def command(transport: str, ranks: int, module: str, arguments: list[str]) -> list[str]:
    """Return the command that starts ``python -m module arguments`` as the ranks of a transport's world."""
    launcher = launchers.mpi if transport.startswith("mpi") else launchers.zmq
    return [*launcher(ranks), *processes.python(module), *arguments]


# --- synthetic roles --------------------------------------------------------------------------------


def _synthetic(case: Case, seconds: float, folder: Path, limit_s: float) -> dict:
    ranks = topologies.make(synthetic.config(case.actors)).size
    arguments = [
        "--transport",
        case.transport,
        "--workload",
        case.workload,
        "--seconds",
        str(seconds),
        "--folder",
        str(folder),
    ]
    with Job(command(case.transport, ranks, "launch.bench.synthetic_rank", arguments), folder) as running:
        running.wait(min(2 * seconds + _STARTING_S, limit_s))
    return summarise(read_ranks(folder, ranks, running), sampling=case.workload != "intake")


def read_ranks(folder: Path, ranks: int, running: Job) -> list[dict]:
    paths = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    if not all(path.is_file() for path in paths):
        raise Failed(
            f"{sum(not path.is_file() for path in paths)} ranks left no result: {running.complaint()}"
        )
    return [json.loads(path.read_text()) for path in paths]


def summarise(ranks: list[dict], sampling: bool) -> dict:
    """Return the metrics of a run from what its ranks counted."""
    learner, replays, actors = (_of(ranks, role) for role in (LEARNER, REPLAY, ACTOR))
    config = synthetic.config(len(actors), len(replays))
    if any(replay["window_s"] is None for replay in replays):
        raise Failed("the run ended before its window did")
    total = {
        name: sum(replay[name] for replay in replays)
        for name in ("transitions_per_s", "bytes_per_s", "samples_per_s", "inserted")
    }
    cpu_s = sum(rank["cpu_s"] for rank in ranks)
    return {
        "transitions_per_s": total["transitions_per_s"],
        "mb_per_s": total["bytes_per_s"] / 1e6,
        "batches_per_s": total["samples_per_s"] / config.learner.batch_size if sampling else None,
        "sample_ms_p50": learner[0]["sample_ms_p50"],
        "sample_ms_p99": learner[0]["sample_ms_p99"],
        "learner_wait_pct": learner[0]["wait_pct"],
        "cpu_s_per_million": cpu_s / total["inserted"] * 1e6,
        "peak_mb": sum(rank["peak_mb"] for rank in ranks),
        "lost": _lost(learner[0], replays, actors, config.actor.intake_batch),
    }


def _of(ranks: list[dict], role: str) -> list[dict]:
    return sorted((rank for rank in ranks if rank["role"] == role), key=lambda rank: rank["index"])


def _lost(learner: dict, replays: list[dict], actors: list[dict], batch: int) -> int:
    """Return the transitions that were lost, duplicated or damaged, counted at both ends."""
    batches = synthetic.lost_batches(
        [actor["sent"] for actor in actors], [replay["received"] for replay in replays]
    )
    return batch * (batches + sum(replay["damaged"] for replay in replays)) + learner["damaged"]


# --- a real preset ----------------------------------------------------------------------------------


def _preset(case: Case, seconds: float, preset: str, folder: Path, limit_s: float) -> dict:
    """Train a preset for some seconds after its first learner step; rates are of the rows of its log."""
    overrides = preset_overrides(preset, case, folder)
    config = load(preset, overrides)
    arguments = ["train", preset, *(part for text in overrides for part in ("--set", text))]
    with Job([*processes.python("launch.cli.main"), *arguments], folder) as running:
        use, start = _Use(running), time.monotonic()
        deadline = start + min(_PRESET_STARTING_S + seconds, limit_s)
        _watch(running, use, lambda: any(row["learner_steps"] for row in _rows(folder)), deadline)
        use.mark(_rows(folder))
        end = time.monotonic() + synthetic.WARM_UP_S + seconds + config.run.log_period_s
        _watch(running, use, lambda: time.monotonic() >= end, deadline)
        return _preset_metrics(config, _rows(folder), use)


def _rows(folder: Path) -> list[dict]:
    """Return the rows of the log of the one run in ``folder``, as far as it has come."""
    run = next((path for path in folder.glob("runs/*") if not path.is_symlink()), None)
    return [] if run is None else RunFolder(run).rows()


def _watch(running: Job, use: _Use, holds: Callable[[], bool], deadline: float) -> None:
    """Wait until ``holds()``; raises :class:`Failed` where the run ends, or the deadline comes, before."""
    while not holds():
        use.look()
        if not running.running():
            raise Failed(f"the run ended early: {running.complaint()}")
        if time.monotonic() > deadline:
            raise Failed(f"too few learner steps within the time for one run: {running.complaint()}")
        time.sleep(_LOOK_S)


def preset_overrides(preset: str, case: Case, folder: Path) -> list[str]:
    """Return what a measured run of a preset sets: where it is written, and how often it writes its log."""
    return [
        f"run.directory={folder / 'runs'}", f"run.transport={case.transport}", f"actor.count={case.actors}",
        "run.log_period_s=0.5",
        "run.stop_at_target=false", f"replay.min_size={min(1_000, load(preset).replay.min_size)}",
    ]  # fmt: skip


def _preset_metrics(config: Config, rows: list[dict], use: _Use) -> dict:
    """Return the metrics of the rows after the first learner step; the first of these is warm-up."""
    after = [row for row in rows if row["learner_steps"]][1:]
    if len(after) < 2:
        raise Failed("the log has too few rows after the first learner step")
    first, last = after[0], after[-1]
    elapsed = last["wall_s"] - first["wall_s"]
    per_s = {name: (last[name] - first[name]) / elapsed for name in ("transitions", "learner_steps")}
    waits = [row["learner_wait_pct"] for row in after[1:] if row["learner_wait_pct"] is not None]
    return {
        "transitions_per_s": per_s["transitions"],
        "mb_per_s": per_s["transitions"] * _bytes_per_transition(config) / 1e6,
        "batches_per_s": per_s["learner_steps"],
        "learner_wait_pct": statistics.fmean(waits) if waits else None,
        "cpu_s_per_million": use.cpu_s_per_million(last["transitions"]),
        "peak_mb": use.peak_mb,
    }


def _bytes_per_transition(config: Config) -> float:
    spec = envs.env_spec(config.env)
    batch = config.actor.intake_batch
    layout = intake_layout(spec, batch, config.algorithm.n_step)
    return intake_nbytes(layout, spec, batch + config.algorithm.n_step + spec.stack - 1) / batch


class _Use:
    """CPU seconds of a job since a mark, and the largest sum of resident memory seen."""

    def __init__(self, running: Job):
        self._job = running
        self.peak_mb = self._cpu_s = 0.0
        self._marked = 0.0, 0  # CPU seconds and transitions at the mark

    def look(self) -> None:
        """Read the processes of the job."""
        cpu_s = resident_mb = 0.0
        for pid in self._job.processes():
            with contextlib.suppress(OSError):  # it has just ended
                about = processes.facts(pid)
                cpu_s += about.cpu_s
                resident_mb += about.resident_mb
        self._cpu_s, self.peak_mb = cpu_s, max(self.peak_mb, resident_mb)

    def mark(self, rows: list[dict]) -> None:
        """Count CPU seconds and transitions from here."""
        self.look()
        self._marked = self._cpu_s, rows[-1]["transitions"]

    def cpu_s_per_million(self, transitions: int) -> float | None:
        """Return the CPU seconds since the mark over the transitions since then."""
        cpu_s, before = self._cpu_s - self._marked[0], self._marked[1]
        return cpu_s / (transitions - before) * 1e6 if transitions > before else None


# --- processes --------------------------------------------------------------------------------------


class Job:
    """A command and every process it starts, in whichever session; leaving the context ends them all."""

    def __init__(self, arguments: list[str], folder: Path):
        self._output, self._mark = folder / "output", uuid.uuid4().hex
        self._arguments, self._resources = arguments, contextlib.ExitStack()
        self._own = {_MARK: self._mark, "TMPDIR": str(folder)}  # what launchers leave goes with the folder

    def __enter__(self) -> Job:
        shared = self._resources.enter_context(launchers.segments())
        with open(self._output, "wb") as output:
            environment = shared | _environment() | self._own
            self.process = processes.start(self._arguments, environment, output, subprocess.STDOUT)
        return self

    def __exit__(self, *_: object) -> None:
        if self.running():
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDS_S)
        processes.kill_all(self.processes, _GONE_S)
        self.process.wait()
        self._resources.close()

    def processes(self) -> list[int]:
        """Return the processes of the job that are alive."""
        pids = []
        for pid in processes.all_ids():
            with contextlib.suppress(OSError):  # it has just ended
                if processes.environment_of(pid).get(_MARK) == self._mark:
                    pids.append(pid)
        return pids

    def running(self) -> bool:
        """Whether the command has not ended."""
        return self.process.poll() is None

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; raises :class:`Failed` where it takes longer or the status is not 0."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done within {timeout_s:.0f} s: {self.complaint()}") from None
        if status:
            raise Failed(f"exit status {status}: {self.complaint()}")

    def complaint(self) -> str:
        """Return the line of the output that best says what went wrong."""
        lines = [
            line.strip() for line in self._output.read_text(errors="replace").splitlines() if line.strip()
        ]
        named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception", "Timeout"))]
        return (named or lines or ["it said nothing"])[0 if named else -1]


def _environment() -> dict[str, str]:
    """Return the environment of the ranks; what the user has set stays."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
    return processes.environment_for(launchers.ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, inherited)


@contextlib.contextmanager
def _load_generators(count: int) -> Iterator[None]:
    """Keep ``count`` processes beside that never rest."""
    spin = [sys.executable, "-S", "-E", "-c", "while True: pass"]
    generators = []
    try:
        for _ in itertools.repeat(None, count):
            generators.append(processes.start(spin))
        yield
    finally:
        for generator in generators:
            generator.kill()
            generator.wait()
