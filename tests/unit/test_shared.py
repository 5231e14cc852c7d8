"""Memory that ranks of one host lend each other."""

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from apex.transport import shared
from apex.transport.shared import Inbox, Outbox, neighbours


def test_what_is_entered_is_what_the_receiver_reads_in_order_and_in_place():
    outbox = Outbox(world_size=3, entries=2, nbytes=1000)
    inbox = Inbox(outbox.address, 3, 2, me=1)
    other = Inbox(outbox.address, 3, 2, me=2)
    for round_ in range(5):  # more rounds than entries
        for dest, at in ((1, 0), (2, 500), (1, 100)):
            outbox.data[at : at + 50] = round_ + at % 7
            outbox.enter(dest, outbox.data[at : at + 50])
        assert inbox.next().tolist() == [round_] * 50
        assert inbox.next().tolist() == [round_ + 100 % 7] * 50
        assert other.next().tolist() == [round_ + 500 % 7] * 50
    outbox.enter(1, outbox.data[10:10])
    assert inbox.next().size == 0


def test_a_message_lies_in_the_outbox_or_it_does_not():
    outbox = Outbox(1, 1, 100)
    assert outbox.holds(outbox.data) and outbox.holds(outbox.data[99:]) and outbox.holds(outbox.data[50:50])
    assert not outbox.holds(np.zeros(10, np.uint8)) and not outbox.holds(np.zeros(200, np.uint8))


def test_the_receiver_cannot_write():
    inbox = Inbox((outbox := Outbox(1, 1, 100)).address, 1, 1, 0)
    outbox.enter(0, outbox.data)
    with pytest.raises(ValueError, match="read-only"):
        inbox.next()[0] = 1


def _read(address, queue):
    queue.put(int(Inbox(address, 1, 1, 0).next().sum()))


def test_another_process_reads_it():
    outbox = Outbox(1, 1, 1 << 20)
    outbox.data[:] = 3
    outbox.enter(0, outbox.data)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    reader = context.Process(target=_read, args=(outbox.address, queue))
    reader.start()
    assert queue.get(timeout=60) == 3 << 20
    reader.join()


def test_nothing_is_left_open_of_memory_that_is_no_longer_used():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        outbox = Outbox(2, 2, 1 << 20)
        Inbox(outbox.address, 2, 2, 1)
    del outbox
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
        return neighbours(number, allgather)

    open_inbox = shared.Inbox

    def inbox(*args):
        if rank.number in blind:
            raise PermissionError
        return open_inbox(*args)

    monkeypatch.setattr(shared, "identity", lambda: identities[rank.number])
    monkeypatch.setattr(shared, "Inbox", inbox)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(play, range(size)))


def test_neighbours_are_the_others_of_the_same_host(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "b", "a", "b", "a"]) == [{2, 4}, {3}, {0, 4}, {1}, {0, 2}]


def test_a_rank_alone_on_its_host_or_on_one_that_cannot_share_has_none(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "", ""]) == [set(), set(), set()]


def test_where_one_rank_cannot_open_the_memory_of_another_nobody_on_its_host_shares(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "b", "a", "b", "a"], blind=[2]) == [set(), {3}, set(), {1}, set()]


def test_a_probe_that_is_not_the_one_told_of_is_no_neighbour():
    outbox = Outbox(1, 1, 16)
    outbox.enter(0, outbox.data)
    assert shared._reads("", bytes(16), outbox.address)
    assert not shared._reads("", b"x" * 16, outbox.address)
    assert not shared._reads("", bytes(16), np.array([os.getpid(), 999, 64], np.int64))


def test_where_memory_cannot_be_made_or_is_limited_nothing_is_lent(monkeypatch):
    def refuse(*args):
        raise PermissionError

    assert neighbours(0, lambda mine: [mine, mine]) == {1}
    monkeypatch.setattr(shared.os, "memfd_create", refuse)
    assert neighbours(0, lambda mine: [mine, mine]) == set()
    monkeypatch.undo()
    monkeypatch.setattr(shared.resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert shared.identity() == ""
