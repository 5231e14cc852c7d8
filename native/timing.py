"""Times the calls of a tree from C, for `apex bench index`.

`time_calls.c` is compiled when it is first needed, and is no part of the extension. It calls the functions
of the loaded extension, so it measures the code that a replay rank runs.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

import native

_COMPILE_S = 60.0
_SLOTS = np.ctypeslib.ndpointer(np.int64, 1, flags="C")
_MASS = np.ctypeslib.ndpointer(np.float64, 1, flags="C")
_OUT = np.ctypeslib.ndpointer(np.float64, 1, flags=("C", "W"))


def time_calls(
    address: int, op: str, k: int, calls: int, cold_bytes: int, slots: np.ndarray, mass: np.ndarray, seed: int
) -> np.ndarray:
    """Return the time of each call without Python, float64[calls] in microseconds; see `time_calls.h`.

    ``address`` is that of the tree (``Tree.address``); the caller keeps the tree alive. ``slots`` int64[rows]
    and ``mass`` float64[rows] are contiguous. Raises ValueError if such calls are impossible, and
    RuntimeError without a C compiler.
    """
    function, us = load(), np.empty(calls)
    if function is None:
        raise RuntimeError("time_calls.c is not compiled")
    arrays = slots, mass, slots.size, us, calls
    if slots.size != mass.size or function(address, op.encode(), k, cold_bytes, seed, *arrays):
        raise ValueError(f"cannot time {op} of {k} rows")
    return us


@functools.cache
def load() -> Callable[..., int] | None:
    """Return the C function ``time_calls``, compiled once a process; warn and return None if that fails."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "time_calls.so")
            command = ["make", "-s", "-C", str(Path(__file__).parent), "time_calls", f"OUT={path}"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
            ctypes.CDLL(str(native.LIBRARY), ctypes.RTLD_GLOBAL)  # the functions that time_calls.c calls
            function = ctypes.CDLL(str(path)).time_calls
    except (OSError, subprocess.SubprocessError) as error:
        stderr = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        said = [line for line in stderr.splitlines() if line.strip() and not line.startswith("make")]
        why = said[0] if said else error
        failed = f"no calls are timed from C: time_calls.c does not compile ({why})"
        warnings.warn(failed, RuntimeWarning, stacklevel=2)
        return None
    i64, numbers = ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64)
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p, *numbers, _SLOTS, _MASS, i64, _OUT, i64]
    return function
