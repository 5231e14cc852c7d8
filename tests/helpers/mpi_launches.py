"""Ways to start an MPI program, and what it printed."""

import json

# Open MPI sends a message at once ("eagerly") up to a limit and asks the receiver first above it. The least
# limit that its shared memory takes still lets 40 bytes through; TCP's lets through none.
NOTHING_EAGER = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_eager_limit": "80"}
ALL_EAGER = {
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_eager_limit": "67108864",
    "OMPI_MCA_btl_tcp_rndv_eager_limit": "67108864",
}


def outcome_of(ended) -> dict:
    """Return what the program printed; the test fails where it did not come to that."""
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])
