"""What a transport must do between two hosts.

All that it must on one, and no more bytes on the link than there has to be.
"""

from port_conformance import PortConformance


class HostsConformance(PortConformance):
    """``storm`` is ``(outcomes, payload, traffic)``.

    See ``PortConformance``, ``two_hosts.crossing`` and ``two_hosts.Traffic``.
    """

    def test_what_is_sent_to_the_other_host_crosses_the_link_once_and_what_stays_does_not(self, storm):
        _, payload, traffic = storm
        assert payload.sent > 40 << 20 and payload.received > 10 << 20
        traffic.check(payload)
