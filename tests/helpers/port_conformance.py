"""What every transport must do.

A storm of every kind of message through the ports of `apex.ports`, and 50 endings.

A new transport is tested by one fixture and an empty subclass:

    from port_conformance import SCENARIOS, PortConformance, judge

    @pytest.fixture(scope="module")
    def outcomes():  # one `stress_roles.stormer` per rank and round, stepped until it has finished
        return judge(topology, {name: [ledgers of all ranks, ...] for name in SCENARIOS})

    class TestMyTransport(PortConformance):
        pass
"""

from collections import Counter, defaultdict

from ledger import (
    ACK,
    ANY_REPLAY,
    CONTROL_REQUEST,
    INTAKE,
    PRIORITY,
    REFUSAL,
    REPORT,
    REQUEST,
    SAMPLE,
    Ledger,
    Scenario,
)

from apex.schema import Limits
from apex.topology import LEARNER_RANK, Topology

SCENARIOS = {
    "storm": Scenario(
        60, 40, 20, 1, 6 << 20, 2 << 20, Limits(1 << 20, 96 << 10, prefetch=3, intake_in_flight=3)
    ),
    "endings": Scenario(
        0, 0, 0, 50, 1 << 16, 1 << 16, Limits(1 << 15, 1 << 13, prefetch=3, intake_in_flight=2), True, 0.0005
    ),
}
"""Name -> scenario: one long storm, and 50 runs that end at once, with requests open that only the end can
answer.
"""


class PortConformance:
    """``outcomes[scenario]`` holds ``"problems"``, by kind, and ``"counts"`` of what was sent, and more (see
    :func:`judge`).
    """

    def test_every_message_arrives_once_and_unchanged(self, outcomes):
        assert _problems(outcomes, "contents") == []

    def test_messages_of_one_kind_between_two_ranks_keep_their_order(self, outcomes):
        assert _problems(outcomes, "order") == []

    def test_every_sample_request_is_answered_or_refused(self, outcomes):
        assert _problems(outcomes, "requests") == []

    def test_weights_arrive_unchanged_new_enough_and_never_older_than_before(self, outcomes):
        assert _problems(outcomes, "weights") == []

    def test_a_buffer_is_left_alone_while_it_is_lent_and_never_needed_after(self, outcomes):
        assert _problems(outcomes, "rules") == []

    def test_the_storm_was_one(self, outcomes):
        counts = outcomes["storm"]["counts"]
        least = {INTAKE: 40, SAMPLE: 60, PRIORITY: 60, REPORT: 20, REQUEST: 60, "weights": 20}
        least |= {CONTROL_REQUEST: 20, ACK: 20}
        assert {kind: counts[kind] for kind, n in least.items() if counts[kind] < n} == {}

    def test_requests_that_were_open_at_the_end_were_refused_and_nobody_hung(self, outcomes):
        counts = outcomes["endings"]["counts"]
        assert counts["rounds"] == 50
        assert counts[REFUSAL] > 3
        assert counts["unanswered weight requests"] > 25


def judge(topology: Topology, ledgers: dict[str, list[list[Ledger]]]) -> dict[str, dict]:
    """Return scenario -> what :func:`judge_rounds` says of it, from the ledgers of each round's ranks."""
    return {name: judge_rounds(topology, SCENARIOS[name], rounds) for name, rounds in ledgers.items()}


def judge_rounds(topology: Topology, scenario: Scenario, rounds: list[list[Ledger]]) -> dict:
    """Return ``{"problems": {kind: [text]}, "counts": {kind: n}, "nbytes".

    [(from, to, bytes received), ...]}``.

    It is of the ledgers of each round's ranks.
    """
    problems, counts, nbytes = defaultdict(list), Counter(rounds=len(rounds)), Counter()
    for ranks in rounds:
        _judge_round(topology, scenario, ranks, problems, counts)
        nbytes += _nbytes(ranks)
    return {"problems": problems, "counts": counts, "nbytes": [(*pair, n) for pair, n in nbytes.items()]}


def _nbytes(ranks: list[Ledger]) -> Counter:
    """Return (from, to) -> bytes of payload."""
    nbytes = Counter()
    for rank in ranks:
        for (_, origin, to), messages in rank.received.items():
            nbytes[origin, to] += sum(length for length, _ in messages)
        nbytes[LEARNER_RANK, rank.rank] += sum(length for *_, (length, _) in rank.weights)
    return nbytes


def _judge_round(
    topology: Topology, scenario: Scenario, ranks: list[Ledger], problems: dict, counts: Counter
) -> None:
    sent, received = _together(ranks, "sent"), _together(ranks, "received")
    problems["contents"] += _lost_or_changed(sent, received)
    problems["order"] += _out_of_order(sent, received)
    problems["requests"] += _unanswered(topology, sent, received, scenario.limits.prefetch)
    problems["weights"] += [
        text for rank in ranks for text in _wrong_weights(rank, ranks[LEARNER_RANK].published)
    ]
    problems["rules"] += [text for rank in ranks for text in rank.problems]
    for (kind, _, _), messages in sent.items():
        counts[kind] += len(messages)
    counts["weights"] += sum(len(rank.weights) for rank in ranks)
    counts["unanswered weight requests"] += sum(rank.asked_for_weights - len(rank.weights) for rank in ranks)


def _problems(outcomes: dict, kind: str) -> list[str]:
    return [f"{name}: {text}" for name, outcome in outcomes.items() for text in outcome["problems"][kind]]


def _together(ranks: list[Ledger], side: str) -> dict[tuple, list]:
    """Return (kind, from, to) -> seals over all ranks."""
    together = defaultdict(list)
    for rank in ranks:
        for (kind, origin, to), seals in getattr(rank, side).items():
            together[kind, origin, ANY_REPLAY if kind == INTAKE else to] += seals
    return together


def _lost_or_changed(sent: dict, received: dict) -> list[str]:
    problems = []
    for key in sorted(sent.keys() | received.keys()):
        if key[0] in (INTAKE, PRIORITY, REPORT, REQUEST, CONTROL_REQUEST, ACK):
            lost, extra = (
                Counter(sent[key]) - Counter(received[key]),
                Counter(received[key]) - Counter(sent[key]),
            )
            if lost or extra:
                problems.append(
                    f"{key}: of {len(sent[key])}, {lost.total()} are lost or changed, "
                    f"{extra.total()} came unsent"
                )
    return problems


def _out_of_order(sent: dict, received: dict) -> list[str]:
    """The order of intake batches is free; the last sample batches may be dropped by a learner that ends."""
    keys = [key for key in received if key[0] in (SAMPLE, PRIORITY, REPORT, CONTROL_REQUEST, ACK)]
    return [
        f"{key}: received in another order than sent"
        for key in keys
        if received[key] != sent[key][: len(received[key])]
    ]


def _unanswered(topology: Topology, sent: dict, received: dict, prefetch: int) -> list[str]:
    problems = []
    for rank in topology.replay_ranks_range:
        requests, refused = len(sent[REQUEST, LEARNER_RANK, rank]), len(sent[REFUSAL, rank, LEARNER_RANK])
        answered, taken = len(sent[SAMPLE, rank, LEARNER_RANK]), len(received[SAMPLE, rank, LEARNER_RANK])
        if requests != answered + refused or not taken <= answered <= taken + prefetch:
            problems.append(
                f"replay rank {rank}: {requests} requests, {answered} answered, "
                f"{refused} refused, {taken} taken"
            )
    return problems


def _wrong_weights(rank: Ledger, published: dict[int, tuple[int, int]]) -> list[str]:
    problems, before = [], 0
    for version, steps, asked, sealed in rank.weights:
        if sealed != published.get(version):
            problems.append(f"rank {rank.rank}: version {version} was changed on its way")
        if steps < asked or version < before:
            problems.append(
                f"rank {rank.rank}: version {version} of step {steps}, after {before}, asked for step {asked}"
            )
        before = version
    return problems
