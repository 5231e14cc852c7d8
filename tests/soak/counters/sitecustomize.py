"""Loaded by Python itself at the start of every process of a soak: each rank leaves the counters it ended with in a file."""

import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path

_WHERE = "apex.transport.drive"


def _patch(module) -> None:
    whole = module.drive

    def drive(role, name: str, *more) -> None:
        whole(role, name, *more)
        role.update_counters()
        text = json.dumps({"role": role.counters.role, **role.counters._values})
        Path(os.environ["COUNTERS_FOLDER"], f"{os.getpid()}.json").write_text(text)

    module.drive = drive


class _Finder(importlib.abc.MetaPathFinder):
    """Only when a rank comes to it: imported here it would load NumPy before the rank has set its threads."""

    def find_spec(self, name, path, target=None):
        if name != _WHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), _patch(module))
        return spec


if "COUNTERS_FOLDER" in os.environ:
    sys.meta_path.insert(0, _Finder())
