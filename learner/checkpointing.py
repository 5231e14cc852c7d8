"""When checkpoints are taken, and how one is completed while training goes on.

The learner copies its own state (the only pause) and sends a request to all ranks. A thread writes the copy.
Each rank replies when its part is on disk; then the thread commits the folder. A full disk, or any other disk
error, costs that one checkpoint and a warning.
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

Take = Callable[[], tuple[dict, dict]]
_OTHER = 0  # in place of a checkpoint's number
_ACTORS_ANSWER_S = 5.0  # one that does not answer is left out: it goes on from its seed


class _Writing:
    """One checkpoint on its way: what the learner's thread writes, and how it ended."""

    def __init__(self, request: CheckpointRequest, folder: Path, config: Config, topology: Topology):
        self.request, self.checkpoints, self.config, self.topology = request, folder, config, topology
        self.partial = request.partial(folder)
        self.started = time.monotonic()
        self.answers: dict[tuple[str, int], CheckpointAck] = {}
        self.answered = threading.Event()  # all parts but the learner's are written, or one is lost
        self.lost: str | None = None  # why there is none
        self.crash: BaseException | None = None
        self.pause_s = 0.0
        self.done = False

    def start(self, tensors: dict, state: dict) -> None:
        """Write in a thread; what is given may not change any more."""
        job = (tensors, *split(state))
        self.thread = threading.Thread(target=self._run, args=job, name="checkpoint", daemon=True)
        self.thread.start()

    def take(self, role: str, index: int, reply: CheckpointAck) -> None:
        """Keep a reply to this request, unless the thread reads the replies already."""
        if reply.number != self.request.number or self.answered.is_set():
            return
        self.answers[role, index] = reply
        if reply.error:
            self.lose(f"{role} {index}: {os.strerror(reply.error)}")

    def lose(self, why: str) -> None:
        """Give it up; the first reason stays."""
        self.lost = self.lost or why

    def _run(self, tensors: dict, values: dict, arrays: dict) -> None:
        try:
            part = self._write_own(tensors, arrays)
            self.answered.wait()
            if self.lost is None:
                self._commit(part, values)
        except OSError as error:
            self.lost = self.lost or _in_words(error)
        except BaseException as error:
            self.crash = error
        if self.lost is not None:
            self.answered.wait()  # nobody writes there any more
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
        for (role, index), reply in self.answers.items():
            if reply.state:  # a replay rank's is in its own part
                values["answers"].setdefault(role, {})[str(index)] = reply.state
        part.finish(values)
        about = {"learner_steps": self.request.learner_steps, "config": to_tables(self.config)}
        about |= {"replay_ranks": self.topology.replay_ranks, "num_actors": self.topology.num_actors}
        about["learner_pause_ms"] = round(1e3 * self.pause_s, 1)
        about["seconds"] = round(time.monotonic() - self.started, 3)
        parts = [LEARNER, *(f"{REPLAY}-{index}" for index in range(self.topology.replay_ranks))]
        if self.config.run.transport == "local":  # else actors write no file
            parts += [f"{ACTOR}-{index}" for index in range(self.topology.num_actors)]
        checkpoint.commit(self.partial, self.checkpoints / self.request.name, about, parts)
        with contextlib.suppress(OSError, Unreadable):  # what is not removed now is removed after the next
            checkpoint.prune(self.checkpoints, self.config.run.keep_checkpoints)


class Checkpoints:
    """Takes a checkpoint when one is due; at most one is being written.

    ``steps`` are the learner steps of the checkpoint that the run resumes from, -1 for a new run.
    """

    def __init__(
        self, config: Config, topology: Topology, checkpoints: Path, port: LearnerPort, steps: int = -1
    ):
        self.config, self.topology, self.port, self.checkpoints = config, topology, port, checkpoints
        self._period = config.learner.checkpoint_period
        self._number = self._base = 0  # of the last request, and of the newest complete one
        self._last_steps = steps  # of the last that was begun
        self._due = self._next_due(max(steps, 0))
        self._absent: set[int] = set()  # ranks that are lost
        self._owing: set[int] = set()  # ranks that have not replied to their last request
        self._told: dict[int, int] = {}  # the number of that request
        self._writing: _Writing | None = None
        self._final = False
        self._warned: set[str] = set()  # why checkpoints were lost, of late
        self._at_once = config.run.transport == "local"  # a run does not depend on how fast its disk is
        checkpoint.remove_leftovers(checkpoints)

    def is_due(self, learner_steps: int) -> bool:
        """Whether to begin a checkpoint now."""
        is_free = self._writing is None and not self._owing & self._replay_ranks()
        return learner_steps >= self._due and is_free

    def begin(self, learner_steps: int, take: Take) -> None:
        """Begin one: ``take()`` copies the learner's state and returns ``(tensors for torch.save, state)``.

        ``state["answers"]``, role -> index -> state, stands for ranks that do not reply.
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
        copies = take()
        for rank in set(range(1, self.topology.size)) - self._owing - self._absent:
            self._told[rank] = self._number
            self.port.request(rank, request)
            self._owing.add(rank)
        self._writing.pause_s = time.perf_counter() - start
        self._writing.start(*copies)

    def tell(self, rank: int, assignment: EpsilonAssignment) -> bool:
        """Send something else to a rank; return False, unsent, while the rank owes a reply."""
        if rank in self._owing:
            return False
        self._told[rank] = _OTHER
        self.port.request(rank, assignment)
        self._owing.add(rank)
        return True

    def lose(self, rank: int) -> None:
        """Expect nothing more from a rank that is lost."""
        self._owing.discard(rank)
        self._absent.add(rank)

    def join(self, rank: int) -> None:
        """Send requests again to a rank that a new process has."""
        self._absent.discard(rank)

    def hear(self) -> bool:
        """Take replies, and finish a checkpoint that all have written; return whether there was a reply."""
        heard = self.port.poll_acks()
        for role, index, reply in heard:
            rank = self.topology.rank(role, index)
            if rank not in self._owing or not self._is_due_from(rank, role, reply):
                self.port.refuse("control", f"an acknowledgement of {role} {index} of no checkpoint that it was asked for")
                continue
            self._owing.discard(rank)
            if self._writing is not None and isinstance(reply, CheckpointAck):
                self._writing.take(role, index, reply)
        if self._writing is not None:
            self._follow(self._writing)
        return bool(heard)

    def _is_due_from(self, rank: int, role: str, reply: Ack) -> bool:
        """Whether a reply is to what the rank was asked for last, and holds what a run can go on from."""
        if not isinstance(reply, CheckpointAck):
            return self._told.get(rank) == _OTHER
        is_whole = role == REPLAY or are_numbers(reply.state.get("counters"))
        return is_whole and reply.number == self._told.get(rank)

    def last_is_over(self, learner_steps: int, take: Take) -> bool:
        """Take the last checkpoint of the run, after one that is being written; return whether it is over."""
        if self._writing is not None:
            self._give_up_in_time(self._writing)
            return False
        if self._final or self._last_steps == learner_steps or self._owing & self._replay_ranks():
            return True
        self._final = True
        self.begin(learner_steps, take)
        return self._writing is None

    def _give_up_in_time(self, writing: _Writing) -> None:
        limit = self.config.run.checkpoint_s
        if time.monotonic() - writing.started > limit and not writing.answered.is_set():
            writing.lose(f"not all parts were written within run.checkpoint_s = {limit:g} s")
            writing.answered.set()

    def _follow(self, writing: _Writing) -> None:
        waited = time.monotonic() - writing.started
        patience = min(_ACTORS_ANSWER_S, self.config.run.shutdown_timeout_s)
        if not self._owing or (waited > patience and not self._owing & self._replay_ranks()):
            writing.answered.set()
            if self._at_once:
                writing.thread.join()
        if not writing.done:
            return
        self._writing = None
        if writing.crash is not None:
            raise writing.crash
        if writing.lost is not None:
            self._warn(writing.request, writing.lost)
        else:
            self._base = writing.request.number
            self._warned.clear()

    def _warn(self, request: CheckpointRequest, why: str) -> None:
        """Warn once for each reason, until a checkpoint is complete again: a removed folder stays removed."""
        reason = why.partition(":")[0]
        if reason in self._warned:
            return
        self._warned.add(reason)
        rest = "the run goes on (not repeated until one is written)"
        warn(f"apex: warning: no checkpoint {request.name}: {why}; {rest}")

    def _next_due(self, learner_steps: int) -> int:
        return (learner_steps // self._period + 1) * self._period

    def _replay_ranks(self) -> set[int]:
        return set(self.topology.replay_ranks_range)


def to_cpu(value: Any) -> Any:
    """Return dictionaries and lists with copies, on the CPU, of their tensors."""
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
    """Make ``latest.pt``, which ``apex eval`` and ``apex play`` read, the newest networks. Never half."""
    aside = latest.with_name(latest.name + ".tmp")
    aside.unlink(missing_ok=True)
    link_or_copy(source, aside)
    os.replace(aside, latest)


def _in_words(error: OSError) -> str:
    why = error.strerror or str(error)
    return why if error.filename is None else f"{why}: {error.filename}"
