"""Tests the accelerator that binary trees were compiled for; without a working one, trees stay on the host.

A failing device ends its process, so another process tries it first.
"""

import functools
import random
import subprocess
import sys
import warnings
from array import array
from pathlib import Path

import native

_TIMEOUT_S = 60.0


@functools.cache
def settle() -> None:
    """Test the device once a process; if it fails, warn and keep trees on the host. Results are equal."""
    if not native.FOR_DEVICE:
        native.use_host()  # whatever ACC_DEVICE_TYPE says
        return
    command = [sys.executable, "-m", "native.accelerator"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=Path(__file__).parents[1]
        )
        trouble = (
            None
            if done.returncode == 0
            else (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = str(error)
    if trouble is not None:
        native.use_host()
        warnings.warn(
            f"no accelerator for the binary tree ({trouble}); it runs on the processor",
            RuntimeWarning,
            stacklevel=2,
        )


def try_device(slots: int = 1000, rows: int = 400) -> None:
    """Compare trees on device and host; RuntimeError if there is no device or they differ."""
    tree, other = native.Tree(native.BINARY, slots), native.Tree(native.WIDE64, slots)
    if tree.backend != "openacc device":
        raise RuntimeError("there is no device")
    pick = random.Random(0)
    # Whole numbers: their sums are exact in any order.
    for _ in range(3):
        at = array("q", (pick.randrange(slots) for _ in range(rows)))
        mass = array("d", (float(pick.randrange(100)) for _ in range(rows)))
        if tree.set(at, mass) != other.set(at, mass):
            raise RuntimeError("the device adds wrong sums")
    targets = array("d", (pick.randrange(int(tree.total)) + 0.5 for _ in range(rows)))
    found = [(array("q", bytes(8 * rows)), array("d", bytes(8 * rows))) for _ in range(2)]
    tree.find_prefix(targets, *found[0])
    other.find_prefix(targets, *found[1])
    if found[0] != found[1] or tree.check() != -1:
        raise RuntimeError("the device finds wrong slots")


if __name__ == "__main__":
    try:
        try_device()
    except RuntimeError as error:
        sys.exit(str(error))
