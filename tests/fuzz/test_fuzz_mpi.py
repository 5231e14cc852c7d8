"""Garbage over MPI, by ranks of the same job.

Refused, counted, and survived, with every good message unharmed.
"""

import json

import pytest
from places import HELPERS

from apex.refusals import KINDS

PROGRAM = HELPERS / "mpi_garbage.py"
EACH = 1000  # messages that each of four ranks throws
OVER_TCP = {"OMPI_MCA_btl": "tcp,self"}


@pytest.mark.parametrize(
    "how, env",
    [("lend", {}), ("send", {}), ("send", OVER_TCP)],
    ids=["lent", "sent in shared memory", "sent over TCP"],
)
def test_unexpected_messages_and_wrong_lengths_are_refused_counted_and_do_no_harm(mpirun, tried, how, env):
    tried.least = 2 * EACH
    ended = mpirun(4, [PROGRAM, how, EACH], env, timeout=150)
    assert ended.returncode == 0, ended.stderr[-4000:]
    outcome = json.loads(ended.stdout.splitlines()[-1])
    tried(sum(outcome["thrown"]))
    assert outcome["problems"] == {}
    assert outcome["refused"] == outcome["thrown"]
    assert min(outcome["thrown"]) > EACH / 4 and outcome["good"] > 500
    assert 4 <= ended.stderr.count(" refused ") <= 4 * len(KINDS), "each rank prints the first of each kind"
