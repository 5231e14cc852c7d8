"""The format of checkpoints: how a folder is written, committed, verified and read. It knows no fields.

::

    checkpoints/step-000120000/
        manifest.json     sizes and SHA-256 of all other files, configuration, counts; a checksum of itself
        learner.json/.pt  networks, optimiser; and what every rank that writes no file has replied
        replay-0.json     the plain values of a rank's state (see :mod:`apex.state`), and its files
        replay-0.npz      the arrays of its state
        replay-0-...bin   segments: places of the ring, written once; later checkpoints hold a hard link
    checkpoints/latest.pt, best.pt    networks alone

Every rank writes its own files into ``.step-000120000-<number>.partial``, each flushed to the disk. Once all
have, the learner writes the manifest and renames the folder. So one with a manifest is complete, unless
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
from typing import Any

import numpy as np

from apex import files as disk
from apex import look
from apex.config import Config, ConfigError, to_tables
from apex.files import NewFile
from apex.metrics import REPORT_FIELDS, Counters
from apex.state import Unfit, is_count, join, split
from apex.topology import LEARNER, REPLAY

FORMAT = 3
MANIFEST = "manifest.json"
PARTS_SEEN_S = 5.0  # a network file system may show what another host has written a moment later
_LOOK_S = 0.05
# What a run in one process goes on with to the last bit is in buffers of these sizes.
_SIZES = (
    ("run", "transport"), ("actor", "envs"), ("actor", "in_flight"), ("replay", "ranks"),
    ("replay", "capacity"), ("learner", "batch_size"), ("learner", "prefetch"),
)  # fmt: skip

# What is raised by a state that is not of this program, or of another configuration.
_UNFIT = (
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, AssertionError,
)  # fmt: skip


class Corrupt(ConfigError):
    """A checkpoint that cannot be used; the message names it and says what is wrong, in one line."""


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
        disk.link_or_copy(source, self.folder / source.name)
        self.files[source.name] = size, digest

    def write(self, state: dict) -> None:
        """Write a state (see :mod:`apex.state`), and with it finish the part."""
        values, arrays = split(state)
        if arrays:
            self.arrays(arrays)
        self.finish(values)

    def finish(self, values: dict) -> None:
        """Write ``<name>.json``: the part's own values (plain numbers, text, lists) and its files."""
        with NewFile(self.folder / f"{self.name}.json") as file:
            file.write(json.dumps({"values": values, "files": self.files}).encode())


def commit(partial: Path, target: Path, about: dict, parts: Iterable[str]) -> None:
    """Turn the folder ``partial``, in which ``parts`` are finished, into the checkpoint ``target``.

    ``about`` becomes part of the manifest. Raises OSError, which names a missing part.
    """
    files: dict[str, tuple[int, str]] = {}
    deadline = time.monotonic() + PARTS_SEEN_S
    for name in sorted(parts):
        text = _read_part(partial, name, deadline)
        files |= json.loads(text)["files"] | {f"{name}.json": (len(text), hashlib.sha256(text).hexdigest())}
    manifest = {"format": FORMAT, **about, "files": files}
    with NewFile(partial / MANIFEST) as file:
        file.write(json.dumps({"sha256": _digest(manifest), "manifest": manifest}, indent=1).encode())
    disk.flush_folder(partial)
    os.rename(partial, target)
    disk.flush_folder(target.parent)


def _read_part(partial: Path, name: str, deadline: float) -> bytes:
    """Return the text of a part that its rank has finished, as soon as it is seen here."""
    while True:
        try:
            return (partial / f"{name}.json").read_bytes()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                why = f"its part {name} was written but is not seen in {partial}"
                raise OSError(errno.ENOENT, why) from None
        os.listdir(partial)  # has NFS look again
        time.sleep(_LOOK_S)


def examine(folder: Path) -> tuple[dict, dict[str, str]]:
    """Compare every byte with the manifest. Return the manifest, and file name -> what is wrong with it.

    Raises :class:`Corrupt` for a wrong manifest, :class:`apex.look.Unreadable` for an unreadable file.
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
    """Return the manifest, compared with its checksum.

    Raises :class:`Corrupt` and :class:`apex.look.Unreadable`.
    """
    text = look.read(folder / MANIFEST)
    try:
        held = json.loads(text or b"")
        manifest = held["manifest"]
        is_whole = held["sha256"] == _digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Corrupt(f"checkpoint {folder}: {MANIFEST} is missing or torn") from None
    if not is_whole:
        raise Corrupt(f"checkpoint {folder}: {MANIFEST} has been changed")
    if not isinstance(manifest, dict):
        raise Corrupt(f"checkpoint {folder}: {MANIFEST} was not written by this program")
    if manifest.get("format") != FORMAT:
        held = manifest.get("format")
        raise Corrupt(f"checkpoint {folder}: it has format {held}, this program reads {FORMAT}")
    wrong = next((name for name, is_right in _FIELDS.items() if not is_right(manifest.get(name))), None)
    if wrong is not None:
        raise Corrupt(f"checkpoint {folder}: {MANIFEST} has no usable '{wrong}'")
    return manifest


def _is_size_and_digest(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and is_count(pair[0]) and isinstance(pair[1], str)


def _names_files(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_size_and_digest, value.values()))


def _has_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(section, dict) for section in value.values())


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "files": _names_files, "config": _has_sections, "learner_steps": is_count, "num_actors": is_count,
    "replay_ranks": lambda value: is_count(value) and value > 0,
}  # fmt: skip


def complete(checkpoints: Path) -> list[Path]:
    """Return the folders that have been renamed, newest first. Raises :class:`apex.look.Unreadable`."""
    names = [name for name in look.names(checkpoints) if name.startswith("step-")]
    found = [checkpoints / name for name in names if name.removeprefix("step-").isdecimal()]
    return sorted(found, key=steps_of, reverse=True)


def steps_of(folder: Path) -> int:
    """Return the learner steps that the name of a checkpoint tells."""
    return int(folder.name.removeprefix("step-"))


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest, and nothing by halves under its own name. Raises OSError."""
    for folder in complete(checkpoints)[keep:]:
        aside = folder.with_name(f".{folder.name}.removed")
        os.rename(folder, aside)
        shutil.rmtree(aside)


def remove_leftovers(checkpoints: Path) -> None:
    """Remove what a killed run was writing or removing. Raises :class:`apex.look.Unreadable`."""
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


class Reader:
    """A complete checkpoint, for a run of ``config``. Methods raise :class:`Corrupt` where it cannot be read.

    ``exact``: the run goes on to the last bit, in one process as before and with buffers as before.
    """

    def __init__(self, folder: Path, config: Config, num_actors: int):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.config: dict[str, dict] = self.manifest["config"]
        for section, name in (*_SIZES, ("replay", "checkpoint")):
            self.require_field(section, name)
        self.learner_steps: int = self.manifest["learner_steps"]
        self.replay_ranks: int = self.manifest["replay_ranks"]
        self.exact = self._is_exact(to_tables(config), num_actors)

    @property
    def has_replay(self) -> bool:
        """Whether it holds the contents of replay."""
        return self.config["replay"]["checkpoint"]

    def require_field(self, section: str, name: str | None = None) -> None:
        """Raise :class:`Corrupt` where the configuration lacks a section, or a field of it."""
        if section not in self.config or (name is not None and name not in self.config[section]):
            raise self._corrupt(f"the configuration in manifest.json lacks '{name or section}'")

    def values(self, name: str) -> dict:
        """Return the plain values of a part's state."""
        text = look.read(self.folder / f"{name}.json")
        try:
            values = json.loads(text or b"")["values"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._corrupt(f"{name}.json cannot be read: {type(error).__name__}") from None
        if not isinstance(values, dict):
            raise self._corrupt(f"{name}.json has no usable 'values'")
        return values

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part."""
        text = look.read(self.folder / f"{name}.npz")
        try:
            with np.load(io.BytesIO(text or b""), allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except Exception as error:
            raise self._corrupt(f"{name}.npz cannot be read: {type(error).__name__}") from None

    def state(self, name: str) -> dict:
        """Return the state that a part holds, arrays included."""
        return join(self.values(name), self.arrays(name) if f"{name}.npz" in self.manifest["files"] else {})

    def tensors(self, name: str) -> dict:
        """Return what the ``.pt`` file of a part holds."""
        return load(self.folder / f"{name}.pt")

    @contextlib.contextmanager
    def reading(self, part: str) -> Iterator[None]:
        """Raise :class:`Corrupt`, in one line, for what ``load_state_dict`` raises in this context."""
        try:
            yield
        except ConfigError:
            raise
        except Unfit as error:
            raise self._corrupt(f"{part} has {error}") from error
        except _UNFIT as error:
            why = (str(error).splitlines() or [""])[0]
            raise self._corrupt(f"{part} does not fit this run: {type(error).__name__}: {why}") from error

    def answers(self, role: str) -> dict[int, dict]:
        """Return the states that the ranks of a role that write no files replied with, by role index."""
        return {int(index): state for index, state in self.values(LEARNER)["answers"].get(role, {}).items()}

    def counters(self, role: str, index: int, ranks: int) -> Counters:
        """Return the counters of rank ``index`` where a role now has ``ranks`` ranks. Their sums stay."""
        counters, fields = Counters(role), REPORT_FIELDS[role]
        if role == REPLAY:
            held = [self.values(f"{REPLAY}-{old}")["counters"] for old in range(self.replay_ranks)]
            shares = {
                name: share([old[name] for old in held], ranks, index) for name in fields if name in held[0]
            }
            counters.load_state_dict(shares)
            return counters
        answers = sorted(self.answers(role).items())
        if mine := [state["counters"] for old, state in answers if old % ranks == index]:
            counters.load_state_dict(
                {name: sum(old[name] for old in mine) for name in fields if name in mine[0]}
            )
        return counters

    def _corrupt(self, why: str) -> Corrupt:
        return Corrupt(f"checkpoint {self.folder}: {why}")

    def _is_exact(self, now: dict[str, dict], num_actors: int) -> bool:
        same = all(now[section][name] == self.config[section][name] for section, name in _SIZES)
        same = same and num_actors == self.manifest["num_actors"]
        return same and now["run"]["transport"] == "local" and self.has_replay


def share(values: list[Any], ranks: int, rank: int) -> Any:
    """Return a rank's part of a sum of counts: of the same number of ranks its own, else an equal share."""
    if len(values) == ranks:
        return values[rank]
    total = sum(values)
    return total // ranks + (total % ranks if rank == 0 else 0)


def save(path: Path, tensors: dict) -> None:
    """Write tensors, numbers and text so that ``path`` is the old file or the new one. Raises OSError."""
    path.parent.mkdir(exist_ok=True)  # without parents: a run folder that is removed stays removed
    disk.replace(path, as_bytes(tensors))


def as_bytes(tensors: dict) -> memoryview:
    """Return what ``torch.save`` writes. Writing to a disk directly, it would hide the disk's errors."""
    import torch  # a replay rank has none

    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getbuffer()


def load(path: Path) -> dict:
    """Read tensors on the CPU; raises :class:`ConfigError` naming a missing or unreadable file."""
    import torch

    text = look.read(path)
    if text is None:
        raise ConfigError(f"no checkpoint at {path}")
    try:
        state = torch.load(io.BytesIO(text), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {type(error).__name__}") from error
    if not isinstance(state, dict):
        kind = type(state).__name__
        raise ConfigError(f"checkpoint {path} was not written by this program: it holds a {kind}")
    return state
