"""The C part of Ape-X, reached through ctypes. The contracts are in the `.h` files beside this."""

import ctypes
import functools
from pathlib import Path

_LIBRARY = Path(__file__).with_name("libapex_native.so")

_ARRAY = _TREE = ctypes.c_void_p
_COUNT = ctypes.c_int64

# name -> (result, arguments), in the order of the headers
_PROTOTYPES = {
    # segment_tree.h
    "segment_tree_create": (_TREE, [_COUNT]),
    "segment_tree_destroy": (None, [_TREE]),
    "segment_tree_capacity": (_COUNT, [_TREE]),
    "segment_tree_set": (_COUNT, [_TREE, _ARRAY, _ARRAY, _COUNT]),
    "segment_tree_get": (_COUNT, [_TREE, _ARRAY, _ARRAY, _COUNT]),
    "segment_tree_find_prefix": (_COUNT, [_TREE, _ARRAY, _ARRAY, _ARRAY, _COUNT]),
    "segment_tree_total": (ctypes.c_double, [_TREE]),
    "segment_tree_minimum": (ctypes.c_double, [_TREE]),
    "segment_tree_check": (_COUNT, [_TREE]),
    # gather.h
    "gather_rows": (None, [_ARRAY, _ARRAY, _COUNT, _COUNT, _ARRAY]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded `libapex_native.so` with every prototype set; the same object on each call.

    Arrays and trees are passed as addresses (int). Raises ImportError when the library is missing
    or cannot be loaded.
    """
    try:
        loaded = ctypes.CDLL(str(_LIBRARY))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ImportError(f"{_LIBRARY.name} is missing or out of date; run: make native") from error
    return loaded
