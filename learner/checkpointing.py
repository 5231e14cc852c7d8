"""When checkpoints are taken, and how one comes to be whole while training goes on.

The learner copies its own state (the only pause), announces the checkpoint to all ranks, and a thread writes
the copy. Each rank answers when its part is on disk; then the thread writes the manifest and renames the
folder. A disk without room, or any other error of it, costs that one checkpoint and a warning.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apex import checkpoint
from apex.checkpoint import Part
from apex.config import Config, to_tables
from apex.control import CheckpointAck, CheckpointRequest
from apex.files import check_room
from apex.look import Unreadable
from apex.ports import LearnerPort
from apex.say import warn
from apex.state import split
from apex.topology import ACTOR, LEARNER, REPLAY, Topology

Take = Callable[[], tuple[dict, dict]]
_MAX_ERRNO = 4095  # as the kernel has it
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
        self.thread = threading.Thread(target=self._run, args=(tensors, *split(state)), name="checkpoint", daemon=True)
        self.thread.start()

    def lose(self, why: str) -> None:
        """There will be none."""
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
        about |= {"learner_pause_ms": round(1e3 * self.pause_s, 1), "seconds": round(time.monotonic() - self.started, 3)}
        parts = [LEARNER, *(f"{REPLAY}-{index}" for index in range(self.topology.replay_ranks))]
        if self.config.run.transport == "local":  # else actors write no file
            parts += [f"{ACTOR}-{index}" for index in range(self.topology.num_actors)]
        checkpoint.commit(self.partial, self.checkpoints / self.request.name, about, parts)
        with contextlib.suppress(OSError, Unreadable):  # what is not removed now is removed after the next
            checkpoint.prune(self.checkpoints, self.config.run.keep_checkpoints)


class Checkpoints:
    """Takes a checkpoint when one is due; at most one is on its way. ``steps`` is the one that the run goes on from, -1: none."""

    def __init__(self, config: Config, topology: Topology, checkpoints: Path, port: LearnerPort, steps: int = -1):
        self.config, self.topology, self.port, self.checkpoints = config, topology, port, checkpoints
        self._period = config.learner.checkpoint_period
        self._number = self._base = 0  # of the last request, and of the newest that is whole
        self._last_steps = steps  # of the last that was begun
        self._due = self._next_due(max(steps, 0))
        self._absent: set[int] = set()  # ranks that are lost
        self._owing: set[int] = set()  # ranks that have not answered, whichever checkpoint they were last told of
        self._told: dict[int, int] = {}  # its number
        self._writing: _Writing | None = None
        self._final = False
        self._warned: set[str] = set()  # why checkpoints were lost, of late
        self._at_once = config.run.transport == "local"  # so that a run does not depend on how fast its disk is
        checkpoint.remove_leftovers(checkpoints)

    def is_due(self, learner_steps: int) -> bool:
        """Whether a checkpoint is to be begun now."""
        return learner_steps >= self._due and self._writing is None and not self._owing & self._replay_ranks()

    def begin(self, learner_steps: int, take: Take) -> None:
        """Begin one: ``take()`` copies the learner's state and returns ``(tensors for torch.save, state)``.

        ``state["answers"]``, role -> index -> state, is what is kept of ranks that do not reply.
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
            self.port.announce(rank, request.words())
            self._owing.add(rank)
        self._writing.pause_s = time.perf_counter() - start
        self._writing.start(*copies)

    def tell(self, rank: int, words: np.ndarray) -> bool:
        """Announce something else to a rank; return whether it could be, as it owes no answer."""
        if rank in self._owing:
            return False
        self._told[rank] = int(words[0])
        self.port.announce(rank, words)
        self._owing.add(rank)
        return True

    def lose(self, rank: int) -> None:
        """A rank is gone: it writes nothing, and answers nothing."""
        self._owing.discard(rank)
        self._absent.add(rank)

    def join(self, rank: int) -> None:
        """A new process is there."""
        self._absent.discard(rank)

    def hear(self) -> bool:
        """Take answers, and conclude what has been written; return whether there was anything."""
        heard = self.port.poll_answers()
        for role, index, words in heard:
            rank, reply = self.topology.rank(role, index), CheckpointAck.of(role, words)
            if rank not in self._owing or reply.number != self._told.get(rank) or not 0 <= reply.error <= _MAX_ERRNO:
                self.port.refuse(f"an answer of {role} {index} to no checkpoint that it was told of")
                continue
            self._owing.discard(rank)
            writing = self._writing  # once it has all answers, its thread reads them: what comes later is too late
            if writing is not None and reply.number == writing.request.number and not writing.answered.is_set():
                writing.answers[role, index] = reply
                if reply.error:
                    writing.lose(f"{role} {index}: {os.strerror(reply.error)}")
        if self._writing is not None:
            self._follow(self._writing)
        return bool(heard)

    def last_is_over(self, learner_steps: int, take: Take) -> bool:
        """Take the last checkpoint of the run, after one that is on its way; return whether it is whole, or is given up."""
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
        patience = min(_ACTORS_ANSWER_S, self.config.run.drain_s)
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
        """Say so once for each reason, until one is whole again: a folder that is gone will not come back."""
        reason = why.partition(":")[0]
        if reason in self._warned:
            return
        self._warned.add(reason)
        warn(f"apex: warning: no checkpoint {request.name}: {why}; the run goes on (not repeated until one is written)")

    def _next_due(self, learner_steps: int) -> int:
        return (learner_steps // self._period + 1) * self._period

    def _replay_ranks(self) -> set[int]:
        return set(self.topology.replay_ranks_range)


def to_cpu(value: Any) -> Any:
    """Return a copy, on the CPU, of tensors in dictionaries and lists; what else there is stays."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    return [to_cpu(item) for item in value] if isinstance(value, list) else value


def _nbytes(value: object) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    items: Iterable[object] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_nbytes, items))


def _make_latest(source: Path, latest: Path) -> None:
    """Point ``latest.pt``, which ``apex eval`` and ``apex play`` read, at the newest networks; it is old or new, never torn."""
    aside = latest.with_name(latest.name + ".tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(source, aside)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        shutil.copyfile(source, aside)  # a file system without hard links
    os.replace(aside, latest)


def _in_words(error: OSError) -> str:
    why = error.strerror or str(error)
    return why if error.filename is None else f"{why}: {error.filename}"
