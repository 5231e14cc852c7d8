"""A rank that sleeps is woken by what the other ranks of its host send it, over MPI as well as in shared
memory.
"""

import pytest
from places import HELPERS

from apex.transport.shared_memory import identity

PROGRAM = HELPERS / "stress_bells.py"
WAKING = [
    "a batch that is lent",
    "a credit that is given back",
    "a request",
    "a request that is taken",
    "a sample batch",
    "a request for weights",
    "weights",
    "a control message",
    "the word to stop",
]


@pytest.mark.skipif(not identity(), reason="ranks share no memory here")
def test_every_message_between_ranks_of_a_host_wakes_who_sleeps(mpirun):
    ended = mpirun(4, [PROGRAM], timeout=180)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = {line for line in ended.stdout.splitlines() if "woken" in line}
    assert told == {f"{what}: woken" for what in WAKING}
