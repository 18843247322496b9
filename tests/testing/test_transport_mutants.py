"""Each property of a transport fails on one that breaks it, and on nothing a transport does right."""

import pytest
import transport_mutants

from enginehouse.plugin import Transport
from enginehouse_testing.check import PROTOCOL
from enginehouse_testing.running import Certifier, cases

pytestmark = pytest.mark.slow

NEXT = {
    "abort", "abort_before", "stops_early", "no_sender", "no_receiver", "versions", "sender_fails", "idle_rank"
}  # fmt: skip
"""Checks that end with a whole update."""

MUTANTS = [
    ("Corrupting", {"exact", "several_ranks", *NEXT}),
    ("SumsClaimed", {"awkward_tensors", "exact", "nothing_left", "several_ranks", *NEXT}),
    ("OrderLost", {"awkward_tensors", "exact", "several_ranks", *NEXT}),
    ("StridesIgnored", {"awkward_tensors"}),
    ("SumsOfOthers", {"exact", "several_ranks"}),
    ("BucketsJoined", {"two_buckets"}),
    ("AbortForgotten", {"abort", "abort_before", "sender_fails"}),
    ("AbortLasts", {"abort", "abort_before", "sender_fails"}),
    ("LateTaken", {"no_sender"}),
    ("VersionsIgnored", {"versions"}),
    ("NotExhausted", {"sender_fails"}),
    ("IdleLeavesThem", {"idle_rank"}),
    ("HoldsForgotten", {"held"}),
    ("SegmentLeft", {"nothing_left"}),
    ("PartsMisplaced", {"several_ranks"}),
    ("PartsUnsaid", {"several_ranks"}),
    ("ChangesLost", {"exact", "held"}),
]


REACHES = {
    "HoldsForgotten": "same_host",
    "SegmentLeft": "same_host",
    "PartsMisplaced": "cross_host",
    "PartsUnsaid": "cross_host",
    "ChangesLost": "cross_host",
}
"""Of mutants of other transports than `inproc`."""


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    while transport_mutants.LEFT:
        transport_mutants.LEFT.pop().unlink()


@pytest.mark.parametrize(
    ("transport", "reach"),
    [("inproc:InprocTransport", "same_host"), ("shared_memory:SharedMemoryTransport", "cross_host")],
)
def test_a_reach_that_is_declared_falsely_is_found(transport, reach):
    record = Transport(name="far", transport=f"enginehouse.weights.transports.{transport}", capabilities={reach})
    with Certifier(record, timeout=30.0) as certifier:
        (result,) = (certifier.run(case) for case in cases(record, ["one receiver"], [reach]))
    assert result.outcome == "failed"
    assert "the receivers, in another process: WeightSyncError" in result.detail


@pytest.mark.parametrize(("name", "broken"), MUTANTS, ids=[name for name, _ in MUTANTS])
def test_what_is_broken_is_found_and_nothing_else(name, broken):
    reach = REACHES.get(name, "same_process")
    record = Transport(name=name, transport=f"transport_mutants:{name}", capabilities={reach})
    with Certifier(record, timeout=5.0) as certifier:  # what is broken may only end at the deadline
        results = [certifier.run(case) for case in cases(record) if case.check.capability == PROTOCOL]
    assert {result.name for result in results if result.outcome == "failed"} == broken, [
        (result.name, result.layout, result.detail) for result in results if result.outcome == "failed"
    ]
    assert "passed" in {result.outcome for result in results}
