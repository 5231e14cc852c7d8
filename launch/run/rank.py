"""One rank of a world: decide together that the run can start, then be the rank's role until the end."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from apex import envs, run_folder, run_lock, variables
from apex.checkpoint import Reader
from apex.config import Config, ConfigError, to_toml
from apex.ports import PeerLost
from apex.run_folder import RunFolder
from apex.say import say, warn
from apex.topology import ACTOR, EVALUATOR, LEARNER, LEARNER_RANK, REPLAY, Topology
from launch.run import meeting, preflight, resume, world
from launch.run.beginning import importing
from launch.run.outcome import leave_error, write_error_result
from launch.run.world import Worlds, threads

if TYPE_CHECKING:
    from apex.loop import StopSignals
    from apex.schema import EnvSpec
    from apex.transport.endpoint import Endpoint

T = TypeVar("T")

_LEARNER_COMPLAINS_S = 5.0
_OTHERS_START_S = 120.0  # where ranks begin their roles as they come


def run(config: Config, topology: Topology, preset: str, resumed: RunFolder | None = None) -> int:
    """Run this rank of a new run, or of the one in the folder ``resumed``; return its exit status.

    An exception here, in any thread, ends the whole job.
    """
    from apex.loop import StopSignals

    worlds, comm, failure = _meet(config, topology, preset)
    signals = (
        StopSignals()
    )  # before the ranks meet again, so that once one of them has a role all take signals
    if worlds.life():
        return (
            0
            if comm.join() is None
            else take_place(config, topology, comm, RunFolder(Path(comm.handover["folder"])))
        )
    try:
        refusal = _attempt(worlds.check_tolerance)[0] if config.run.fault_tolerance == "actors" else None
        if refusal is not None:
            return _refuse(comm.rank, refusal)
        refusal, spec, path, checkpoint = _agree_to_start(comm, config, topology, preset, resumed)
        if refusal is not None:
            return _refuse(comm.rank, refusal)
        failure.folder = RunFolder(path)
        port = _make_port(config, topology, spec, comm)
        failure.is_running = True
        signal.alarm(0)
        meeting.meet(comm.rank)
        # Where losses are survived there is no waiting for all: one that ends meanwhile is replaced.
        all_begin = partial(worlds.all_begin, comm) if config.run.fault_tolerance == "nobody" else None
        _be_role(
            config, topology, spec, comm.rank, port, failure.folder, preset, signals, checkpoint, all_begin
        )
        signals.ignore()
        return worlds.leave(config.run.fault_tolerance == "actors") or _status_of(comm.rank, failure.folder)
    except BaseException as error:
        failure.end_job(error)


def _status_of(rank: int, folder: RunFolder) -> int:
    """Return 1 on the learner's rank where the result could not be kept, else 0."""
    return 1 if rank == LEARNER_RANK and folder.result() is None else 0


def _meet(config: Config, topology: Topology, preset: str) -> tuple[Worlds, Any, _Failure]:
    """Return ``(transport's module, world, how this rank fails)`` once all have met; a signal exits."""
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # as the others are: none waits for Python, which MPI_Init does not let run
    told = world.from_environment()
    assert told is not None, "a rank belongs to a world"
    meeting.arrive(told[0])
    if (
        config.run.transport == "mpi" and variables.RUN_FOLDER not in os.environ
    ):  # there is no launcher to give up
        signal.alarm(
            ceil(config.run.meet_s)
        )  # a rank that ends before may be waited for for ever, inside MPI_Init
    worlds, _ = world.load(config.run.transport)
    comm = worlds.world(topology.size)
    failure = _Failure(config, topology, comm.rank, preset)
    failure.folder = (
        RunFolder(os.environ[variables.RUN_FOLDER]) if variables.RUN_FOLDER in os.environ else None
    )
    try:
        worlds.meet(comm, config.run.watchdog_s, config.run.meet_s)
    except PeerLost as error:
        failure.end_job(error)
    if config.run.fault_tolerance == "nobody":
        signal.alarm(0)
    return worlds, comm, failure


def take_place(config: Config, topology: Topology, joining: Any, folder: RunFolder) -> int:
    """Run a process that takes the place of an acting rank that was lost; return its exit status."""
    from apex.loop import StopSignals
    from apex.schema import limits

    signals = StopSignals()
    worlds, wires = world.load(config.run.transport)
    rank = joining.handover["rank"]
    failure = _Failure(config, topology, rank, folder.path.name)
    failure.folder, failure.is_running = folder, True
    signal.alarm(0)
    try:
        connected = wires.connect(joining)  # before what takes long to import: the others wait
        spec = envs.env_spec(config.env)
        port = world.make_port(wires.join_wire(connected, topology), topology, limits(config, spec))
        _be_role(config, topology, spec, rank, port, folder, folder.path.name, signals, None)
        signals.ignore()
        return worlds.leave(True)
    except BaseException as error:
        failure.end_job(error)


class _Failure:
    """How this rank fails: tell why, and end the job with it, since the other ranks would wait for ever."""

    def __init__(self, config: Config, topology: Topology, rank: int, preset: str):
        self.config, self.topology, self.rank, self.preset = config, topology, rank, preset
        self.folder: RunFolder | None = None
        self.is_running = False  # all ranks have met
        threading.excepthook = self._in_thread

    def end_job(self, error: BaseException) -> NoReturn:
        """End all ranks with status 1, even where the error cannot be written down; does not return.

        Where the run survives the loss of this rank, only this one ends.
        """
        alone = (
            self.is_running
            and self.config.run.fault_tolerance == "actors"
            and self.topology.is_acting(self.rank)
        )
        try:
            if not (alone and isinstance(error, PeerLost) and self._has_ended_well()):
                self._report(error, alone and not isinstance(error, PeerLost))
        finally:
            world.load(self.config.run.transport)[0].abort(self.config.run.fault_tolerance == "actors")

    def _has_ended_well(self) -> bool:
        """Whether the others have ended the run, and only this rank has not heard of it."""
        result = None if self.folder is None else self.folder.result()
        return result is not None and result["status"] == 0

    def _in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            self.end_job(args.exc_value or args.exc_type())

    def _report(self, error: BaseException, alone: bool) -> None:
        """Leave the traceback and the result where the launcher, or the user, finds them."""
        text = f"{self.topology.name(self.rank)} failed:\n{''.join(traceback.format_exception(error))}"
        if isinstance(error, (PeerLost, ConfigError)):
            text = f"apex: {error}\n"
        if alone:
            warn(text, end="")
            return
        written = self.folder is not None and leave_error(self.folder, text)
        if not written or variables.RUN_FOLDER not in os.environ:
            warn(text, end="")
        if self.folder is not None:
            write_error_result(self.folder, self.config, self.topology, self.preset, 1)


def _agree_to_start(
    comm: Any, config: Config, topology: Topology, preset: str, resumed: RunFolder | None
) -> tuple[str | None, Any, Any, Any]:
    """Return ``(refusal, environment's spec, run folder, checkpoint)``, the same on every rank."""
    from launch.run import memory

    worlds, _ = world.load(config.run.transport)
    path = os.environ.get(variables.RUN_FOLDER)
    if path is not None:  # the launcher has checked
        return (
            None,
            worlds.from_learner(comm, lambda: envs.env_spec(config.env)),
            path,
            os.environ.get(variables.CHECKPOINT),
        )
    refusal, spec = worlds.from_learner(comm, lambda: _attempt(preflight.check, config))
    if refusal is None:
        refusal = worlds.first_from_each_host(
            comm, lambda ranks: _attempt(memory.check, config, spec, topology, ranks)[0]
        )
    begun = None
    if refusal is None:
        refusal, begun = worlds.from_learner(comm, lambda: _attempt(begin, config, preset, resumed))
    return refusal, spec, *(begun or (None, None))


def _attempt(call: Callable[..., T], *args: object) -> tuple[str | None, T | None]:
    """Return ``(refusal, None)`` or ``(None, result)`` of a call that may refuse."""
    try:
        return None, call(*args)
    except ConfigError as error:
        return str(error), None


def begin(config: Config, preset: str, resumed: RunFolder | None) -> tuple[Path, Path | None]:
    """Make the folder of a new run, or prepare a resumed one; return it and its checkpoint.

    This process holds the folder's lock (:mod:`apex.run_lock`) from then on. Raises :class:`ConfigError`.
    """
    if resumed is None:
        return start_folder(config, preset), None
    run_lock.take(resumed.path)
    try:
        checkpoint = resume.choose(config, resumed)
        resume.prepare(config, resumed, checkpoint)
    except BaseException:
        run_lock.give(resumed.path, withdraw=True)
        raise
    return resumed.path, checkpoint


def start_folder(config: Config, preset: str) -> Path:
    """Make the run folder and write the resolved configuration; raises :class:`ConfigError`."""
    try:
        path = run_folder.create(config.run.directory, preset, config.run.seed)
        run_lock.take(path)
        folder = RunFolder(path)
        folder.write_config(to_toml(config))
        folder.reserve()
    except OSError as error:
        raise ConfigError(
            f"run.directory = '{config.run.directory}' cannot be written to: {error.strerror}"
        ) from None
    return path


def _refuse(rank: int, refusal: str) -> int:
    if rank == 0:
        warn(f"apex: {refusal}")
    return 2


def _make_port(config: Config, topology: Topology, spec: EnvSpec, comm: Any) -> Endpoint:
    from apex.schema import limits

    bounds, command = (
        limits(config, spec),
        world.replacement_command() if config.run.fault_tolerance == "actors" else None,
    )
    wire = world.load(config.run.transport)[1].make_wire(comm, topology, bounds, command=command)
    return world.make_port(wire, topology, bounds)


def _be_role(
    config: Config, topology: Topology, spec: EnvSpec, rank: int, port: Endpoint, folder: RunFolder,
    preset: str,
    signals: StopSignals, checkpoint: Path | None, all_begin: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    from apex.loop import drive, wait_of
    from apex.watchdog import Watchdog
    from launch.run import view
    from launch.run.roles import build, limit_torch_threads

    role_name = topology.role(rank)[0]
    wait = wait_of(port)
    if wait.crowded and role_name in (ACTOR, EVALUATOR):
        os.nice(config.actor.nice)
    speaks = (
        role_name == LEARNER and variables.RUN_FOLDER not in os.environ
    )  # there is no launcher to show the run
    if speaks:
        view.announce(config, topology, folder.path)
        if checkpoint is not None:
            resume.open_and_announce(checkpoint, config, topology.num_actors)
    if role_name == LEARNER:
        say(f"apex: {wait}")
    reader = None if checkpoint is None else Reader(checkpoint, config, topology.num_actors)
    show = view.print_line if speaks else None
    with importing():
        if role_name != REPLAY:
            limit_torch_threads(threads(config, role_name))
        role = build(config, spec, topology, rank, port, folder, preset, show, reader)
    # The learner knows who has not taken its word to stop, so it is to be the first whose patience ends.
    drain_s = config.run.shutdown_timeout_s + (0 if role_name == LEARNER else _LEARNER_COMPLAINS_S)
    meeting.build(rank)
    if all_begin is not None:
        all_begin()
    if role_name == LEARNER:
        meeting.begin()
    grace_s = _OTHERS_START_S if all_begin is None else 0.0
    watchdog = Watchdog(
        topology.name(rank), config.run.watchdog_s, folder.stacks_of(*topology.role(rank)), grace_s
    )
    try:
        drive(role, watchdog, drain_s, signals, wait)
    finally:
        watchdog.close()
    role.close()
    if speaks:
        view.conclude(folder)
