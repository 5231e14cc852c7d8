"""Actors that are lost where no process can take their place."""

import json
import sys

import pytest
from places import HELPERS

from launch.run.launchers import mpi as launcher

PROGRAM, LEAVING = (HELPERS / name for name in ("stress_losing.py", "stress_leaving.py"))
LAST = 4
ENDS_S = 120.0
COMMANDS = {
    "a program that is not there": ["/nonexistent/program"],
    "a program that ends before it joins": [sys.executable, "-c", "raise SystemExit(1)"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_others_go_on_and_end_in_order_when_a_lost_actor_cannot_be_replaced(start, command):
    ended = start([*launcher(5, tolerant=True), sys.executable, PROGRAM, "goes-on", *command]).wait(ENDS_S)
    changes = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("[[")))
    lost, unreplaced, (_, reports) = changes
    assert lost == [3, "lost", "its process has ended"]
    assert unreplaced[:2] == [3, "not replaced"] and unreplaced[2]
    assert reports > 0, "the actor that is left sends on"


def test_the_end_does_not_wait_for_long_for_a_process_that_may_never_join(start):
    never = COMMANDS["a program that ends before it joins"]
    ended = start([*launcher(5, tolerant=True), sys.executable, PROGRAM, "ends", *never]).wait(ENDS_S)
    lost, unreplaced = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("[[")))
    assert (lost[:2], unreplaced[:2]) == ([3, "lost"], [3, "not replaced"])


@pytest.mark.parametrize("how, gone", [("sleeps", []), ("dies", [LAST]), ("stops", [LAST])])
def test_an_actor_that_is_late_or_gone_at_the_very_end_costs_nothing(start, how, gone):
    ended = start([*launcher(5, tolerant=True), sys.executable, LEAVING, how]).wait(ENDS_S)
    left = {line for line in ended.stdout.splitlines() if line.endswith("has left")}
    assert left == {f"rank {rank} has left" for rank in range(5) if rank not in gone}, ended.stderr[-3000:]
    assert '{"lost": []}' in ended.stdout, "it had said that it was through"
