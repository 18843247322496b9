"""Checks that a transport reaches as far as it declares."""

from __future__ import annotations

from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks
from enginehouse_testing.checks.transport.exactness import compare
from enginehouse_testing.far_end import send_elsewhere
from enginehouse_testing.link import Link, random_weights

CHECKS = Checks(since="1.1")


@CHECKS.act(capability=capabilities.SAME_PROCESS)
def _same_process(link: Link) -> str:
    """Weights arrive complete if senders and receivers are in one process."""
    sent = random_weights(10)
    with link.connect(sent) as connection:
        return compare(connection.update(1, sent)[0], sent)


@CHECKS.act(capability=capabilities.SAME_HOST)
def _same_host(link: Link) -> str:
    """Weights arrive complete in another process."""
    return send_elsewhere(link, random_weights(11), another_host=False)


@CHECKS.act(capability=capabilities.CROSS_HOST)
def _cross_host(link: Link) -> str:
    """Weights arrive complete in a process that cannot open shared resources of the host."""
    return send_elsewhere(link, random_weights(12), another_host=True)
