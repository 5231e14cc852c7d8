"""Inputs for the tests of this folder.

Random bytes, and messages that were good before something happened to them.
"""

import random
import struct

HEADER = struct.Struct(
    "<4sIq"
)  # of a message over ZeroMQ, as docs and zmq_link say; written down again on purpose
EDGES = [
    0,
    1,
    2,
    3,
    4,
    -1,
    7,
    8,
    63,
    64,
    2**15,
    2**31 - 1,
    -(2**31),
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    -(2**63),
]


def header(kind: int, arg: int = 0, magic: bytes = b"Apex") -> bytes:
    """Return the header of a message over ZeroMQ."""
    return HEADER.pack(magic, kind & 0xFFFFFFFF, arg)


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` with one to eight bits changed."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def resize(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` cut short, or with something behind it."""
    if rng.random() < 0.5:
        return data[: rng.choice([0, 1, len(data) // 2, max(0, len(data) - 1), rng.randint(0, len(data))])]
    return data + rng.randbytes(rng.choice([1, 8, 64, rng.randint(1, 300)]))


def overwrite(rng: random.Random, data: bytes, width: int = 8) -> bytes:
    """Return ``data`` with one to four of its aligned words replaced by numbers at the edges, or by special
    floats.
    """
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4) if len(changed) >= width else 0):
        at = rng.randrange(len(changed) // width) * width
        changed[at : at + width] = _word(rng, width)
    return bytes(changed)


def _word(rng: random.Random, width: int) -> bytes:
    if rng.random() < 0.4:
        special = rng.choice([float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 1e-320, 3e38])
        return struct.pack("<d" if width == 8 else "<f", special)
    return (rng.choice(EDGES) & (2 ** (8 * width) - 1)).to_bytes(width, "little")


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` after something has happened to it, or nothing at all (one time in ten), or random
    bytes.
    """
    how = rng.random()
    if how < 0.1:
        return data
    if how < 0.25:
        return rng.randbytes(rng.choice([0, 1, 8, len(data), rng.randint(0, 2 * len(data) + 8)]))
    change = rng.choice([flip_bits, resize, overwrite, lambda r, d: overwrite(r, d, 4)])
    return change(rng, data)


def mutate_frames(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Return a message over ZeroMQ after something has happened to its frames."""
    how, frames = rng.random(), list(frames)
    if how < 0.1:
        return frames
    if how < 0.2:
        return [rng.randbytes(rng.randint(0, 40)) for _ in range(rng.randint(1, 5))]
    if how < 0.35:  # another kind, or argument
        return [header(rng.choice([rng.randrange(21), rng.getrandbits(32)]), rng.choice(EDGES)), *frames[1:]]
    if how < 0.45:  # a frame too many, or too few
        extra = rng.choice([b"", rng.randbytes(10), frames[0]])
        return frames[:-1] or [b""] if rng.random() < 0.5 else [*frames, extra]
    at = rng.randrange(len(frames))
    frames[at] = mutate(rng, frames[at])
    return frames
