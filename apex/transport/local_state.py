"""What is on its way in a ``LocalWorld``, for a run that goes on to the last bit: saved between two turns, restored before the first."""

from __future__ import annotations

import numpy as np

from apex.ports import PriorityEvent
from apex.topology import ACTOR


def save(world) -> tuple[dict[str, np.ndarray], dict]:
    """Return copies of all messages as arrays, and what they are as plain values."""
    messages: list[np.ndarray] = []

    def keep(message: np.ndarray | None) -> int:
        messages.append(np.zeros(0, np.uint8) if message is None else message.copy())
        return len(messages) - 1

    open_requests = [request for port in world.replay_ports() for request in port._open]
    requests = list({id(request): request for request in [*world.requests, *open_requests]}.values())
    number = {id(request): i for i, request in enumerate(requests)}
    values = {
        "newest": None if world.newest is None else keep(world.newest),
        "evaluator": [keep(message) for message in world.evaluator_publishes],
        "intake": [[[actor.rank, token, keep(message)] for actor, token, message in box] for box in world.intake],
        "to_replay": [[_kept_event(event, number, keep) for event in box] for box in world.to_replay],
        "requests": [[r.replay, None if r.message is None else keep(r.message), r.refused] for r in requests],
        "asked": [number[id(request)] for request in world.requests],
        "open": [[number[id(request)] for request in port._open] for port in world.replay_ports()],
        "actors": {str(port.rank): [port._credits.in_flight, port._credits.turn, list(port._completed)] for port in _actors(world)},
    }
    return {f"message_{i}": message for i, message in enumerate(messages)}, values


def restore(world, arrays: dict[str, np.ndarray], values: dict) -> None:
    """Put everything back; all ports have been made."""

    def kept(number: int | None) -> np.ndarray | None:
        return None if number is None else arrays[f"message_{number}"]

    requests = [world.new_request(replay) for replay, _, _ in values["requests"]]
    for request, (_, message, refused) in zip(requests, values["requests"]):
        request.message, request.refused = kept(message), refused
    world.newest = kept(values["newest"])
    world.evaluator_publishes.extend(map(kept, values["evaluator"]))
    for box, held in zip(world.intake, values["intake"]):
        box.extend((world.ports[rank], token, kept(message)) for rank, token, message in held)
    for box, held in zip(world.to_replay, values["to_replay"]):
        box.extend(requests[n] if kind == "request" else PriorityEvent(kept(n)) for kind, n in held)
    world.requests.extend(requests[number] for number in values["asked"])
    for port, held in zip(world.replay_ports(), values["open"]):
        port._open.extend(requests[number] for number in held)
    for port in _actors(world):
        port._credits.in_flight, port._credits.turn, port._completed = values["actors"][str(port.rank)]


def _kept_event(event, number: dict[int, int], keep) -> tuple[str, int]:
    return ("priorities", keep(event.message)) if isinstance(event, PriorityEvent) else ("request", number[id(event)])


def _actors(world) -> list:
    return [world.ports[rank] for rank in sorted(world.ports) if world.topology.role(rank)[0] == ACTOR]
