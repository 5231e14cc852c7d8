"""Memory that ranks of one host lend each other, in which one of them writes anything at all."""

import random

import numpy as np
from mutations import EDGES

from apex.refusals import Refusals
from apex.transport.shared import REFUSED, Desk, Peer, borrow

INPUTS, BOX, LARGEST = 30_000, 1000, 500
ENTRIES = 2


def test_an_entry_of_any_numbers_is_within_the_outbox_or_refused_and_the_next_message_arrives(tried, capfd):
    tried.least = INPUTS
    rng, refusals = random.Random(1), Refusals("receiver")
    desks = [Desk(2, ENTRIES) for _ in range(2)]
    sender, receiver = (Peer(desks[me], me, 1 - me, desks[1 - me].address) for me in range(2))
    outbox = desks[0].make_outbox(BOX)
    outbox[:] = np.arange(BOX) % 251
    row, taken = desks[0].row(1), 0
    for _ in range(INPUTS):
        done, before = [], refusals.count
        place, nbytes = rng.choice([*EDGES, rng.randint(-3, BOX + 3)]), rng.choice([*EDGES, rng.randint(-3, BOX + 3)])
        sender.lend(0, 0, "message", lambda done=done: done.append(1))
        entry = row + 8 + 2 * ((sender._sent - 1) % ENTRIES)  # as the desk is laid out: counts fill a line of eight words
        desks[0].words[entry], desks[0].words[entry + 1] = place, nbytes
        good = place >= 0 and 0 <= nbytes <= min(LARGEST, BOX - place)
        message = borrow(receiver, lambda n: n <= LARGEST, refusals)
        if nbytes == -1:
            assert message is None
        elif good:
            assert message.tolist() == outbox[place : place + nbytes].tolist()
            taken += 1
        else:
            assert message is REFUSED
        assert refusals.count - before == (message is REFUSED)
        if message is not REFUSED:
            receiver.give_back()
        sender.settle()
        assert done == [1] and not receiver.has_sent()
        tried()
    assert INPUTS / 20 < taken < INPUTS / 2
    sender.lend(10, 5, "message")
    assert borrow(receiver, lambda n: n <= LARGEST, refusals).tolist() == [10, 11, 12, 13, 14]
    assert capfd.readouterr().err.count("apex: receiver refused") == 1


def test_counts_of_any_numbers_cost_one_message_at_most(tried):
    tried.least = 2 * 2000
    rng, refusals = random.Random(2), Refusals("receiver")
    desks = [Desk(2, ENTRIES) for _ in range(2)]
    sender, receiver = (Peer(desks[me], me, 1 - me, desks[1 - me].address) for me in range(2))
    outbox = desks[0].make_outbox(BOX)
    outbox[:] = np.arange(BOX) % 251
    for _ in range(2000):
        likely = range(receiver._taken - ENTRIES, receiver._taken + ENTRIES + 1)  # nobody could tell
        desks[0].words[desks[0].row(1)] = rng.choice([count for count in EDGES if count not in likely])  # what it says that it has sent
        assert receiver.has_sent() and borrow(receiver, lambda n: True, refusals) is REFUSED, "an old message was taken for a new one"
        for place in range(7, 10):
            sender.lend(place, 3, "message")
            arrived = borrow(receiver, lambda n: True, refusals) if receiver.has_sent() else REFUSED
            if arrived is not REFUSED:
                receiver.give_back()
            sender.settle()
        assert arrived.tolist() == [9, 10, 11]
        desks[1].words[desks[1].row(0) + 1] = rng.choice(EDGES)  # what the receiver says that it has taken
        sender.settle()
        desks[1].words[desks[1].row(0) + 1] = receiver._taken
        sender.settle()
        assert not sender.open
        tried(2)
