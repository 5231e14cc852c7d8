"""The `apex` command: has our packages found before others of the same names, then runs ``launch.cli.main``.

Every ROS 2 shell has a package ``launch`` on PYTHONPATH, and NVIDIA's mixed-precision package is called
``apex``. The name of this module is that of the distribution, so no other package has it. It imports nothing
of ours above.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent
PACKAGES = ("actors", "apex", "configs", "launch", "learner", "native", "replay_rank")


class Finder:
    """Finds our packages beside this file; other modules there keep their place on the path."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package of ours, or None (see ``importlib.abc.MetaPathFinder``)."""
        return PathFinder.find_spec(name, [str(ROOT)]) if path is None and name in PACKAGES else None


def main() -> int:
    """Run the command; return its exit status: 2 where a package with one of our names was imported."""
    foreign = next((name for name in PACKAGES if name in sys.modules and not _is_ours(name)), None)
    if foreign is not None:
        with contextlib.suppress(OSError, ValueError):  # apex.say may be what cannot be imported
            print(_refusal(foreign), file=sys.stderr, flush=True)
        return 2
    sys.meta_path.insert(0, Finder)
    from launch.run import beginning

    beginning.end_on_interrupt()  # what is imported now takes a while, in which Ctrl-C may come
    from launch.cli.main import main as run

    return beginning.to_the_end(run)


def _is_ours(name: str) -> bool:
    return Path(_place(name)).resolve().is_relative_to(ROOT / name)


def _place(name: str) -> str:
    """Return where an imported package is: its file, or the first folder of one that has none."""
    module = vars(sys.modules[name])
    return module.get("__file__") or next(iter(module.get("__path__") or ()), "nowhere")


def _refusal(name: str) -> str:
    return (
        f"apex: another package called '{name}' was imported when Python started, "
        f"from {_place(name)}; remove that "
        "import (it is in sitecustomize, usercustomize or a .pth file), or start with: PYTHONPATH= apex ..."
    )


if __name__ == "__main__":
    sys.exit(main())
