"""When checkpoints are written, and how one is completed during training.

The learner copies its own state (the only pause) and sends a request to all ranks. A thread writes the copy.
Each rank acknowledges when its part is on disk; then the thread commits the folder. A disk error costs that
one checkpoint and a warning.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apex import checkpoint
from apex.checkpoint import Part
from apex.config import Config, to_tables
from apex.control import Ack, CheckpointAck, CheckpointRequest, EpsilonAssignment
from apex.files import check_room, link_or_copy
from apex.look import Unreadable
from apex.ports import LearnerPort
from apex.say import warn
from apex.state import are_numbers, split
from apex.topology import ACTOR, LEARNER, REPLAY, Topology

CopyState = Callable[[], tuple[dict, dict]]
_EPSILON = 0  # in place of a checkpoint's number
_ACTOR_TIMEOUT_S = 5.0  # an actor that does not reply is left out: it resumes from its seed


class _Writing:
    """One checkpoint that is being written: the thread that writes the learner's part, and the outcome."""

    def __init__(self, request: CheckpointRequest, folder: Path, config: Config, topology: Topology):
        self.request, self.checkpoints, self.config, self.topology = request, folder, config, topology
        self.partial = request.partial(folder)
        self.started = time.monotonic()
        self.acks: dict[tuple[str, int], CheckpointAck] = {}
        self.all_acknowledged = threading.Event()  # no other rank writes any more
        self.failure: str | None = None
        self.crash: BaseException | None = None
        self.pause_s = 0.0
        self.done = False

    def start(self, tensors: dict, state: dict) -> None:
        """Write in a thread; ``tensors`` and ``state`` must not change any more."""
        job = (tensors, *split(state))
        self.thread = threading.Thread(target=self._run, args=job, name="checkpoint", daemon=True)
        self.thread.start()

    def on_ack(self, role: str, index: int, ack: CheckpointAck) -> None:
        """Keep an acknowledgement of this request, unless the thread already reads them."""
        if ack.number != self.request.number or self.all_acknowledged.is_set():
            return
        self.acks[role, index] = ack
        if ack.error:
            self.fail(f"{role} {index}: {os.strerror(ack.error)}")

    def fail(self, why: str) -> None:
        """Discard this checkpoint; the first reason stays."""
        self.failure = self.failure or why

    def _run(self, tensors: dict, values: dict, arrays: dict) -> None:
        try:
            part = self._write_own(tensors, arrays)
            self.all_acknowledged.wait()
            if self.failure is None:
                self._commit(part, values)
        except OSError as error:
            self.fail(_in_words(error))
        except BaseException as error:
            self.crash = error
        if self.failure is not None:
            self.all_acknowledged.wait()
            shutil.rmtree(self.partial, ignore_errors=True)
        self.done = True

    def _write_own(self, tensors: dict, arrays: dict) -> Part:
        check_room(self.checkpoints, _nbytes(tensors) + _nbytes(arrays))
        part = Part(self.partial, LEARNER)
        with part.file(f"{LEARNER}.pt") as file:
            file.write(checkpoint.as_bytes(tensors))
        _make_latest(self.partial / f"{LEARNER}.pt", self.checkpoints / "latest.pt")
        if arrays:
            part.arrays(arrays)
        return part

    def _commit(self, part: Part, values: dict) -> None:
        for (role, index), ack in self.acks.items():
            if ack.state:  # a replay rank's is in its own part
                values["answers"].setdefault(role, {})[str(index)] = ack.state
        part.finish(values)
        about = {"learner_steps": self.request.learner_steps, "config": to_tables(self.config)}
        about |= {"replay_ranks": self.topology.replay_ranks, "num_actors": self.topology.num_actors}
        about["learner_pause_ms"] = round(1e3 * self.pause_s, 1)
        about["seconds"] = round(time.monotonic() - self.started, 3)
        parts = [LEARNER, *(f"{REPLAY}-{index}" for index in range(self.topology.replay_ranks))]
        if self.config.run.transport == "local":  # else actors write no file
            parts += [f"{ACTOR}-{index}" for index in range(self.topology.num_actors)]
        checkpoint.commit(self.partial, self.checkpoints / self.request.name, about, parts)
        with contextlib.suppress(OSError, Unreadable):  # the next checkpoint tries again
            checkpoint.prune(self.checkpoints, self.config.run.keep_checkpoints)


class Checkpoints:
    """Writes a checkpoint when one is due, one at a time.

    ``steps`` are the learner steps of the checkpoint that the run resumes from, -1 for a new run.
    """

    def __init__(
        self, config: Config, topology: Topology, checkpoints: Path, port: LearnerPort, steps: int = -1
    ):
        self.config, self.topology, self.port, self.checkpoints = config, topology, port, checkpoints
        self._period = config.learner.checkpoint_period
        self._number = self._base = 0  # of the last request, and of the newest complete checkpoint
        self._last_steps = steps  # of the last checkpoint that was started
        self._due = self._next_due(max(steps, 0))
        self._lost: set[int] = set()
        self._pending: set[int] = set()  # ranks that have not acknowledged their last request
        self._requested: dict[int, int] = {}  # by rank: the number of that request
        self._writing: _Writing | None = None
        self._is_final = False
        self._warned: set[str] = set()  # reasons of failures since the last complete checkpoint
        self._waits_for_disk = config.run.transport == "local"  # exact: independent of the disk's speed
        checkpoint.remove_leftovers(checkpoints)

    def is_due(self, learner_steps: int) -> bool:
        """Whether to start a checkpoint now."""
        is_free = self._writing is None and not self._pending & self._replay_ranks()
        return learner_steps >= self._due and is_free

    def start(self, learner_steps: int, copy_state: CopyState) -> None:
        """Start a checkpoint; ``copy_state()`` returns copies of the learner's tensors and other state.

        ``state["answers"]``, role -> index -> state, is what ranks that do not reply resume from.
        """
        start = time.perf_counter()
        self._due, self._last_steps = self._next_due(learner_steps), learner_steps
        self._number += 1
        request = CheckpointRequest(self._number, learner_steps, self._base)
        try:
            request.partial(self.checkpoints).mkdir()
        except OSError as error:
            self._warn(request, _in_words(error))
            return
        self._writing = _Writing(request, self.checkpoints, self.config, self.topology)
        copies = copy_state()
        for rank in set(range(1, self.topology.size)) - self._pending - self._lost:
            self._request(rank, request, self._number)
        self._writing.pause_s = time.perf_counter() - start
        self._writing.start(*copies)

    def assign(self, rank: int, assignment: EpsilonAssignment) -> bool:
        """Send an epsilon assignment, or return False until the rank has acknowledged its last request."""
        if rank in self._pending:
            return False
        self._request(rank, assignment, _EPSILON)
        return True

    def on_loss(self, rank: int) -> None:
        """Expect nothing more from a lost rank."""
        self._pending.discard(rank)
        self._lost.add(rank)

    def on_replacement(self, rank: int) -> None:
        """Send requests again to a rank that a new process has taken."""
        self._lost.discard(rank)

    def poll(self) -> bool:
        """Receive acknowledgements and complete the checkpoint; return whether there were any."""
        acks = self.port.poll_acks()
        for role, index, ack in acks:
            rank = self.topology.rank(role, index)
            if rank not in self._pending or not self._is_expected(rank, role, ack):
                self.port.refuse("control", f"an acknowledgement of {role} {index} without a request")
                continue
            self._pending.discard(rank)
            if self._writing is not None and isinstance(ack, CheckpointAck):
                self._writing.on_ack(role, index, ack)
        if self._writing is not None:
            self._follow(self._writing)
        return bool(acks)

    def _request(self, rank: int, request: CheckpointRequest | EpsilonAssignment, number: int) -> None:
        self._requested[rank] = number
        self.port.request(rank, request)
        self._pending.add(rank)

    def _is_expected(self, rank: int, role: str, ack: Ack) -> bool:
        """Whether ``ack`` acknowledges the rank's last request and holds a state to resume from."""
        if not isinstance(ack, CheckpointAck):
            return self._requested.get(rank) == _EPSILON
        is_complete = role == REPLAY or are_numbers(ack.state.get("counters"))
        return is_complete and ack.number == self._requested.get(rank)

    def finish(self, learner_steps: int, copy_state: CopyState) -> bool:
        """Write the last checkpoint of the run, after the one in progress; return whether all is done."""
        if self._writing is not None:
            self._check_timeout(self._writing)
            return False
        if self._is_final or self._last_steps == learner_steps or self._pending & self._replay_ranks():
            return True
        self._is_final = True
        self.start(learner_steps, copy_state)
        return self._writing is None

    def _check_timeout(self, writing: _Writing) -> None:
        limit = self.config.run.checkpoint_s
        if time.monotonic() - writing.started > limit and not writing.all_acknowledged.is_set():
            writing.fail(f"not all parts were written within run.checkpoint_s = {limit:g} s")
            writing.all_acknowledged.set()

    def _follow(self, writing: _Writing) -> None:
        waited = time.monotonic() - writing.started
        timeout_s = min(_ACTOR_TIMEOUT_S, self.config.run.shutdown_timeout_s)
        if not self._pending or (waited > timeout_s and not self._pending & self._replay_ranks()):
            writing.all_acknowledged.set()
            if self._waits_for_disk:
                writing.thread.join()
        if not writing.done:
            return
        self._writing = None
        if writing.crash is not None:
            raise writing.crash
        if writing.failure is not None:
            self._warn(writing.request, writing.failure)
        else:
            self._base = writing.request.number
            self._warned.clear()

    def _warn(self, request: CheckpointRequest, why: str) -> None:
        """Warn once for each reason, until a checkpoint is complete again."""
        reason = why.partition(":")[0]
        if reason in self._warned:
            return
        self._warned.add(reason)
        rest = "the run continues (this warning is not repeated until a checkpoint is written)"
        warn(f"apex: warning: no checkpoint {request.name}: {why}; {rest}")

    def _next_due(self, learner_steps: int) -> int:
        return (learner_steps // self._period + 1) * self._period

    def _replay_ranks(self) -> set[int]:
        return set(self.topology.replay_ranks_range)


def to_cpu(value: Any) -> Any:
    """Return ``value`` with every tensor in its dictionaries and lists copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    return [to_cpu(item) for item in value] if isinstance(value, list) else value


def _nbytes(value: object) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list) else 0


def _make_latest(source: Path, latest: Path) -> None:
    """Replace ``latest.pt``, which ``apex eval`` and ``apex play`` read, with ``source``, atomically."""
    aside = latest.with_name(latest.name + ".tmp")
    aside.unlink(missing_ok=True)
    link_or_copy(source, aside)
    os.replace(aside, latest)


def _in_words(error: OSError) -> str:
    why = error.strerror or str(error)
    return why if error.filename is None else f"{why}: {error.filename}"
