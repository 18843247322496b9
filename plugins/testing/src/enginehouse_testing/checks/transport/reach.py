"""How far a transport reaches: as far as it is declared to."""

from __future__ import annotations

from enginehouse.plugin import capabilities
from enginehouse_testing.check import EXACT, Check
from enginehouse_testing.checks.transport.exactness import judge, unlike
from enginehouse_testing.far_end import arrives
from enginehouse_testing.link import Link, random_weights


def _same_process(link: Link) -> str:
    sent = random_weights(10)
    with link.connect(sent) as connection:
        return unlike(connection.update(1, sent)[0], sent)


def _same_host(link: Link) -> str:
    return arrives(link, random_weights(11), another_host=False)


def _cross_host(link: Link) -> str:
    return arrives(link, random_weights(12), another_host=True)


CHECKS = (
    Check(
        name="same_process",
        since="1.1",
        capability=capabilities.SAME_PROCESS,
        claim="Weights arrive whole where both ends are in one process",
        tolerance=EXACT,
        acts=(_same_process,),
        judge=judge,
    ),
    Check(
        name="same_host",
        since="1.1",
        capability=capabilities.SAME_HOST,
        claim="Weights arrive whole in another process",
        tolerance=EXACT,
        acts=(_same_host,),
        judge=judge,
    ),
    Check(
        name="cross_host",
        since="1.1",
        capability=capabilities.CROSS_HOST,
        claim="Weights arrive whole in a process that cannot open what processes of one host share",
        tolerance=EXACT,
        acts=(_cross_host,),
        judge=judge,
    ),
)
