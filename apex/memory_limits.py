"""The memory that is still available: the machine's, and what control groups leave of it.

A limit holds for a group and all below it, so each level from this process's group up to the top of the mount
counts. Pages of files do not: the kernel takes them back before it refuses memory to anyone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NO_LIMIT = 2**62
_ROOT = Path("/")


class _Version(NamedTuple):
    """File names of one version, and the lines of ``memory.stat`` that count reclaimable memory."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


_V1 = _Version(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2 = _Version(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file", "slab_reclaimable")
)


def available_bytes(root: Path = _ROOT) -> int:
    """Return the available bytes; ``root`` is the folder that holds ``proc`` and the mounts."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(free, *(_left(folder, version) for folder, version in _groups(root)), NO_LIMIT)


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Yield the memory groups of this process, from its own to the top of the mount."""
    paths = _own_paths(root)
    for mounted, at, version in _mounts(root):
        path = paths.get(version)
        if path is None:
            continue
        below = _below(path, mounted)
        top = root / at.lstrip("/")
        for depth in range(len(below), -1, -1):
            yield top.joinpath(*below[:depth]), version


def _own_paths(root: Path) -> dict[_Version, str]:
    """Return this process's path in each hierarchy that can limit memory."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[_V2] = path
        elif "memory" in controllers.split(","):
            paths[_V1] = path
    return paths


def _mounts(root: Path) -> Iterator[tuple[str, str, _Version]]:
    """Yield (group at the top, folder, version) of each mounted hierarchy: see proc_pid_mountinfo(5)."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        top, at = (_unescaped(field) for field in before.split()[3:5])
        kind, *_, options = after.split()
        if kind == "cgroup2":
            yield top, at, _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            yield top, at, _V1


def _unescaped(field: str) -> str:
    """Return a path in which spaces are written as ``\\040`` and the like."""
    return field.encode().decode("unicode_escape")


def _below(path: str, mounted: str) -> tuple[str, ...]:
    """Return the folders from the top of the mount to ``path``; none if a container shows only its own."""
    own, top = Path(path), Path(mounted)
    if ".." in own.parts or not own.is_relative_to(top):
        return ()
    return own.relative_to(top).parts


def _left(folder: Path, version: _Version) -> int:
    """Return what the limits of one group leave, at least 0."""
    stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
    limits = [_number(folder / name) for name in version.limits]
    if version is _V1:  # also where a parent cannot be seen from here
        limits.append(int(stat.get("hierarchical_memory_limit", NO_LIMIT)))
    used = _number(folder / version.used, default=0) - sum(
        int(stat.get(name, 0)) for name in version.reclaimable
    )
    return max(0, min(limits) - max(0, used))


def _number(file: Path, default: int = NO_LIMIT) -> int:
    """Return what a file says; ``default`` where there is none, or it says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return default


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
