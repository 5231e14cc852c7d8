"""The environment variables between launchers and ranks; only this module spells their names.

Users set ``TOKEN`` where a job has several launchers. All others are set by a launcher for the ranks it
starts.
"""

from __future__ import annotations

import os

PREFIX = "APEX_"
RUN_FOLDER = "APEX_RUN_FOLDER"
"""The run folder. The launcher has read its configuration already."""
CHECKPOINT = "APEX_CHECKPOINT"
"""The checkpoint folder from which a run resumes."""
TOKEN = "APEX_TOKEN"
"""The secret of a job over ZeroMQ, in hex: 16 to 64 bytes."""
ENDPOINT = "APEX_ENDPOINT"
"""The address at which the learner binds: ``ipc:///folder`` or ``tcp://host:port``."""
RANK = "APEX_RANK"
SIZE = "APEX_SIZE"
"""Rank of this process, and number of ranks, over ZeroMQ."""
FIRST = "APEX_FIRST"
"""The first of the ranks that one launcher started."""
LIFE = "APEX_LIFE"
"""How many processes had this rank before."""
MAY_LOSE = "APEX_MAY_LOSE"
"""Set where lost ranks are started again: the first of them."""
DOCTOR_REPORT = "APEX_DOCTOR_REPORT"
"""The file into which a rank that the doctor started writes its facts."""
DOCTOR_RANKS = "APEX_DOCTOR_RANKS"
"""How many ranks the doctor started."""


def number(name: str, default: int = 0) -> int:
    """Return the integer in a variable, ``default`` where it is not set or empty."""
    return int(os.environ.get(name) or default)
