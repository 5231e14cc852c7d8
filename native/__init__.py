"""The C part of Ape-X. The contracts are in the `.h` files beside this; `module.c` binds them.

`Tree(kind, capacity, alpha=0.0, portable=False)` is a tree of `segment_tree.h`. Its methods take arrays
that C can read as they are (one-dimensional, contiguous, int64 or float64), and raise `Unfit` for others
and `Refused(row)` where C refuses a row. `replay_rank.index` is the comfortable way to it.
"""

from pathlib import Path

try:
    from native._native import FOR_DEVICE, Refused, Tree, Unfit, gather_rows, use_host, within
except ImportError as error:
    if "GOACC" in str(error):
        raise ImportError("torch brought a libgomp without OpenACC; import native before torch") from error
    raise ImportError(f"the C part is missing or out of date ({error}); run: make native") from error

LIBRARY = Path(__file__).with_name("_native.abi3.so")

# The kinds of tree, and how a binary one updates, in the order of segment_tree.h.
WIDE64, WIDE32, BINARY, RANKED = range(4)
FORMS = ("auto", "element", "rebuild", "levels")
NEVER = 2**63 - 1  # a crossover
NOT_CHECKED = -2

__all__ = [
    "BINARY", "FORMS", "FOR_DEVICE", "LIBRARY", "NEVER", "NOT_CHECKED", "RANKED", "WIDE32", "WIDE64",
    "Refused", "Tree", "Unfit", "gather_rows", "use_host", "within",
]  # fmt: skip
