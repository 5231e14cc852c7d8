"""Memory that ranks of one host share, in which one of them writes anything at all."""

import random

import numpy as np
from mutations import EDGES

from apex.transport.shared_memory import ControlPage, SharedPeer

INPUTS, BOX = 30_000, 1000
ENTRIES = 2


KIND, REFUSED = 3, object()


def pair():
    """Return the control pages of two ranks, and each one's peer that is the other."""
    pages = [ControlPage(2, ENTRIES) for _ in range(2)]
    return pages, [SharedPeer(pages[me], me, 1 - me, pages[1 - me].address) for me in range(2)]


def peek(peer: SharedPeer):
    """Return the next payload, or REFUSED where what was written is none; it is to be released either way."""
    try:
        return peer.peek()
    except (ValueError, OverflowError, OSError):
        return REFUSED


def test_an_entry_of_any_numbers_is_within_the_arena_or_refused_and_the_next_message_arrives(tried):
    tried.least = INPUTS
    rng = random.Random(1)
    pages, (sender, receiver) = pair()
    arena = pages[0].make_arena(BOX)
    arena[:] = np.arange(BOX) % 251
    row, taken = pages[0].row(1), 0
    for _ in range(INPUTS):
        place, nbytes = (
            rng.choice([*EDGES, rng.randint(-3, BOX + 3)]),
            rng.choice([*EDGES, rng.randint(-3, BOX + 3)]),
        )
        sender.post(KIND, 0, 0, token=9)
        entry = (
            row + 8 + 3 * ((sender._sent - 1) % ENTRIES)
        )  # as the page is laid out: counts fill a line of eight words
        pages[0].words[entry + 1], pages[0].words[entry + 2] = place, nbytes
        message = peek(receiver)
        if not nbytes:
            assert message.size == 0
        elif place >= 0 and 0 < nbytes <= BOX - place:
            assert message.tolist() == arena[place : place + nbytes].tolist()
            taken += 1
        else:
            assert message is REFUSED
        receiver.release()
        assert sender.reap() == [(KIND, 9)] and receiver.next_kind() is None
        tried()
    assert INPUTS / 20 < taken < INPUTS / 2
    sender.post(KIND, 10, 5)
    assert receiver.peek().tolist() == [10, 11, 12, 13, 14]


def test_counts_of_any_numbers_cost_one_message_at_most(tried):
    tried.least = 2 * 2000
    rng = random.Random(2)
    pages, (sender, receiver) = pair()
    arena = pages[0].make_arena(BOX)
    arena[:] = np.arange(BOX) % 251
    for _ in range(2000):
        likely = range(receiver._released - ENTRIES, receiver._released + ENTRIES + 1)  # nobody could tell
        pages[0].words[pages[0].row(1)] = rng.choice(
            [count for count in EDGES if count not in likely]
        )  # what it says that it has sent
        assert receiver.next_kind() is not None and peek(receiver) is REFUSED, (
            "an old message was taken for a new one"
        )
        receiver.release()
        for place in range(7, 10):
            sender.post(KIND, place, 3)
            arrived = REFUSED
            if receiver.next_kind() is not None:
                arrived = peek(receiver)
                receiver.release()
            sender.reap()
        assert arrived.tolist() == [9, 10, 11]
        pages[1].words[pages[1].row(0) + 1] = rng.choice(EDGES)  # what the receiver says that it has released
        sender.reap()
        pages[1].words[pages[1].row(0) + 1] = receiver._released
        sender.reap()
        assert not sender.open
        tried(2)
