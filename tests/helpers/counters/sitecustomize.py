"""Loaded by Python itself at the start of every process of a soak.

Each rank leaves the counters it ended with in a file; an actor also has, at any time, what it has sent in
another.
"""

import importlib.abc
import importlib.util
import json
import mmap
import os
import sys
from pathlib import Path


def _leave_counters(module) -> None:
    whole = module.drive

    def drive(role, *more) -> None:
        whole(role, *more)
        role.update_counters()
        text = json.dumps({"role": role.counters.role, **role.counters._values})
        Path(os.environ["COUNTERS_FOLDER"], f"{os.getpid()}.json").write_text(text)

    module.drive = drive


def _tell_what_is_sent(module) -> None:
    begin = module.Actor.__init__

    def begin_counting(self, *args) -> None:
        begin(self, *args)
        port, intake, told = self.port, self.intake, _shared_floats(2)
        send, completed = port.send_intake, port.completed_intake

        def send_intake(row, message) -> None:
            told[0] += intake.transitions(row)  # before: a process may be killed in between
            send(row, message)

        def completed_intake() -> list:
            rows = completed()
            told[1] += sum(map(intake.transitions, rows))
            return rows

        port.send_intake, port.completed_intake = send_intake, completed_intake

    module.Actor.__init__ = begin_counting


def _shared_floats(count: int):
    """Return float64 numbers that are a file too, whatever becomes of this process."""
    path = Path(os.environ["SENT_FOLDER"], str(os.getpid()))
    aside = path.parent.parent / f"{path.name}.new"
    aside.write_bytes(bytes(8 * count))
    with open(aside, "r+b") as file:
        floats = memoryview(mmap.mmap(file.fileno(), 8 * count)).cast("d")
    aside.rename(path)
    return floats


_PATCHES = {
    "COUNTERS_FOLDER": ("apex.loop", _leave_counters),
    "SENT_FOLDER": ("actors.actor", _tell_what_is_sent),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Only when a rank comes to it: imported here it would load NumPy before the rank has set its threads."""

    def __init__(self, name, patch):
        self._name, self._patch = name, patch

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), self._patch(module))
        return spec


for _variable, (_name, _patch) in _PATCHES.items():
    if _variable in os.environ:
        sys.meta_path.insert(0, _Finder(_name, _patch))
