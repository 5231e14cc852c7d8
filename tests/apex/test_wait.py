"""How a role waits: quickly on a core of its own, without giving a shared one away."""

from types import SimpleNamespace

import pytest

from apex import loop
from apex.ports import Waking


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now, self.made = 100.0, []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.made.append(seconds)


class Bell:
    """A bell that rings in the waits whose numbers are in ``rings``."""

    def __init__(self, clock: Clock, rings=()):
        self.clock, self.rings, self.said, self.waits = clock, set(rings), [], []

    def listen(self, whether: bool) -> None:
        self.said.append(whether)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        rung = len(self.waits) in self.rings
        self.clock.now += 0.0 if rung else seconds
        return rung


@pytest.fixture
def clock(monkeypatch):
    """The time that ``Wait`` sees."""
    clock = Clock()
    monkeypatch.setattr(loop.os, "sched_yield", lambda: clock.made.append("yield"))
    monkeypatch.setattr(loop.time, "sleep", clock.sleep)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def made(clock):
    """What ``Wait`` asks of the system, in order."""
    return clock.made


def polls_in(clock: Clock, wait: loop.Wait, seconds: float) -> int:
    """Return how often a rank without work looks for some."""
    until, polls = clock.now + seconds, 0
    while clock.now < until:
        wait.idle()
        polls += 1
    return polls


@pytest.mark.parametrize("has_bell", [False, True])
def test_after_a_second_without_messages_it_polls_fifty_times_a_second(clock, has_bell):
    wait = loop.Wait(ranks=3, cores=2, bell=Bell(clock) if has_bell else None)
    polls_in(clock, wait, 1.0)
    assert 50 <= polls_in(clock, wait, 10.0) / 10 <= 52


def test_so_does_one_whose_messages_wake_it(clock):
    wait = loop.Wait(woken_by=clock.sleep)
    polls_in(clock, wait, 1.0)
    assert 50 <= polls_in(clock, wait, 10.0) / 10 <= 52


def test_a_sleep_is_never_longer_than_a_part_of_the_silence_before_it(clock, made):
    wait = loop.Wait(ranks=3, cores=2)
    start = clock.now
    polls_in(clock, wait, 2.0)
    silent = [sum(made[:number]) for number in range(len(made))]
    assert clock.now > start + 1
    assert all(sleep <= max(1e-3, before / 32) for before, sleep in zip(silent, made))
    assert max(made) == 20e-3
    wait.reset(), wait.idle()
    assert made[-1] == 0.5e-3


def test_traffic_that_the_role_does_not_see_ends_the_silence(clock, made):
    came = [0]
    wait = loop.Wait(ranks=3, cores=2, traffic=lambda: came[0])
    polls_in(clock, wait, 2.0)
    came[0] += 1
    wait.idle()
    assert made[-1] == 50e-6
    polls_in(clock, wait, 0.03)
    assert made[-1] == 1e-3


def test_it_says_that_it_sleeps_and_looks_once_more_before_it_waits_for_the_bell(clock):
    bell = Bell(clock)
    wait = loop.Wait(ranks=3, cores=2, bell=bell)
    while not bell.said:
        wait.idle()
    assert bell.said == [True] and bell.waits == []
    wait.idle()
    assert len(bell.waits) == 1 and bell.waits[0] > 1e-3
    wait.reset()
    assert bell.said == [True, False]


def test_a_bell_ends_the_silence(clock, made):
    bell = Bell(clock, rings=[3])
    wait = loop.Wait(ranks=3, cores=2, bell=bell)
    while len(bell.waits) < 3:
        wait.idle()
    assert bell.said == [True, False]
    wait.idle()
    assert made[-1] == 50e-6


def test_on_its_own_core_it_yields_ten_times_then_sleeps_up_to_a_millisecond(made):
    wait = loop.Wait()
    for _ in range(17):
        wait.idle()
    assert made[:10] == ["yield"] * 10
    assert made[10:] == [50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1e-3, 1e-3]
    wait.reset()
    wait.idle()
    assert made[-1] == "yield"


def test_with_more_ranks_than_cores_it_never_yields(made):
    wait = loop.Wait(ranks=3, cores=2)
    for _ in range(3):
        wait.idle()
    assert made == [50e-6, 100e-6, 200e-6]


def test_a_wait_starts_with_half_the_sleep_that_the_last_one_ended_with(made):
    """So that a rank whose work comes every millisecond is not woken four times for it."""
    wait = loop.Wait(ranks=3, cores=2)
    for _ in range(4):
        wait.idle()
    for _ in range(3):  # much work at once, and none
        wait.reset()
    wait.idle(), wait.reset(), wait.idle(), wait.reset(), wait.idle(), wait.reset(), wait.idle()
    assert made[3:] == [400e-6, 200e-6, 100e-6, 50e-6, 50e-6]


def test_a_yield_that_somebody_else_took_is_the_last_for_a_second(monkeypatch, clock, made):
    def sched_yield():
        made.append("yield")
        clock.now += 0.004

    monkeypatch.setattr(loop.os, "sched_yield", sched_yield)
    wait = loop.Wait()
    assert wait.idle() == pytest.approx(0.004)
    wait.reset(), wait.idle()
    clock.now += 0.9
    wait.reset(), wait.idle()
    assert made == ["yield", 50e-6, 50e-6]
    clock.now += 0.2
    wait.reset(), wait.idle()
    assert made[-1] == "yield"


def test_a_port_that_messages_wake_does_not_spin_on_a_message_that_is_not_taken(made):
    wait = loop.Wait(woken_by=made.append)
    for _ in range(3):
        wait.idle()
    assert made == [5e-3, 5e-3, 50e-6, 5e-3, 100e-6]
    wait.reset()
    wait.idle()
    assert made[5:] == [5e-3]


@pytest.mark.parametrize(
    "ranks, woken, told",
    [
        (4, False, "4 ranks on 4 cores here: a rank without work yields its core, then sleeps"),
        (5, False, "5 ranks on 4 cores here: a rank without work sleeps at once"),
        (5, True, "5 ranks on 4 cores here: a rank without work is woken by messages"),
    ],
)
def test_it_is_chosen_from_the_ranks_of_the_host_and_the_cores_that_they_may_use_and_told(
    monkeypatch, ranks, woken, told
):
    monkeypatch.setattr(loop.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    port = SimpleNamespace(ranks_here=ranks, waking=lambda: Waking(wait=print if woken else None))
    wait = loop.wait_of(port)
    assert wait.crowded == (ranks > 4)
    assert str(wait) == told
