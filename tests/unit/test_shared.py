"""Memory that ranks of one host lend each other."""

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from apex.transport import shared
from apex.transport.shared import Desk, Peer, make_desk, neighbours

LONG_S = 60.0  # far more than anything takes


def two_desks(entries=2, size=3):
    """Return two ranks' desks, and each rank's peer that is the other."""
    desks = [Desk(size, entries) for _ in range(2)]
    return desks, [Peer(desks[me], me, 1 - me, desks[1 - me].address) for me in range(2)]


def test_what_is_lent_is_what_the_receiver_reads_in_order_and_in_place():
    (desk, _), (sender, receiver) = two_desks()
    outbox = desk.make_outbox(1000)
    for round_ in range(5):  # more rounds than entries
        for at in (0, 100):
            outbox[at : at + 50] = round_ + at % 7
            sender.lend(desk.place(outbox[at : at + 50]), 50, "message")
        for at in (0, 100):
            assert receiver.has_sent()
            assert receiver.borrow().tolist() == receiver.borrow().tolist() == [round_ + at % 7] * 50
            receiver.give_back()
        assert not receiver.has_sent()
        sender.settle()
    sender.lend(10, 0, "message")
    assert receiver.borrow().size == 0


def test_each_of_several_receivers_gets_its_own():
    desks = [Desk(3, 2) for _ in range(3)]
    outbox = desks[0].make_outbox(10)
    outbox[:] = range(10)
    for rank in (1, 2):
        Peer(desks[0], 0, rank, desks[rank].address).lend(rank, rank, "message")
    for rank in (1, 2):
        received = Peer(desks[rank], rank, 0, desks[0].address)
        assert received.borrow().tolist() == list(range(rank, 2 * rank))
        received.give_back()
        assert not received.has_sent()


def test_a_message_is_done_when_the_receiver_gives_it_back_and_not_before():
    (desk, _), (sender, receiver) = two_desks()
    desk.make_outbox(10)
    done = []
    for number in range(2):
        sender.lend(number, 1, f"message {number}", lambda number=number: done.append(number))
    receiver.borrow()
    sender.settle()
    assert (done, [what for what, _ in sender.open]) == ([], ["message 0", "message 1"])
    receiver.give_back()
    sender.settle()
    assert (done, [what for what, _ in sender.open]) == ([0], ["message 1"])


def test_a_refusal_keeps_its_place_in_the_order():
    (desk, _), (sender, receiver) = two_desks(entries=3)
    desk.make_outbox(10)[:] = 7
    sender.lend(0, 2, "message"), sender.refuse("refusal"), sender.lend(0, 1, "message")
    seen = []
    while receiver.has_sent():
        message = receiver.borrow()
        seen.append(None if message is None else message.tolist())
        receiver.give_back()
    assert seen == [[7, 7], None, [7]]


def test_more_than_there_are_entries_for_is_refused_and_overwrites_nothing():
    (desk, _), (sender, receiver) = two_desks(entries=1)
    desk.make_outbox(10)[:] = range(10)
    sender.lend(3, 1, "message")
    with pytest.raises(RuntimeError, match="room for no more"):
        sender.lend(4, 1, "message")
    assert receiver.borrow().tolist() == [3]


def test_a_message_lies_in_the_outbox_or_it_does_not():
    desk = Desk(1, 1)
    assert desk.place(np.zeros(1, np.uint8)) is None
    outbox = desk.make_outbox(100)
    assert [desk.place(part) for part in (outbox, outbox[99:], outbox[50:51])] == [0, 99, 50]
    assert desk.place(np.zeros(10, np.uint8)) is None and desk.place(np.zeros(200, np.uint8)) is None
    other = desk.make_outbox(50)
    assert [desk.place(part) for part in (outbox[99:], other, other[49:])] == [99, -1, -50]
    with pytest.raises(RuntimeError, match="2 outboxes"):
        desk.make_outbox(1)


def test_what_lies_in_the_second_outbox_is_read_there():
    (desk, _), (sender, receiver) = two_desks()
    for start in (0, 100):
        desk.make_outbox(10)[:] = range(start, start + 10)
    for place, nbytes in ((2, 3), (~2, 3)):
        sender.lend(place, nbytes, "message")
    seen = []
    for _ in range(2):
        seen.append(receiver.borrow().tolist())
        receiver.give_back()
    assert seen == [[2, 3, 4], [102, 103, 104]]


def test_the_receiver_cannot_write():
    (desk, _), (sender, receiver) = two_desks()
    sender.lend(0, len(desk.make_outbox(100)), "message")
    with pytest.raises(ValueError, match="read-only"):
        receiver.borrow()[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        receiver._theirs[0] = 1


def _read(address, theirs, mine):
    """Take all that rank 0 has lent, in another process; tell each sum, then None."""
    desk = Desk(2, 4)
    mine.put(desk.address)
    peer = Peer(desk, 1, 0, address)
    for nbytes in iter(theirs.get, None):
        while not peer.has_sent():
            pass
        message = peer.borrow()
        mine.put((len(message) == nbytes, int(message.sum())))
        peer.give_back()
    theirs.get()  # the sender is done with this desk


def test_another_process_reads_it_and_says_so():
    desk = Desk(2, 4)
    outbox = desk.make_outbox(1 << 20)
    outbox[:] = 3
    context = multiprocessing.get_context("spawn")
    here, there = context.Queue(), context.Queue()
    reader = context.Process(target=_read, args=(desk.address, there, here))
    reader.start()
    peer = Peer(desk, 0, 1, here.get(timeout=60))
    for nbytes in (1 << 20, 1, 0, 1000, 5):
        peer.lend(0, nbytes, "message")
        there.put(nbytes)
        assert here.get(timeout=60) == (True, 3 * nbytes)
        while peer.open:
            peer.settle()
    there.put(None), there.put(None)
    reader.join()


def test_nothing_is_left_open_of_memory_that_is_no_longer_used():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        (desk, _), (sender, receiver) = two_desks()
        sender.lend(0, len(desk.make_outbox(1 << 20)), "message")
        receiver.borrow()
    del desk, sender, receiver, _
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_lent_where_the_processor_does_not_keep_the_order_of_stores(monkeypatch):
    assert shared.identity()
    monkeypatch.setattr(shared.platform, "machine", lambda: "aarch64")
    assert shared.identity() == ""


def everyones_neighbours(monkeypatch, identities, blind=()):
    """Return what each rank takes for its neighbours, one thread each; the ranks in ``blind`` cannot open anything."""
    size, barrier, said = len(identities), threading.Barrier(len(identities)), [None] * len(identities)
    rank = threading.local()

    def allgather(mine):
        said[rank.number] = mine
        barrier.wait()
        heard = list(said)
        barrier.wait()
        return heard

    def play(number):
        rank.number = number
        return set(neighbours(list(range(size)), number, make_desk(size, 2), allgather))

    open_file = shared._open

    def look(*address):
        if rank.number in blind:
            raise PermissionError
        return open_file(*address)

    monkeypatch.setattr(shared, "identity", lambda: identities[rank.number])
    monkeypatch.setattr(shared, "_open", look)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(play, range(size)))


def test_neighbours_are_the_others_of_the_same_host(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "b", "a", "b", "a"]) == [{2, 4}, {3}, {0, 4}, {1}, {0, 2}]


def test_a_rank_alone_on_its_host_or_on_one_that_cannot_share_has_none(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "", ""]) == [set(), set(), set()]


def test_where_one_rank_cannot_open_the_memory_of_another_nobody_on_its_host_shares(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "b", "a", "b", "a"], blind=[2]) == [set(), {3}, set(), {1}, set()]


def test_a_desk_that_is_not_the_one_told_of_is_no_neighbour():
    mine, told = Desk(2, 1), Desk(2, 1, nonce=17)
    assert shared._reached(mine, 0, 1, 17, told.address)
    assert shared._reached(mine, 0, 1, 18, told.address) is None
    assert shared._reached(mine, 0, 1, 17, (os.getpid(), 999, 64)) is None


def test_where_memory_cannot_be_made_or_is_limited_nothing_is_lent(monkeypatch):
    def refuse(*args):
        raise PermissionError

    assert set(neighbours([0, 1], 0, make_desk(2, 1), lambda mine: [mine, mine])) == {1}
    monkeypatch.setattr(shared.os, "memfd_create", refuse)
    assert make_desk(2, 1) is None
    assert neighbours([0, 1], 0, None, lambda mine: [mine, mine]) == {}
    monkeypatch.undo()
    monkeypatch.setattr(shared.resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert shared.identity() == ""


class TestBell:
    def test_what_is_lent_to_or_taken_from_a_rank_that_says_that_it_sleeps_wakes_it(self):
        desks, (sender, receiver) = two_desks()
        desks[1].bell.listen(True)
        sender.lend(0, 0, "message")
        assert desks[1].bell.wait(LONG_S)
        desks[0].bell.listen(True)
        receiver.give_back()
        assert desks[0].bell.wait(LONG_S)

    def test_a_rank_that_is_awake_is_left_alone(self):
        desks, (sender, receiver) = two_desks()
        sender.lend(0, 0, "message")
        receiver.give_back()
        assert not desks[1].bell.wait(0.001)
        desks[1].bell.listen(True), desks[1].bell.listen(False)
        sender.wake()
        assert not desks[1].bell.wait(0.001)

    def test_waking_never_waits_for_a_rank_that_does_not_wake_and_is_forgotten_when_it_does(self):
        desks, (sender, _) = two_desks()
        desks[1].bell.listen(True)
        for _ in range(100_000):  # more than the pipe has room for
            sender.wake()
        assert desks[1].bell.wait(LONG_S)
        assert not desks[1].bell.wait(0.001)

    def test_only_a_pipe_is_a_bell(self):
        desks = [Desk(2, 1) for _ in range(2)]
        desks[1].words[5] = desks[1].address[1]  # the desk itself
        with pytest.raises(OSError, match="no pipe"):
            Peer(desks[0], 0, 1, desks[1].address)

    def test_nothing_stays_open(self):
        before = len(os.listdir("/proc/self/fd"))
        desks, peers = two_desks()
        del desks, peers
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
