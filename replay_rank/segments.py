"""The places of a ring on disk: each is written once, in the first checkpoint after it has arrived.

The ring is first in, first out, so a checkpoint writes one run of new places and links the segments that hold
the rest. Writing goes on in a thread beside the service, from the oldest place on, straight from the ring:
nothing is copied but 8 bytes of mass a slot. Until a place is written nothing may land in it
(:meth:`Segments.holds`); as the oldest are written first, intake rarely has to wait.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from apex.checkpoint_files import Part, check_room
from apex.control import CheckpointRequest

SEGMENT_BYTES = 256 << 20  # a segment is freed when its last place is evicted: so much is held in vain at most
MOST_SEGMENTS = 512  # in one checkpoint; beyond, all is written anew
_SLICE_BYTES = 4 << 20
_NOWHERE = -1


class Located:
    """Where each place of a ring lies on disk: a row of a segment, valid for the generation it was written with."""

    def __init__(self, places: int):
        self.generation = np.zeros(places, np.int64)  # 0: not on disk
        self.segment = np.full(places, _NOWHERE, np.int32)
        self.row = np.zeros(places, np.int64)
        self.files: dict[int, tuple[str, int, str]] = {}  # segment -> file name, size, SHA-256
        self.folder: Path | None = None  # the checkpoint that holds them

    def copy(self) -> Located:
        """Return one that can be changed apart from this."""
        new = Located(0)
        new.generation, new.segment, new.row = self.generation.copy(), self.segment.copy(), self.row.copy()
        new.files, new.folder = dict(self.files), self.folder
        return new

    def names_there(self) -> set[str]:
        """Return the names in the checkpoint that holds them; none where looking fails, since all can be written anew."""
        try:
            return set() if self.folder is None else set(os.listdir(self.folder))
        except OSError:
            return set()


class Segments:
    """Writes the ring of one replay rank, ``buffer`` uint8[places, nbytes], checkpoint by checkpoint."""

    def __init__(self, checkpoints: Path, name: str, buffer: np.ndarray, ranks: int = 1):
        self.checkpoints, self.name, self.buffer, self.ranks = checkpoints, name, buffer, ranks
        self.located = Located(len(buffer))  # in the newest checkpoint that is known to be whole
        self._pending: tuple[int, Located] | None = None
        self._unwritten = np.zeros(len(buffer), bool)
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._ended: OSError | BaseException | None = None

    def begin(self, request: CheckpointRequest, live: np.ndarray, generation: np.ndarray, arrays: dict, values: dict) -> None:
        """Start to write the places ``live`` (oldest first) with their ``generation`` int64[places].

        ``arrays`` and ``values`` are the rest of the part; they must not change any more.
        """
        if self._pending is not None and self._pending[0] == request.base:
            self.located = self._pending[1]
        located = self.located.copy()
        self._forget_what_is_gone(located, live, generation)
        new = live[located.generation[live] != generation[live]]
        self._unwritten[new] = True
        self._pending, self._abandoned, self._ended = (request.number, located), False, None
        job = (request, located, new, generation, arrays, values)
        self._thread = threading.Thread(target=self._write, args=job, name=f"{self.name} checkpoint", daemon=True)
        self._thread.start()

    def holds(self, place: int) -> bool:
        """Whether ``place`` still has to be written, so that nothing may land there."""
        return bool(self._unwritten[place])

    def poll(self) -> int | None:
        """Return 0, or the error number, once the checkpoint that was begun has been written or lost."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self._ended is None:
            return 0
        if not isinstance(self._ended, OSError):
            raise self._ended
        return self._ended.errno or errno.EIO

    def wait(self) -> None:
        """Wait until the checkpoint that was begun has been written or lost."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Stop writing: the run is ending. Waits for the slice in hand, at most some seconds."""
        if self._thread is not None:
            self._abandoned = True
            self._thread.join(5.0)
        self._unwritten[:] = False

    @staticmethod
    def _forget_what_is_gone(located: Located, live: np.ndarray, generation: np.ndarray) -> None:
        """Forget places that are evicted, and those of segments that somebody has removed: they are written anew."""
        there = located.names_there()
        kept = np.zeros(len(located.generation), bool)
        kept[live] = located.generation[live] == generation[live]
        kept &= np.isin(located.segment, [segment for segment, file in located.files.items() if file[0] in there])
        needed = set(np.unique(located.segment[kept]).tolist())
        if len(needed) > MOST_SEGMENTS:
            kept[:], needed = False, set()
        located.generation[~kept], located.segment[~kept] = 0, _NOWHERE
        located.files = {segment: file for segment, file in located.files.items() if segment in needed}

    def _write(
        self, request: CheckpointRequest, located: Located, new: np.ndarray, generation: np.ndarray, arrays: dict, values: dict
    ) -> None:
        folder = request.partial(self.checkpoints)
        try:
            small = sum(array.nbytes for array in arrays.values()) + 32 * len(self.buffer)
            # The other ranks write about as much at the same time.
            check_room(self.checkpoints, self.ranks * (len(new) * self.buffer.shape[1] + small))
            part = Part(folder, self.name)
            self._adopt(part, located)
            self._write_segments(part, request, located, new, generation)
            segments = sorted(located.files)
            values = values | {"segments": {str(segment): located.files[segment] for segment in segments}, "new_places": len(new)}
            part.arrays(arrays | {"segment": located.segment, "row": located.row})
            part.finish(values)
            located.folder = self.checkpoints / request.name
        except BaseException as error:
            self._ended = error
        finally:
            self._unwritten[:] = False

    def _adopt(self, part: Part, located: Located) -> None:
        folder = located.folder
        if folder is None:  # nothing is on disk yet
            return
        try:
            for file, size, digest in located.files.values():
                part.adopt(folder / file, size, digest)
        except OSError:
            self.located = Located(len(self.buffer))  # this one is lost; the next depends on no old file
            raise

    def _write_segments(self, part: Part, request: CheckpointRequest, located: Located, new: np.ndarray, generation: np.ndarray) -> None:
        nbytes = self.buffer.shape[1]
        rows = max(1, SEGMENT_BYTES // nbytes)
        first_free = max(located.files, default=-1) + 1
        for i, start in enumerate(range(0, len(new), rows)):
            places, segment = new[start : start + rows], first_free + i
            name = f"{self.name}-{request.learner_steps:09d}-{request.number}-{segment}.bin"
            with part.file(name) as file:
                for piece in _slices(places, max(1, _SLICE_BYTES // nbytes)):
                    if self._abandoned:
                        raise OSError(errno.ECANCELED, "the run is ending")
                    file.write(self.buffer[piece].data)
                    self._unwritten[piece] = False
            located.segment[places], located.row[places] = segment, np.arange(len(places))
            located.generation[places] = generation[places]
            located.files[segment] = (name, *part.files[name])


def _slices(places: np.ndarray, most: int) -> Iterator[slice]:
    """Yield ``places`` as slices of the ring, in order, of at most ``most`` places each."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    for run in np.split(places, breaks):
        for start in range(0, len(run), most):
            piece = run[start : start + most]
            yield slice(int(piece[0]), int(piece[-1]) + 1)


def read_rows(folder: Path, segments: dict, segment: np.ndarray, row: np.ndarray, into: np.ndarray, places: np.ndarray) -> None:
    """Read place after place into rows ``places`` of the ring ``into``; its i-th lies at ``row[i]`` of ``segment[i]``."""
    nbytes = into.shape[1]
    for number in np.unique(segment):
        mine = np.flatnonzero(segment == number)
        mine = mine[np.argsort(row[mine], kind="stable")]
        with open(folder / segments[str(number)][0], "rb", buffering=0) as file:
            for run in np.split(mine, np.flatnonzero((np.diff(row[mine]) != 1) | (np.diff(places[mine]) != 1)) + 1):
                file.seek(int(row[run[0]]) * nbytes)
                _read_all(file, into[int(places[run[0]]) : int(places[run[-1]]) + 1])


def _read_all(file: io.FileIO, rows: np.ndarray) -> None:
    view = rows.data.cast("B")
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise OSError(errno.EIO, f"{file.name} ends early")
        done += count
