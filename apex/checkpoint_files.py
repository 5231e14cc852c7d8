"""Checkpoints as folders: how one comes to be whole, and how it is found to be.

::

    checkpoints/step-000120000/
        manifest.json     sizes and SHA-256 of all other files, configuration, counts; with a checksum of its own
        learner.json/.pt  networks, optimiser; and what every rank that writes no file has answered
        replay-0.json     a rank's own values and files
        replay-0.npz      keys, masses; which place of the ring lies where in which segment
        replay-0-...bin   segments: places of the ring, written once; later checkpoints hold a hard link

Every rank writes its own files into ``.step-000120000-<number>.partial``, each flushed to the disk. Once all
have, the learner writes the manifest and renames the folder. So one with a manifest is whole, unless
somebody has changed it; one that is not is refused by name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apex import look
from apex.config import ConfigError
from apex.state import split

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FORMAT = 3
MANIFEST = "manifest.json"
ROOM_LEFT_BYTES = 16 << 20  # a disk is not filled to the last byte: the log goes on
PARTS_SEEN_S = 5.0  # a network file system may show what another host has written a moment later
_LOOK_S = 0.05
_READ_BYTES = 8 << 20
_NONE = -1  # no descriptor


class Damaged(ConfigError):
    """A checkpoint that cannot be used; the message names it and says what is wrong, in one line."""


class NewFile(io.RawIOBase):
    """A file that did not exist, written from front to back; it is on the disk once closed.

    ``nbytes`` and ``digest`` are its size and SHA-256.
    """

    def __init__(self, path: Path):
        self._descriptor = _NONE
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash, self.nbytes = hashlib.sha256(), 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer) -> int:
        """Write all of ``data``, bytes or a contiguous array; return its length. Raises OSError."""
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            written += os.write(self._descriptor, view[written:])
        self._hash.update(view)
        self.nbytes += written
        return written

    def close(self) -> None:
        """Flush to the disk and close. Raises OSError."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor == _NONE:  # it could not be opened, or is closed
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @property
    def digest(self) -> str:
        """SHA-256 of what has been written."""
        return self._hash.hexdigest()


class Part:
    """The files of one rank in a checkpoint that is being written. All methods raise OSError."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.files: dict[str, tuple[int, str]] = {}  # name -> size, SHA-256

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[NewFile]:
        """Give a new file to write; it belongs to the part once it is closed without an error."""
        with NewFile(self.folder / name) as file:
            yield file
        self.files[name] = file.nbytes, file.digest

    def arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Write ``<name>.npz``."""
        with self.file(f"{self.name}.npz") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # none is called allow_pickle

    def adopt(self, source: Path, size: int, digest: str) -> None:
        """Take a file of an older checkpoint: by a hard link, or a copy on a file system that has none."""
        target = self.folder / source.name
        try:
            os.link(source, target)
        except OSError:  # no such links here, or too many of this file
            with open(source, "rb", buffering=0) as old, self.file(source.name) as file:
                while data := old.read(_READ_BYTES):
                    file.write(data)
        self.files[source.name] = size, digest

    def write(self, state: dict) -> None:
        """Write a state (see :mod:`apex.state`), its arrays and its plain values, and with that finish the part."""
        values, arrays = split(state)
        if arrays:
            self.arrays(arrays)
        self.finish(values)

    def finish(self, values: dict) -> None:
        """Write ``<name>.json``: the part's own values (plain numbers, text, lists) and its files."""
        with NewFile(self.folder / f"{self.name}.json") as file:
            file.write(json.dumps({"values": values, "files": self.files}).encode())


def check_room(folder: Path, nbytes: int, left: int = ROOM_LEFT_BYTES) -> None:
    """Raise OSError (no space left) where the disk of ``folder`` has no room for so many bytes and those to be left."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + left:
        needed, there = (nbytes + left) / 2**20, free / 2**20
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed:.1f} MiB are needed and {there:.1f} MiB are free in {folder}")


def seal(partial: Path, target: Path, about: dict, parts: Iterable[str]) -> None:
    """Make a folder in which ``parts``, by name, are finished the checkpoint ``target``; raises OSError, naming a part that is missing.

    ``about`` becomes part of the manifest.
    """
    files: dict[str, tuple[int, str]] = {}
    deadline = time.monotonic() + PARTS_SEEN_S
    for name in sorted(parts):
        text = _read_part(partial, name, deadline)
        files |= json.loads(text)["files"] | {f"{name}.json": (len(text), hashlib.sha256(text).hexdigest())}
    manifest = {"format": FORMAT, **about, "files": files}
    with NewFile(partial / MANIFEST) as file:
        file.write(json.dumps({"sha256": _digest(manifest), "manifest": manifest}, indent=1).encode())
    _flush_folder(partial)
    os.rename(partial, target)
    _flush_folder(target.parent)


def _read_part(partial: Path, name: str, deadline: float) -> bytes:
    """Return the text of a part that its rank has finished, as soon as it is seen here."""
    while True:
        try:
            return (partial / f"{name}.json").read_bytes()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise OSError(errno.ENOENT, f"its part {name} was written but is not seen in {partial}") from None
        os.listdir(partial)  # has NFS look again
        time.sleep(_LOOK_S)


def verify(folder: Path) -> dict:
    """Return the manifest of a checkpoint that is whole. Raises as :func:`examine` does, and :class:`Damaged` for any wrong file."""
    manifest, wrong = examine(folder)
    for name, what in wrong.items():
        raise Damaged(f"checkpoint {folder}: {name} {what}")
    return manifest


def examine(folder: Path) -> tuple[dict, dict[str, str]]:
    """Compare every byte with the manifest; return it, and what is wrong with each file that is not as it was written.

    Raises :class:`Damaged` for the manifest itself, and :class:`apex.look.Unreadable` where a file cannot be looked at.
    """
    manifest, wrong = read_manifest(folder), {}
    for name, (size, digest) in manifest["files"].items():
        found = _size_and_digest(folder, name)
        if found is None:
            wrong[name] = "is missing"
        elif found[0] != size:
            wrong[name] = f"has {found[0]} bytes, not {size}"
        elif found[1] != digest:
            wrong[name] = "has been changed"
    return manifest, wrong


def read_manifest(folder: Path) -> dict:
    """Return the manifest alone, compared with its own checksum. Raises :class:`Damaged` and :class:`apex.look.Unreadable`."""
    text = look.read(folder / MANIFEST)
    try:
        held = json.loads(text or b"")
        manifest = held["manifest"]
        whole = held["sha256"] == _digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"checkpoint {folder}: {MANIFEST} is missing or torn") from None
    if not whole:
        raise Damaged(f"checkpoint {folder}: {MANIFEST} has been changed")
    if not isinstance(manifest, dict):
        raise Damaged(f"checkpoint {folder}: {MANIFEST} was not written by this program")
    if manifest.get("format") != FORMAT:
        raise Damaged(f"checkpoint {folder}: it has format {manifest.get('format')}, this program reads {FORMAT}")
    wrong = next((name for name, is_right in _FIELDS.items() if not is_right(manifest.get(name))), None)
    if wrong is not None:
        raise Damaged(f"checkpoint {folder}: {MANIFEST} has no usable '{wrong}'")
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _names_files(value: Any) -> bool:
    pairs = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(pair, list) and len(pair) == 2 and _is_count(pair[0]) and isinstance(pair[1], str) for pair in pairs)


def _has_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(section, dict) for section in value.values())


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "files": _names_files, "config": _has_sections, "learner_steps": _is_count, "num_actors": _is_count,
    "replay_ranks": lambda value: _is_count(value) and value > 0,
}  # fmt: skip


def whole(checkpoints: Path) -> list[Path]:
    """Return the folders that have been renamed, newest first. Raises :class:`apex.look.Unreadable`."""
    found = (checkpoints / name for name in look.names(checkpoints) if name.startswith("step-") and name[len("step-") :].isdecimal())
    return sorted(found, key=steps_of, reverse=True)


def steps_of(folder: Path) -> int:
    """Return the learner steps that the name of a checkpoint tells."""
    return int(folder.name[len("step-") :])


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest, and nothing by halves under its own name. Raises OSError."""
    for folder in whole(checkpoints)[keep:]:
        aside = folder.with_name(f".{folder.name}.removed")
        os.rename(folder, aside)
        shutil.rmtree(aside)


def remove_leftovers(checkpoints: Path) -> None:
    """Remove what was being written or removed when a run was killed. Raises :class:`apex.look.Unreadable`."""
    for name in look.names(checkpoints):
        if name.startswith(".step-"):
            shutil.rmtree(checkpoints / name, ignore_errors=True)


def _size_and_digest(folder: Path, name: str) -> tuple[int, str] | None:
    path = folder / name
    if Path(name).name != name or not look.is_file(path):
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if look.is_missing(error):
            return None
        raise look.unreadable(path, error) from None


def _digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
