"""Actors that are lost where no process can take their place."""

import json
import sys
from pathlib import Path

import pytest

from launch.mpirun import launcher

PROGRAM = Path(__file__).with_name("losing.py")
ENDS_S = 120.0
COMMANDS = {
    "a program that is not there": ["/nonexistent/program"],
    "a program that ends before it joins": [sys.executable, "-c", "raise SystemExit(1)"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_others_go_on_and_end_in_order_when_a_lost_actor_cannot_be_replaced(start, command):
    ended = start([*launcher(5, tolerant=True), sys.executable, PROGRAM, *command]).wait(ENDS_S)
    changes = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("[[")))
    lost, unreplaced, (_, reports) = changes
    assert lost == [3, "lost", "its process has ended"]
    assert unreplaced[:2] == [3, "not replaced"] and unreplaced[2]
    assert reports > 0, "the actor that is left sends on"
    assert ended.stdout.count("ended in order") == 4


def test_a_rank_that_has_left_at_the_end_is_not_lost_to_those_that_leave_later(start):
    ended = start([*launcher(5, tolerant=True), sys.executable, PROGRAM, "late"]).wait(ENDS_S)
    assert ended.stdout.count("ended in order") == 5, ended.stderr[-3000:]
    assert "[]" in ended.stdout.splitlines(), "the learner has told of a loss"
