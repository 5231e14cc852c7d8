"""Four ranks of one host, of which one sleeps at a time until a message wakes it.

Each line says what has, or has not.

Usage: stress_bells.py   (learner, replay rank, evaluator, actor)
"""

import numpy as np
from mpi4py import MPI
from stress_base import mpi_port, publish, until

from apex.control import CheckpointRequest
from apex.ports import IntakeEvent, SampleRequestEvent
from apex.schema import Limits
from apex.topology import LEARNER_RANK, Topology

LIMITS = Limits(sample_nbytes=1 << 10, priority_nbytes=1 << 10, prefetch=2, intake_in_flight=3)
REPLAY_RANK, ACTOR_RANK = 1, 3
LONG_S = 60.0  # far more than anything takes
comm = MPI.COMM_WORLD.Dup()
port = mpi_port(MPI.COMM_WORLD, Topology(4, 1), LIMITS)


def wakes(what: str, sender: int, sleeper: int, act) -> None:
    """Have ``sender`` act when ``sleeper`` has said that it sleeps. Collective."""
    bell = port.waking().bell
    if port.rank == sleeper:
        bell.listen(True)
    comm.Barrier()
    if port.rank == sender:
        act()
    if port.rank == sleeper:
        print(f"{what}: {'woken' if bell.wait(LONG_S) else 'not woken'}", flush=True)
        bell.listen(False)
    comm.Barrier()


def sees(holds) -> None:
    """Let messages move until ``holds()``."""
    seen = []

    def step() -> bool:
        port.progress()
        seen.append(holds())
        return bool(seen[-1])

    until(lambda: seen and seen[-1], step, port, f"rank {port.rank}", LONG_S)


def replay_hears(kind: type) -> None:
    """Let the replay rank take a message."""
    landing = np.zeros(1 << 10, np.uint8)
    sees(lambda: isinstance(port.poll(landing), kind))


def sample_comes() -> None:
    """Let the replay rank answer."""
    port.send_sample(port.sample_buffer())


def publish_some() -> None:
    """Let the learner answer who asks for weights."""
    publish(port, np.zeros(1 << 10, np.uint8))
    port.progress()


def main() -> None:
    """Be one rank."""
    batch = port.intake_memory(1, 1 << 10)[0] if port.rank == ACTOR_RANK else None
    weights = np.zeros(1 << 10, np.uint8)
    wakes("a batch that is lent", ACTOR_RANK, REPLAY_RANK, lambda: port.send_intake(0, batch))
    wakes("a credit that is given back", REPLAY_RANK, ACTOR_RANK, lambda: replay_hears(IntakeEvent))
    wakes("a request", LEARNER_RANK, REPLAY_RANK, lambda: port.request_sample(0))
    wakes("a request that is taken", REPLAY_RANK, LEARNER_RANK, lambda: replay_hears(SampleRequestEvent))
    wakes("a sample batch", REPLAY_RANK, LEARNER_RANK, sample_comes)
    wakes("a request for weights", ACTOR_RANK, LEARNER_RANK, lambda: port.request_weights(0, weights))
    if port.rank == LEARNER_RANK:
        sees(lambda: port._weights.requests)
    wakes("weights", LEARNER_RANK, ACTOR_RANK, publish_some)
    wakes(
        "a control message",
        LEARNER_RANK,
        ACTOR_RANK,
        lambda: port.request(ACTOR_RANK, CheckpointRequest(1, 0, 0)),
    )
    if port.rank == ACTOR_RANK:
        sees(lambda: port.poll_request() is not None)
    wakes("the word to stop", LEARNER_RANK, REPLAY_RANK, lambda: port.stop())

    def end() -> bool:
        port.progress()
        if port.rank == REPLAY_RANK:
            port.poll(None)
        if port.rank == ACTOR_RANK:
            port.poll_weights()
        if port.stopping:
            port.finish()
        return False

    until(lambda: port.finished, end, port, f"rank {port.rank}", LONG_S)


main()
