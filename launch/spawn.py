"""The name that :mod:`launch.run.spawn` had; it stays for one release."""

from __future__ import annotations

import sys

from apex.say import warn
from launch.run import beginning

if __name__ == "__main__":
    warn(
        "apex: python -m launch.spawn is now python -m launch.run.spawn; the next release drops the old name"
    )
    from launch.run.spawn import main

    sys.exit(beginning.to_the_end(main))
