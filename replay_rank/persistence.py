"""The ring of a replay rank on disk: a thread writes it, and any number of ranks read it.

Each place of the ring is written once, in the first checkpoint after its batch arrived. The ring is first in,
first out. So a checkpoint writes one run of new places and links the segments that hold the rest. A thread
writes directly from the ring, oldest place first; only 8 bytes of mass per slot are copied. A place that
waits to be written receives no batch (:meth:`Segments.holds`). Since the oldest go first, intake rarely
waits.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from apex import look
from apex.checkpoint import Corrupt, Part, Reader, share
from apex.control import CheckpointRequest
from apex.files import check_room
from apex.schema import intake_nbytes
from apex.state import Checks, Unfit, are_numbers, is_count, require, table_of
from apex.topology import REPLAY
from replay_rank import rate_limit
from replay_rank import replay as replays
from replay_rank.rate_limit import RateLimiter
from replay_rank.replay import Replay

SEGMENT_BYTES = 256 << 20  # freed when its last place is evicted, so at most this much is wasted
MAX_SEGMENTS = 512  # in one checkpoint; above that, the whole ring is written again
_SLICE_BYTES = 4 << 20
_NOWHERE = -1


def live_places(count: np.ndarray, landing: int) -> np.ndarray:
    """Return the places that hold transitions, oldest first: the ring from the one after ``landing`` on."""
    order = (landing + 1 + np.arange(len(count))) % len(count)
    return order[count[order] > 0]


class Located:
    """Where each place of a ring lies on disk: a row of a segment, as of one generation of the place."""

    def __init__(self, places: int):
        self.generation = np.zeros(places, np.int64)  # 0: not on disk
        self.segment = np.full(places, _NOWHERE, np.int32)
        self.row = np.zeros(places, np.int64)
        self.files: dict[int, tuple[str, int, str]] = {}  # segment -> file name, size, SHA-256
        self.folder: Path | None = None  # the checkpoint that holds them

    def copy(self) -> Located:
        """Return an independent copy."""
        new = Located(0)
        new.generation, new.segment, new.row = self.generation.copy(), self.segment.copy(), self.row.copy()
        new.files, new.folder = dict(self.files), self.folder
        return new

    def names_there(self) -> set[str]:
        """Return the file names in that checkpoint; none if it cannot be read, so all is rewritten."""
        try:
            return set() if self.folder is None else set(os.listdir(self.folder))
        except OSError:
            return set()


class Segments:
    """Writes the ring of one replay rank, ``buffer`` uint8[places, nbytes], checkpoint by checkpoint."""

    def __init__(self, checkpoints: Path, name: str, buffer: np.ndarray, ranks: int = 1):
        self.checkpoints, self.name, self.buffer, self.ranks = checkpoints, name, buffer, ranks
        self.located = Located(len(buffer))  # in the newest checkpoint known to be complete
        self._pending: tuple[int, Located] | None = None
        self._unwritten = np.zeros(len(buffer), bool)
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._ended: OSError | BaseException | None = None

    def begin(self, request: CheckpointRequest, live: np.ndarray, state: dict) -> None:
        """Start to write the places ``live`` (oldest first) and ``state``, which must not change meanwhile.

        ``state["replay"]["generation"]`` int64[places] tells which batch each place holds.
        """
        generation = state["replay"]["generation"]
        if self._pending is not None and self._pending[0] == request.base:
            self.located = self._pending[1]
        located = self.located.copy()
        self._forget_what_is_gone(located, live, generation)
        new = live[located.generation[live] != generation[live]]
        self._unwritten[new] = True
        self._pending, self._abandoned, self._ended = (request.number, located), False, None
        job = (request, located, new, {**state, "places": len(live)})
        name = f"{self.name} checkpoint"
        self._thread = threading.Thread(target=self._write, args=job, name=name, daemon=True)
        self._thread.start()

    def holds(self, place: int) -> bool:
        """Whether ``place`` still waits to be written and must not receive a batch."""
        return bool(self._unwritten[place])

    def poll(self) -> int | None:
        """Return 0 or the error number once the current checkpoint is written or has failed, else None."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self._ended is None:
            return 0
        if not isinstance(self._ended, OSError):
            raise self._ended
        return self._ended.errno or errno.EIO

    def wait(self) -> None:
        """Wait until the current checkpoint is written or has failed."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Stop writing, since the run ends. Wait at most five seconds for the current slice."""
        if self._thread is not None:
            self._abandoned = True
            self._thread.join(5.0)
        self._unwritten[:] = False

    @staticmethod
    def _forget_what_is_gone(located: Located, live: np.ndarray, generation: np.ndarray) -> None:
        """Forget evicted places, and places whose segment file is gone, so that they are written again."""
        there = located.names_there()
        kept = np.zeros(len(located.generation), bool)
        kept[live] = located.generation[live] == generation[live]
        found = [segment for segment, file in located.files.items() if file[0] in there]
        kept &= np.isin(located.segment, found)
        needed = set(np.unique(located.segment[kept]).tolist())
        if len(needed) > MAX_SEGMENTS:
            kept[:], needed = False, set()
        located.generation[~kept], located.segment[~kept] = 0, _NOWHERE
        located.files = {segment: file for segment, file in located.files.items() if segment in needed}

    def _write(self, request: CheckpointRequest, located: Located, new: np.ndarray, state: dict) -> None:
        try:
            small = state["replay"]["index"]["mass"].nbytes + 48 * len(self.buffer)
            # The other ranks write about as much at the same time.
            check_room(self.checkpoints, self.ranks * (len(new) * self.buffer.shape[1] + small))
            part = Part(request.partial(self.checkpoints), self.name)
            self._adopt(part, located)
            self._write_segments(part, request, located, new, state["replay"]["generation"])
            segments = {str(segment): located.files[segment] for segment in sorted(located.files)}
            where = {"segment": located.segment, "row": located.row}
            part.write({**state, **where, "segments": segments, "new_places": len(new)})
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
            self.located = Located(len(self.buffer))  # this checkpoint fails; the next needs no old file
            raise

    def _write_segments(
        self, part: Part, request: CheckpointRequest, located: Located, new: np.ndarray,
        generation: np.ndarray,
    ) -> None:  # fmt: skip
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


def _slices(places: np.ndarray, max_places: int) -> Iterator[slice]:
    """Yield ``places`` as slices of the ring, in order, of at most ``max_places`` each."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    for run in np.split(places, breaks):
        for start in range(0, len(run), max_places):
            piece = run[start : start + max_places]
            yield slice(int(piece[0]), int(piece[-1]) + 1)


def read_rows(
    folder: Path, segments: dict, segment: np.ndarray, row: np.ndarray, into: np.ndarray, places: np.ndarray
) -> None:
    """Read place after place into rows ``places`` of the ring ``into``.

    The i-th lies at ``row[i]`` of ``segment[i]``. ``segments`` is number in decimal -> (file name, ...).
    """
    nbytes = into.shape[1]
    for number in np.unique(segment):
        mine = np.flatnonzero(segment == number)
        mine = mine[np.argsort(row[mine], kind="stable")]
        with open(folder / segments[str(number)][0], "rb", buffering=0) as file:
            breaks = (np.diff(row[mine]) != 1) | (np.diff(places[mine]) != 1)
            for run in np.split(mine, np.flatnonzero(breaks) + 1):
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


_PART: Checks = {
    "counters": are_numbers, "open_requests": is_count, "replay": replays.STATE, "limiter": rate_limit.STATE,
}  # fmt: skip


def _is_file(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and is_count(value[1])


def check_values(values: dict, has_ring: bool) -> None:
    """Raise :class:`apex.state.Unfit` if the plain values of a replay rank's part are not valid."""
    require(values, _PART)
    if has_ring:
        require(values, {"segments": table_of(_is_file), "places": is_count})


def read_part(reader: Reader, index: int) -> dict:
    """Return the checked state of a replay rank and where its ring lies; without a ring, its values."""
    name = f"{REPLAY}-{index}"
    with reader.reading(f"{name}.json"):
        values = reader.values(name)
        check_values(values, reader.has_replay)
    if not reader.has_replay:
        return values
    with reader.reading(f"{name}.npz"):
        state = reader.state(name)
        _check_arrays(state)
    return state


def _check_arrays(state: dict) -> None:
    """Raise :class:`apex.state.Unfit` naming the first array that does not fit the values, which are right.

    mass is float64[slots]; generation, count, segment and row are whole numbers, one a place of the ring.
    """
    replay = state["replay"]
    arrays = {name: replay.get(name) for name in ("generation", "count")}
    arrays |= {name: state.get(name) for name in ("segment", "row")}
    mass, places = replay.get("index", {}).get("mass"), np.size(arrays["count"])
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind != "i" or array.shape != (places,):
            raise Unfit(f"no usable '{name}'")
        if name in ("generation", "count") and array.min(initial=0) < 0:
            raise Unfit(f"no usable '{name}'")
    if not isinstance(mass, np.ndarray) or mass.dtype != np.float64 or mass.shape != (replay["slots"],):
        raise Unfit("no usable 'mass'")
    if replay["landing"] >= places or replay["slots"] % places:
        raise Unfit("no usable 'count'")


def segment_files(reader: Reader) -> set[str]:
    """Return the names of the files that hold places of the ring, of all replay ranks."""
    parts = (reader.values(f"{REPLAY}-{index}") for index in range(reader.replay_ranks))
    return {file[0] for values in parts for file in values.get("segments", {}).values()}


def count_transitions(reader: Reader, files: Iterable[str]) -> tuple[int, int]:
    """Return how many of the stored transitions lie in segments called ``files``, and how many there are."""
    inside = total = 0
    for index in range(reader.replay_ranks):
        state = read_part(reader, index)
        count = state["replay"]["count"]
        numbers = [int(number) for number, (name, *_) in state["segments"].items() if name in files]
        inside += int(count[np.isin(state["segment"], numbers)].sum())
        total += int(count.sum())
    return inside, total


class Restore:
    """Restores a new replay rank (``index`` of ``ranks``) from a checkpoint."""

    def __init__(self, reader: Reader, index: int, ranks: int):
        self.reader, self.index, self.ranks = reader, index, ranks
        self.lost_places = 0
        self.old = [reader.values(f"{REPLAY}-{old}") for old in range(reader.replay_ranks)]

    def __call__(self, replay: Replay, limiter: RateLimiter, segments: Segments) -> None:
        """Restore counts, random state, ring, index and limiter. Raises :class:`apex.checkpoint.Corrupt`."""
        with self.reader.reading("what it holds of replay"):
            self._restore(replay, limiter, segments)

    def _restore(self, replay: Replay, limiter: RateLimiter, segments: Segments) -> None:
        if not self.reader.has_replay:  # the limiter warms up again
            replay.load_state_dict(self._empty(replay))
            return
        limiter.load_state_dict({name: self._share("limiter", name) for name in limiter.state_dict()})
        if len(self.old) == self.ranks and self.old[self.index]["replay"]["slots"] == replay.slots:
            self._restore_same(replay, segments, self._part(self.index))
        else:
            self._deal(replay, [self._part(old) for old in range(len(self.old))])
        if self.lost_places and replay.size < limiter.min_size:
            limiter.load_state_dict({"inserted": replay.size, "sampled": 0})  # as new: it warms up again
        _check_batches(replay, self.reader)

    def _empty(self, replay: Replay) -> dict:
        """Return the state of an empty rank with its share of the counts, and keys above all earlier ones."""
        state = replay.state_dict() | {name: self._share("replay", name) for name in replays.COUNTS}
        if self.index < len(self.old):
            state["strata"] = self.old[self.index]["replay"]["strata"]
        slots = max(old["replay"]["slots"] for old in self.old)
        largest = (1 + max(old["replay"]["newest_generation"] for old in self.old)) * slots
        state["generation"] += -(-largest // replay.slots)
        return state

    def _part(self, old: int) -> dict:
        """Return the state of an old rank without the places of segments that are missing.

        A lost place counts as evicted: no transitions, no mass, and a new generation. So priorities in
        flight are stale.
        """
        state = read_part(self.reader, old)
        replay, files = state["replay"], state["segments"]
        gone = {number for number, file in files.items() if not look.is_there(self.reader.folder / file[0])}
        state["segments"] = {number: file for number, file in files.items() if number not in gone}
        lost = np.isin(state["segment"], [int(number) for number in gone]) & (replay["count"] > 0)
        replay["index"]["mass"].reshape(len(lost), -1)[lost] = 0.0
        replay["count"][lost], state["segment"][lost] = 0, _NOWHERE
        replay["generation"][lost] += 1
        replay["newest_generation"] = max(replay["newest_generation"], int(replay["generation"].max()))
        self.old[old] = state
        self.lost_places += int(lost.sum())
        return state

    def _share(self, owner: str, name: str) -> int:
        return share([old[owner][name] for old in self.old], self.ranks, self.index)

    def _restore_same(self, replay: Replay, segments: Segments, state: dict) -> None:
        """Restore the ring place by place; the next checkpoint only links the files on disk."""
        held = state["replay"]
        live = live_places(held["count"], held["landing"])
        self._read(state, live, replay, live)
        replay.load_state_dict(held)
        located = Located(len(replay.count))
        located.generation[live] = held["generation"][live]
        located.segment, located.row = state["segment"], state["row"]
        located.files = {int(segment): tuple(file) for segment, file in state["segments"].items()}
        located.folder = self.reader.folder
        segments.located = located

    def _deal(self, replay: Replay, parts: list[dict]) -> None:
        """Restore every ``ranks``-th place of all old ranks, oldest first, with keys above all others."""
        state = self._empty(replay)
        olds, places = (column[self.index :: self.ranks] for column in self._in_age_order(parts))
        mass = state["index"]["mass"].reshape(-1, replay.batch)
        for old, part in enumerate(parts):
            to = np.flatnonzero(olds == old)
            self._read(part, places[to], replay, to)
            state["count"][to] = part["replay"]["count"][places[to]]
            mass[to] = part["replay"]["index"]["mass"].reshape(-1, replay.batch)[places[to]]
        replay.load_state_dict(state | {"landing": len(places)})

    def _in_age_order(self, parts: list[dict]) -> tuple[np.ndarray, np.ndarray]:
        """Return old rank and place of all live places, oldest first; each rank's newest has age 1."""
        live = [live_places(part["replay"]["count"], part["replay"]["landing"]) for part in parts]
        olds = np.concatenate([np.full(len(places), old) for old, places in enumerate(live)])
        age = np.concatenate([np.arange(len(places), 0, -1) for places in live])
        order = np.lexsort((olds, -age))
        return olds[order], np.concatenate(live)[order]

    def _read(self, part: dict, places: np.ndarray, replay: Replay, to: np.ndarray) -> None:
        try:
            rows = part["segment"][places], part["row"][places]
            read_rows(self.reader.folder, part["segments"], *rows, replay.store.buffer, to)
        except (OSError, KeyError, ValueError, IndexError) as error:
            why = f"a segment of replay cannot be read: {error}"
            raise Corrupt(f"checkpoint {self.reader.folder}: {why}") from None


def _check_batches(replay: Replay, reader: Reader) -> None:
    """Check restored batches like batches from actors: their pointers lead into the ring."""
    store = replay.store
    for place in np.flatnonzero(replay.count).tolist():
        nbytes = intake_nbytes(store.layout, store.spec, int(store.views["header"][place, 1]))
        try:
            count = store.check_batch(place, nbytes)
        except ValueError as error:
            raise Corrupt(f"checkpoint {reader.folder}: {error}") from None
        if count != replay.count[place]:
            why = f"place {place} of replay holds {count} transitions, not {replay.count[place]}"
            raise Corrupt(f"checkpoint {reader.folder}: {why}")
