"""``mpi-pickle`` and ``zmq-pickle``, only for comparison: pickled lists of stacked transitions.

Each transition is a tuple with both of its observation stacks, so every frame travels up to eight times.
The pointers into the shared frames travel along, so that the receiver can put an intake batch where the
ring keeps it. Stacks of consecutive frames are pickled from views: nothing is copied but by pickle itself.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Collection
from typing import Any

import numpy as np

from apex.config import Config
from apex.ports import Change, Waking
from apex.refusals import Refusals
from apex.schema import EnvSpec, aligned_bytes, intake_layout, intake_nbytes, priority_layout, sample_layout
from apex.transport.wire import Allowed, Kind, Received, Sent, Wire, refusal_kind

_OBS, _NEXT_OBS = 0, 1
_PICKLED = frozenset([Kind.INTAKE, Kind.SAMPLE, Kind.PRIORITY, Kind.WEIGHTS])
PICKLED_NBYTES = 1 << 30  # of one message at most
_SCALARS = ("action", "reward", "discount")


def dumps(content: object) -> bytes:
    """Return ``content`` pickled by protocol 5, arrays in-band."""
    return pickle.dumps(content, protocol=5)


class Form:
    """From flat messages (see ``apex.schema``) to lists of transitions and back."""

    def __init__(self, config: Config, spec: EnvSpec):
        self.spec = spec
        self.intake = intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
        self.sample = sample_layout(spec, config.learner.batch_size)
        self.priority = priority_layout(config.learner.batch_size)

    def outgoing(self, kind: Kind, message: np.ndarray) -> object:
        """Return a flat message as the objects that are pickled."""
        forms = {
            Kind.INTAKE: self.intake_out,
            Kind.SAMPLE: self.sample_out,
            Kind.PRIORITY: self.priorities_out,
        }
        return forms[kind](message) if kind in forms else message

    def incoming(self, kind: Kind, content: Any, buffer: np.ndarray) -> None:
        """Write unpickled objects into the flat message ``buffer``."""
        if kind == Kind.WEIGHTS:
            buffer[: len(content)] = content
        else:
            {Kind.INTAKE: self.intake_in, Kind.SAMPLE: self.sample_in, Kind.PRIORITY: self.priorities_in}[
                kind
            ](content, buffer)

    def nbytes(self, kind: Kind, content: Any) -> int:
        """Return the bytes of the flat message."""
        if kind == Kind.INTAKE:
            return intake_nbytes(self.intake, self.spec, content[0][1])
        return {Kind.SAMPLE: self.sample.nbytes, Kind.PRIORITY: self.priority.nbytes}.get(kind) or len(
            content
        )

    def intake_out(self, message: np.ndarray) -> tuple:
        """Return ``(header, transitions)`` of an intake message that ends with its last used frame."""
        views = self._intake_views(message)
        header = views["header"].tolist()
        columns = [views[name][: header[0]].tolist() for name in (*_SCALARS, "priority", "param_version")]
        pointers = [views[name][: header[0]] for name in ("obs_frames", "next_obs_frames")]
        stacks = [self._stacks(views["frames"], p) for p in pointers]
        return header, list(zip(*stacks, *columns, *(p.tolist() for p in pointers)))

    def intake_in(self, content: tuple, landing: np.ndarray) -> int:
        """Write the batch into ``landing``, a whole intake message; return the bytes that are used."""
        header, transitions = content
        views, count = self.intake.views(landing), len(transitions)
        views["header"][:] = header
        columns = list(zip(*transitions))
        for name, column in zip(
            (*_SCALARS, "priority", "param_version", "obs_frames", "next_obs_frames"), columns[2:]
        ):
            views[name][:count] = column
        self._unstack(transitions, np.hstack([columns[-2], columns[-1]]), views["frames"])
        return intake_nbytes(self.intake, self.spec, header[1])

    def sample_out(self, buffer: np.ndarray) -> tuple:
        """Return ``((size, total, minimum), transitions)`` of a sample message."""
        views = self.sample.views(buffer)
        about = tuple(views[name][0].item() for name in ("size", "total", "minimum"))
        columns = (views[name].tolist() for name in (*_SCALARS, "param_version", "key", "probability"))
        return about, list(zip(views["obs"], views["next_obs"], *columns))

    def sample_in(self, content: tuple, buffer: np.ndarray) -> None:
        """Stack the transitions into the sample message ``buffer``."""
        about, transitions = content
        views = self.sample.views(buffer)
        for name, value in zip(("size", "total", "minimum"), about):
            views[name][0] = value
        obs, next_obs, *columns = zip(*transitions)
        np.stack(obs, out=views["obs"])
        np.stack(next_obs, out=views["next_obs"])
        for name, column in zip((*_SCALARS, "param_version", "key", "probability"), columns):
            views[name][:] = column

    def priorities_out(self, message: np.ndarray) -> tuple:
        """Return ``(keys, priorities)`` of a priority message, copied."""
        views = self.priority.views(message)
        return views["key"].copy(), views["priority"].copy()

    def priorities_in(self, content: tuple, buffer: np.ndarray) -> None:
        """Write keys and priorities into the priority message ``buffer``."""
        views = self.priority.views(buffer)
        views["key"][:], views["priority"][:] = content

    def _intake_views(self, message: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of a message without its unused frames."""
        fields = self.intake.fields
        views = {
            name: np.ndarray(f.shape, f.dtype, message, f.offset)
            for name, f in fields.items()
            if name != "frames"
        }
        frames = message[fields["frames"].offset :].view(fields["frames"].dtype)
        views["frames"] = frames.reshape(-1, *self.spec.frame_shape)
        return views

    def _stacks(self, frames: np.ndarray, pointers: np.ndarray) -> list[np.ndarray]:
        """Return the stack of each row of ``pointers``: a view where its frames lie one after another."""
        consecutive = (pointers[:, 0] >= 0) & (np.diff(pointers, axis=1) == 1).all(axis=1)
        stack, first = self.spec.stack, pointers[:, 0].tolist()
        return [
            frames[at : at + stack] if straight else _gathered(frames, row)
            for straight, at, row in zip(consecutive.tolist(), first, pointers)
        ]

    def _unstack(self, transitions: list[tuple], pointers: np.ndarray, frames: np.ndarray) -> None:
        """Write each frame once, from the first stack that holds it; ``pointers`` int[b, 2 * stack]."""
        rows, first = np.unique(pointers.reshape(-1), return_index=True)
        stack = self.spec.stack
        for row, at in zip(rows.tolist(), first.tolist()):
            if row >= 0:
                number, position = divmod(at, 2 * stack)
                which = _OBS if position < stack else _NEXT_OBS
                frames[row] = transitions[number][which][position % stack]


def _gathered(frames: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the frames of ``row``, all zero where it says -1."""
    stack = frames[np.maximum(row, 0)]
    stack[row < 0] = 0
    return stack


class PickledWire:
    """A wire that carries bulk messages and priorities as pickled Python objects, over another one.

    Nothing is unpickled but what the other wire gives out: messages of ranks of this job.
    """

    neighbours: Collection[int] = ()

    def __init__(self, wire: Wire, form: Form):
        self._wire, self._form = wire, form
        self.rank, self.size, self.ranks_on_host, self.processes = (
            wire.rank,
            wire.size,
            wire.ranks_on_host,
            wire.processes,
        )
        self.survives, self.handover, self.refusals = wire.survives, wire.handover, wire.refusals
        self._allowed: Allowed = {}
        self._arriving: list[Received] = []
        self._unpickled: list[_Unpickled] = []

    @property
    def allowed(self) -> Allowed:
        """What this rank takes, in bytes that are not pickled."""
        return self._allowed

    @allowed.setter
    def allowed(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._wire.allowed = {
            key: (0, sys.maxsize) if key[1] in _PICKLED else nbytes for key, nbytes in allowed.items()
        }

    def allocate(self, rows: int, nbytes: int) -> np.ndarray:
        """Return plain memory."""
        return aligned_bytes(rows, nbytes)

    def send(self, dest: int, kind: Kind, message: np.ndarray, token: int = 0) -> None:
        """Pickle at once, and send that."""
        if kind in _PICKLED and len(message):
            message = np.frombuffer(dumps(self._form.outgoing(kind, message)), np.uint8)
        self._wire.send(dest, kind, message, token)

    def receive(self, kinds: Collection[Kind]) -> Received | None:
        """Return the next message, unpickled as soon as all of it is here."""
        message = self._wire.receive(kinds)
        if message is not None and (message.kind not in _PICKLED or not message.nbytes):
            return message
        if message is not None:
            message.view()
            self._arriving.append(message)
        for message in self._arriving:
            if message.arrived():
                self._unpickle(message)
                break
        return next((self._take(found) for found in self._unpickled if found.kind in kinds), None)

    def completed(self) -> list[Sent]:
        """Return what the wire below tells."""
        return self._wire.completed()

    def send_control(self, dest: int, message: dict, token: int = 0, urgent: bool = True) -> None:
        """Control messages are JSON here too."""
        self._wire.send_control(dest, message, token, urgent)

    def poll_control(self) -> tuple[int, dict] | None:
        """Return the next control message."""
        return self._wire.poll_control()

    def changes(self) -> list[Change]:
        """Return what the wire below tells."""
        return self._wire.changes()

    def replace(self, rank: int, handover: dict | None) -> None:
        """Have the wire below do so."""
        self._wire.replace(rank, handover)

    def begin_end(self) -> None:
        """The run ends."""
        self._wire.begin_end()

    def progress(self) -> None:
        """Let messages move."""
        self._wire.progress()

    def waking(self) -> Waking:
        """Return how messages wake this rank."""
        return self._wire.waking()

    def open_sends(self) -> list[tuple[int, Kind]]:
        """Return what has not been taken."""
        return self._wire.open_sends()

    def pending(self) -> list[str]:
        """Name what is here and has not been handed out."""
        return self._wire.pending() + ["a message to be unpickled"] * bool(self._arriving or self._unpickled)

    def close(self) -> None:
        """Free what the wire below holds."""
        self._wire.close()

    def _unpickle(self, message: Received) -> None:
        content = pickle.loads(message.view().data)
        self._arriving.remove(message)
        message.release()
        self._unpickled.append(_Unpickled(message, content, self._form, self.refusals))

    def _take(self, found: _Unpickled) -> _Unpickled:
        self._unpickled.remove(found)
        return found


class _Unpickled(Received):
    """A message as Python objects, to be written into a flat message."""

    def __init__(self, message: Received, content: Any, form: Form, refusals: Refusals):
        super().__init__(message.source, message.kind, form.nbytes(message.kind, content))
        self._content, self._form, self._refusals = content, form, refusals
        self._buffer: np.ndarray | None = None

    def into(self, buffer: np.ndarray) -> None:
        """Write into ``buffer``."""
        self._form.incoming(self.kind, self._content, buffer)

    def view(self) -> np.ndarray:
        """Write into a buffer of its own."""
        if self._buffer is None:
            self._buffer = aligned_bytes(self.nbytes)
            self.into(self._buffer)
        return self._buffer

    def release(self) -> None:
        """Nothing is held."""

    def reject(self, why: str) -> None:
        """Drop and count."""
        self._refusals.add(refusal_kind(self.kind), why)
