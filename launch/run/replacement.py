"""A process that replaces a lost actor over MPI; the run itself spawns it (see ``mpi_spawn``)."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from apex import config as configuration
from apex.run_folder import RunFolder
from apex.topology import Topology

if TYPE_CHECKING:
    from apex.transport.mpi_spawn import Joining


def main() -> int:
    """Join, and be the role until the end."""
    from apex.transport import (
        mpi_spawn,
        mpi_world,
    )  # not above: the command is asked for where there is no MPI

    joining = mpi_spawn.accept()
    try:
        return _take_place(joining)
    except BaseException:  # the others wait for this process: only its end tells them that it will not come
        traceback.print_exc()
        mpi_world.abort(True)


def _take_place(joining: Joining) -> int:
    about = joining.handover
    folder, topology = RunFolder(Path(about["folder"])), Topology(about["size"], about["replay_ranks"])
    config = configuration.load(str(folder.config_path))
    from launch.run import world

    world.limit_threads(config, topology, about["rank"])
    from launch.run import rank  # imports NumPy, which reads the thread variables

    return rank.take_place(config, topology, joining, folder)
