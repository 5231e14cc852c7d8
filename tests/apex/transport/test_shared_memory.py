"""Memory of one host that its ranks read in place."""

import contextlib
import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from apex.transport import shared_memory
from apex.transport.shared_memory import ControlPage, SharedPeer, make_page, neighbours

KIND = 5
LONG_S = 60.0  # far more than anything takes


def two_pages(entries=2, size=3):
    """Return two ranks' pages, and each rank's peer that is the other."""
    pages = [ControlPage(size, entries) for _ in range(2)]
    return pages, [SharedPeer(pages[me], me, 1 - me, pages[1 - me].address) for me in range(2)]


def test_what_is_lent_is_what_the_receiver_reads_in_order_and_in_place():
    (page, _), (sender, receiver) = two_pages()
    arena = page.make_arena(1000)
    for round_ in range(5):  # more rounds than entries
        for at in (0, 100):
            arena[at : at + 50] = round_ + at % 7
            sender.post(KIND, page.place(arena[at : at + 50]), 50)
        for at in (0, 100):
            assert receiver.next_kind() is not None
            assert receiver.next_kind() == KIND
            assert receiver.peek().tolist() == [round_ + at % 7] * 50
            receiver.release()
        assert receiver.next_kind() is None
        sender.reap()
    sender.post(KIND, 10, 0)
    assert receiver.peek().size == 0


def test_each_of_several_receivers_gets_its_own():
    pages = [ControlPage(3, 2) for _ in range(3)]
    arena = pages[0].make_arena(10)
    arena[:] = range(10)
    for rank in (1, 2):
        SharedPeer(pages[0], 0, rank, pages[rank].address).post(KIND, rank, rank)
    for rank in (1, 2):
        received = SharedPeer(pages[rank], rank, 0, pages[0].address)
        assert received.peek().tolist() == list(range(rank, 2 * rank))
        received.release()
        assert received.next_kind() is None


def test_a_message_is_done_when_the_receiver_gives_it_back_and_not_before():
    (page, _), (sender, receiver) = two_pages()
    page.make_arena(10)
    for number in range(2):
        sender.post(KIND + number, number, 1, token=7 + number)
    for kind in (KIND, KIND + 1):
        assert receiver.next_kind() == kind
        receiver.peek()
    assert receiver.next_kind() is None
    assert sender.reap() == [] and list(sender.open) == [(KIND, 7), (KIND + 1, 8)]
    receiver.release()
    assert sender.reap() == [(KIND, 7)] and list(sender.open) == [(KIND + 1, 8)]


def test_an_empty_message_keeps_its_place_in_the_order():
    (page, _), (sender, receiver) = two_pages(entries=3)
    page.make_arena(10)[:] = 7
    sender.post(KIND, 0, 2), sender.post(KIND, 0, 0), sender.post(KIND, 0, 1)
    seen = []
    while receiver.next_kind() is not None:
        seen.append(receiver.peek().tolist())
        receiver.release()
    assert seen == [[7, 7], [], [7]]


def test_more_than_there_are_entries_for_is_refused_and_overwrites_nothing():
    (page, _), (sender, receiver) = two_pages(entries=1)
    page.make_arena(10)[:] = range(10)
    sender.post(KIND, 3, 1)
    with pytest.raises(RuntimeError, match="room for no more"):
        sender.post(KIND, 4, 1)
    assert receiver.peek().tolist() == [3]


def test_a_message_lies_in_the_arena_or_it_does_not():
    page = ControlPage(1, 1)
    assert page.place(np.zeros(1, np.uint8)) is None
    arena = page.make_arena(100)
    assert [page.place(part) for part in (arena, arena[99:], arena[50:51])] == [0, 99, 50]
    assert page.place(np.zeros(10, np.uint8)) is None and page.place(np.zeros(200, np.uint8)) is None
    other = page.make_arena(50)
    assert [page.place(part) for part in (arena[99:], other, other[49:])] == [99, -1, -50]
    with pytest.raises(RuntimeError, match="2 arenas"):
        page.make_arena(1)


def test_what_lies_in_the_second_arena_is_read_there():
    (page, _), (sender, receiver) = two_pages()
    for start in (0, 100):
        page.make_arena(10)[:] = range(start, start + 10)
    for place, nbytes in ((2, 3), (~2, 3)):
        sender.post(KIND, place, nbytes)
    seen = []
    for _ in range(2):
        seen.append(receiver.peek().tolist())
        receiver.release()
    assert seen == [[2, 3, 4], [102, 103, 104]]


def test_the_receiver_cannot_write():
    (page, _), (sender, receiver) = two_pages()
    sender.post(KIND, 0, len(page.make_arena(100)))
    with pytest.raises(ValueError, match="read-only"):
        receiver.peek()[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        receiver._theirs[0] = 1


def _read(address, theirs, mine):
    """Take all that rank 0 has lent, in another process; tell each sum, then None."""
    page = ControlPage(2, 4)
    mine.put(page.address)
    peer = SharedPeer(page, 1, 0, address)
    for nbytes in iter(theirs.get, None):
        while peer.next_kind() is None:
            pass
        message = peer.peek()
        mine.put((len(message) == nbytes, int(message.sum())))
        peer.release()
    theirs.get()  # the sender is done with this page


def test_another_process_reads_it_and_says_so():
    page = ControlPage(2, 4)
    arena = page.make_arena(1 << 20)
    arena[:] = 3
    context = multiprocessing.get_context("spawn")
    here, there = context.Queue(), context.Queue()
    reader = context.Process(target=_read, args=(page.address, there, here))
    reader.start()
    peer = SharedPeer(page, 0, 1, here.get(timeout=60))
    for nbytes in (1 << 20, 1, 0, 1000, 5):
        peer.post(KIND, 0, nbytes)
        there.put(nbytes)
        assert here.get(timeout=60) == (True, 3 * nbytes)
        while peer.open:
            peer.reap()
    there.put(None), there.put(None)
    reader.join()


def open_files() -> tuple[int, int]:
    """Return how many files this process has open: ours in memory, and all."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:apex" in name for name in names), len(names)


def test_nothing_is_left_open_of_memory_that_is_no_longer_used():
    gc.collect()
    ours, all_files = open_files()
    for _ in range(20):
        (page, _), (sender, receiver) = two_pages()
        sender.post(KIND, 0, len(page.make_arena(1 << 20)))
        receiver.peek()
    del page, sender, receiver, _
    gc.collect()
    ours_now, all_now = open_files()
    assert ours_now == ours and all_now <= all_files  # sockets of earlier tests may close meanwhile


def test_nothing_is_lent_where_the_processor_does_not_keep_the_order_of_stores(monkeypatch):
    assert shared_memory.identity()
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "aarch64")
    assert shared_memory.identity() == ""


def everyones_neighbours(monkeypatch, identities, blind=()):
    """Return what each rank takes for its neighbours, one thread each.

    The ranks in ``blind`` cannot open anything.
    """
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
        return set(neighbours(list(range(size)), number, make_page(size, 2), allgather))

    open_file = shared_memory._open

    def look(*address):
        if rank.number in blind:
            raise PermissionError
        return open_file(*address)

    monkeypatch.setattr(shared_memory, "identity", lambda: identities[rank.number])
    monkeypatch.setattr(shared_memory, "_open", look)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(play, range(size)))


def test_neighbours_are_the_others_of_the_same_host(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "b", "a", "b", "a"]) == [{2, 4}, {3}, {0, 4}, {1}, {0, 2}]


def test_a_rank_alone_on_its_host_or_on_one_that_cannot_share_has_none(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "", ""]) == [set(), set(), set()]


def test_where_one_rank_cannot_open_the_memory_of_another_nobody_on_its_host_shares(monkeypatch):
    assert everyones_neighbours(monkeypatch, ["a", "b", "a", "b", "a"], blind=[2]) == [
        set(),
        {3},
        set(),
        {1},
        set(),
    ]


def test_a_page_that_is_not_the_one_told_of_is_no_neighbour():
    mine, told = ControlPage(2, 1), ControlPage(2, 1, nonce=17)
    assert shared_memory._reached(mine, 0, 1, 17, told.address)
    assert shared_memory._reached(mine, 0, 1, 18, told.address) is None
    assert shared_memory._reached(mine, 0, 1, 17, (os.getpid(), 999, 64)) is None


def test_where_memory_cannot_be_made_or_is_limited_nothing_is_lent(monkeypatch):
    def refuse(*args):
        raise PermissionError

    assert set(neighbours([0, 1], 0, make_page(2, 1), lambda mine: [mine, mine])) == {1}
    monkeypatch.setattr(shared_memory.os, "memfd_create", refuse)
    assert make_page(2, 1) is None
    assert neighbours([0, 1], 0, None, lambda mine: [mine, mine]) == {}
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert shared_memory.identity() == ""


class TestBell:
    def test_what_is_lent_to_or_taken_from_a_rank_that_says_that_it_sleeps_wakes_it(self):
        pages, (sender, receiver) = two_pages()
        pages[1].bell.listen(True)
        sender.post(KIND, 0, 0)
        assert pages[1].bell.wait(LONG_S)
        pages[0].bell.listen(True)
        receiver.release()
        assert pages[0].bell.wait(LONG_S)

    def test_a_rank_that_is_awake_is_left_alone(self):
        pages, (sender, receiver) = two_pages()
        sender.post(KIND, 0, 0)
        receiver.release()
        assert not pages[1].bell.wait(0.001)
        pages[1].bell.listen(True), pages[1].bell.listen(False)
        sender.wake()
        assert not pages[1].bell.wait(0.001)

    def test_waking_never_waits_for_a_rank_that_does_not_wake_and_is_forgotten_when_it_does(self):
        pages, (sender, _) = two_pages()
        pages[1].bell.listen(True)
        for _ in range(100_000):  # more than the pipe has room for
            sender.wake()
        assert pages[1].bell.wait(LONG_S)
        assert not pages[1].bell.wait(0.001)

    def test_only_a_pipe_is_a_bell(self):
        pages = [ControlPage(2, 1) for _ in range(2)]
        pages[1].words[5] = pages[1].address[1]  # the page itself
        with pytest.raises(OSError, match="no pipe"):
            SharedPeer(pages[0], 0, 1, pages[1].address)

    def test_nothing_stays_open(self):
        ours, all_files = open_files()
        pages, peers = two_pages()
        del pages, peers
        gc.collect()
        ours_now, all_now = open_files()
        assert ours_now == ours and all_now <= all_files
