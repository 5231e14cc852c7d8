"""The folder of one run: its configuration, log, result, error, and where the rest of it goes.

::

    runs/latest -> <preset>-<YYYYmmdd-HHMMSS>-s<seed>/.without-events/   links to all below but tensorboard/
    runs/<preset>-<YYYYmmdd-HHMMSS>-s<seed>/
        config.toml    the resolved configuration
        metrics.jsonl  one row of the log a line
        result.json    how the run ended, written once
        error.txt      the traceback that ended it, the first writer's
        .reserve       while it goes on: room for result.json or error.txt, should the disk be full
        .lock          the process that runs it (``apex.run_lock``); .starting/: ranks that have come
        stacks/        where ranks were that hung, or waited for one that did
        checkpoints/   latest.pt and best.pt: networks; step-*/: all that a run resumes from
        tensorboard/   metrics-lost.jsonl: rows from after the checkpoint that the run was resumed from

TensorBoard follows links and shows each folder with events as a run of its own. ``latest`` leads to a view of
the newest run without them, so that ``tensorboard --logdir runs`` shows every run once.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from apex import look
from apex.config import ConfigError, nearest
from apex.metrics import ROW_FIELDS
from apex.say import warn

REASONS = ("target_return", "learner_steps", "wall_s", "signal", "killed", "error")
"""Why a run ended: a limit of the configuration, a signal, a signal that forced it, or an error."""
_RESERVE_BYTES = 64 << 10


_VIEW = ".without-events"
_IN_VIEW = (
    "config.toml",
    "metrics.jsonl",
    "metrics-lost.jsonl",
    "result.json",
    "error.txt",
    "stacks",
    "skipped",
    "checkpoints",
)


def create(directory: look.StrPath, preset: str, seed: int) -> Path:
    """Make the folder of a new run, point ``latest`` at it, and return it.

    ``preset`` is a name or a ``.toml`` path. Runs started in the same second get -2, -3, ...
    Raises OSError where the folder cannot be made.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stem = Path(preset).name.removesuffix(".toml")
    folder = _make_first_free(directory, f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-s{seed}")
    RunFolder(folder).checkpoints.mkdir()
    _point_latest_at(folder)
    return folder


def _make_first_free(directory: Path, name: str) -> Path:
    folder, n = directory / name, 1
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()  # the test and the claim are one call: of two runs, one gets the name
            return folder
        n += 1
        folder = directory / f"{name}-{n}"


def _point_latest_at(folder: Path) -> None:
    latest = folder.parent / "latest"
    if not latest.is_symlink() and os.path.lexists(latest):
        warn(f"warning: {latest} is not a symbolic link; left as it is")
        return
    temporary = _temporary_name(latest)
    try:
        _make_view(folder / _VIEW)
        temporary.symlink_to(Path(folder.name, _VIEW))
        os.replace(temporary, latest)
    except OSError as error:  # a file system without symbolic links is no reason not to train
        temporary.unlink(missing_ok=True)
        shutil.rmtree(folder / _VIEW, ignore_errors=True)
        warn(f"warning: {latest} could not be updated: {error.strerror}")


def _make_view(view: Path) -> None:
    """Make a folder of links to what the run beside it has, or will have, except what TensorBoard reads."""
    view.mkdir()
    for name in _IN_VIEW:
        (view / name).symlink_to(Path("..", name))


def _followed(path: Path) -> Path:
    """Return the folder that ``path`` is or leads to: of a view, the run's."""
    folder = path
    with contextlib.suppress(
        OSError
    ):  # it is no link; or looking fails, as it then does for whatever is asked of it next
        folder = path.parent / os.readlink(path)
    return folder.parent if folder.name == _VIEW else folder


def resolve(run: str, directory: look.StrPath = "runs") -> Path:
    """Return the folder of a run given by name in ``directory``, by path, or as ``"latest"``.

    ``"latest"`` gives the folder it points at now. Raises :class:`ConfigError`, in one line, if
    there is no such run.
    """
    for folder in (Path(directory) / run, Path(run)):
        if _is_run(folder):
            return _followed(folder)
    names = [
        name
        for name in look.names(directory)
        if not name.startswith(".") and _may_be_run(Path(directory) / name)
    ]
    if not names:
        raise ConfigError(f"no run '{run}': there are no runs in {directory}")
    # A folder may hold hundreds of runs: name only the closest.
    close = difflib.get_close_matches(run, names, n=5, cutoff=0.0)
    raise ConfigError(f"no run '{run}' in {directory}; {nearest(run, close)}")


def _is_run(folder: Path) -> bool:
    return any(look.is_there(folder / part) for part in ("config.toml", "metrics.jsonl", "checkpoints"))


def _may_be_run(folder: Path) -> bool:
    """Whether it is a run, or nobody here can tell: another user's, beside the one that is looked for."""
    try:
        return _is_run(folder)
    except look.Unreadable:
        return True


class RunFolder:
    """What is read from and written to the folder of one run, which exists; ``path`` may be ``latest``."""

    def __init__(self, path: look.StrPath):
        self.path = _followed(Path(path))
        self.config_path = self.path / "config.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self._reserve = self.path / ".reserve"

    def stacks_of(self, role: str, index: int) -> Path:
        """Return the file that a rank writes its stacks to when it hangs."""
        return self.path / "stacks" / f"{role}-{index}.txt"

    def write_config(self, toml_text: str) -> None:
        """Write ``config.toml`` (see :func:`apex.config.to_toml`); a reader sees all of it or none."""
        os.replace(_write_temporary(self.config_path, toml_text), self.config_path)

    def append_row(self, row: dict) -> None:
        """Append one row to ``metrics.jsonl`` and flush it. Raises ValueError for NaN or infinity."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with open(self.metrics_path, "a+b") as file:
            # Where an earlier writer died in mid-line, only its own row may be lost.
            file.write(b"\n" + line if _ends_in_mid_line(file) else line)

    def rows(self) -> list[dict]:
        """Return all rows written so far, oldest first; a torn line is left out."""
        return Tail(self.metrics_path).new_rows()

    def check_rows(self) -> None:
        """Raise :class:`ConfigError`, naming the file, for a row that is no run's (see :func:`row_fault`)."""
        for row in self.rows():
            fault = row_fault(row)
            if fault is not None:
                raise ConfigError(
                    f"{self.metrics_path} is not a run's log: {fault}; move it aside to go on without it"
                )

    def cut_rows(self, wall_s: float) -> None:
        """Move the rows after ``wall_s`` to ``metrics-lost.jsonl``: a resumed run repeats that time."""
        rows = self.rows()
        lost = [row for row in rows if (row.get("wall_s") or 0.0) > wall_s]
        kept_rows = [row for row in rows if not (row.get("wall_s") or 0.0) > wall_s]
        if not lost:
            return
        aside = RunFolder(self.path)
        aside.metrics_path = self.path / "metrics-lost.jsonl"
        for row in lost:
            aside.append_row(row)
        kept = "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept_rows)
        os.replace(_write_temporary(self.metrics_path, kept), self.metrics_path)

    def write_result(self, result: dict, replace: bool = False) -> bool:
        """Write ``result.json`` atomically; return False if there is one that must not be replaced."""
        path, text = self.path / "result.json", json.dumps(result, indent=2, allow_nan=False) + "\n"
        written = self._with_reserve(_write_over if replace else _write_once, path, text)
        self.release()
        return written

    def reserve(self) -> None:
        """Reserve the room that the result and an error need on a full disk. Raises OSError."""
        with open(self._reserve, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)

    def release(self) -> None:
        """Give that room back."""
        with contextlib.suppress(OSError):
            self._reserve.unlink()

    def result(self) -> dict | None:
        """Return what :meth:`write_result` wrote, or None. Raises :class:`ConfigError` for other contents."""
        path = self.path / "result.json"
        text = look.read(path)
        return None if text is None else _checked_result(path, text)

    def write_error(self, text: str) -> bool:
        """Write ``error.txt`` atomically. The first writer wins; returns whether that was this call."""
        return self._with_reserve(_write_once, self.path / "error.txt", text)

    def _with_reserve(self, write: Callable[[Path, str], bool], path: Path, text: str) -> bool:
        """Write; where the disk is full, once more in the room that was reserved."""
        try:
            return write(path, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        self.release()
        return write(path, text)

    def remove_error(self) -> None:
        """Remove ``error.txt``, if there is one."""
        (self.path / "error.txt").unlink(missing_ok=True)

    def error(self) -> str | None:
        """Return the traceback that ended the run, or None."""
        text = look.read(self.path / "error.txt")
        return None if text is None else text.decode(errors="replace")


class Tail:
    """Reads a growing file of JSON lines from where it last stopped: O(new rows) a call."""

    def __init__(self, path: look.StrPath):
        self._path = Path(path)
        self._offset = 0

    def new_rows(self) -> list[dict]:
        """Return the rows completed since the last call; [] while there is no file."""
        if not look.is_file(self._path):
            return []
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise look.unreadable(self._path, error) from None
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [row for line in complete.splitlines() if (row := _parse(line)) is not None]


def make_result(
    reason: str,
    status: int,
    row: dict | None,
    *,
    eval_return: float | None,
    eval_episodes: int,
    wall_s: float,
    ranks: int,
    transport: str,
    preset: str,
    seed: int,
) -> dict:
    """Return the content of ``result.json``, from the last row of the log if there is one.

    ``status`` is the exit status. Steps and frames are 0 without a row; a NaN return becomes None.
    Raises ValueError for a reason not in :data:`REASONS`.
    """
    if reason not in REASONS:
        raise ValueError(f"unknown reason '{reason}'; {nearest(reason, REASONS)}")
    known = None if eval_return is None or not math.isfinite(eval_return) else float(eval_return)
    steps = {key: int((row or {}).get(key) or 0) for key in ("learner_steps", "agent_steps", "env_frames")}
    return {
        "reason": reason,
        "status": status,
        "eval_return": known,
        "eval_episodes": int(eval_episodes),
        **steps,
        "wall_s": float(wall_s),
        "ranks": int(ranks),
        "transport": transport,
        "preset": preset,
        "seed": int(seed),
    }


def _ends_in_mid_line(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _parse(line: bytes) -> dict | None:
    """Return the row of a line, or None for a line torn by a crash."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def row_fault(row: dict) -> str | None:
    """Return what is wrong with a row of the log, or None: what a row tells is a finite number or None."""
    for name in ROW_FIELDS:
        value = row.get(name)
        if not (value is None or _is_number(value)):
            return f"{name} = {json.dumps(value)[:40]} is not a finite number"
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # also False for NaN and infinity


_OF_RESULT: dict[str, type | tuple[type, ...]] = {
    "reason": str, "status": int, "wall_s": (int, float), "learner_steps": int, "eval_episodes": int,
}  # fmt: skip


def _checked_result(path: Path, text: bytes) -> dict:
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON") from None
    known = result if isinstance(result, dict) else {}
    wrong = next((name for name, kind in _OF_RESULT.items() if not isinstance(known.get(name), kind)), None)
    if wrong is None and not (known.get("eval_return") is None or _is_number(known["eval_return"])):
        wrong = "eval_return"
    if wrong is not None:
        raise ConfigError(f"{path} is not a run's result: it has no usable '{wrong}'")
    return result


def _temporary_name(path: Path) -> Path:
    """Return a name beside ``path`` that no other process or thread uses."""
    return path.with_name(f".{path.name}-{uuid.uuid4().hex}")


def _write_temporary(path: Path, text: str) -> Path:
    temporary = _temporary_name(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _write_over(path: Path, text: str) -> bool:
    os.replace(_write_temporary(path, text), path)
    return True


def _write_once(path: Path, text: str) -> bool:
    """Create ``path`` with all of ``text``, unless it exists; return whether it was created.

    A hard link, unlike a rename, fails where the name is taken: no moment between test and write.
    """
    if path.exists():
        return False
    temporary = _write_temporary(path, text)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links on this file system: as good as it gets is test, then rename
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True
