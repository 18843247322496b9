"""Each property of a transport fails on one that breaks it, and on nothing a transport does right."""

from __future__ import annotations

import pytest
import transport_mutants

from enginehouse.plugin import Transport
from enginehouse.testing.running import Certifier, cases
from enginehouse.testing.sites import TransportSite

pytestmark = pytest.mark.slow

NEXT = {
    "abort", "abort_before", "stops_early", "no_sender", "no_receiver", "versions", "sender_fails", "idle_rank"
}  # fmt: skip
"""Checks that end with a whole update."""

MUTANTS = [
    ("Corrupting", {"exact", *NEXT}),
    ("OrderLost", {"awkward_tensors", "exact", *NEXT}),
    ("StridesIgnored", {"awkward_tensors"}),
    ("SumsOfOthers", {"exact"}),
    ("BucketsJoined", {"two_buckets"}),
    ("AbortForgotten", {"abort", "abort_before", "sender_fails"}),
    ("AbortLasts", {"abort", "abort_before", "sender_fails"}),
    ("LateTaken", {"no_sender"}),
    ("VersionsIgnored", {"versions"}),
    ("NotExhausted", {"sender_fails"}),
    ("IdleLeavesThem", {"idle_rank"}),
    ("HoldsForgotten", {"held"}),
    ("SegmentLeft", {"nothing_left"}),
]


@pytest.fixture(autouse=True)
def soon_and_nothing_left(monkeypatch):
    monkeypatch.setattr(TransportSite, "seconds", 5.0)  # what is broken may only end at the deadline
    yield
    while transport_mutants.LEFT:
        transport_mutants.LEFT.pop().unlink()


@pytest.mark.parametrize(("name", "broken"), MUTANTS, ids=[name for name, _ in MUTANTS])
def test_what_is_broken_is_found_and_nothing_else(name, broken):
    reach = "same_host" if name in ("HoldsForgotten", "SegmentLeft") else "same_process"
    record = Transport(name=name, transport=f"transport_mutants:{name}", capabilities={reach})
    with Certifier(record) as certifier:
        results = [certifier.run(case) for case in cases(record)]
    assert {result.name for result in results if result.outcome == "failed"} == broken, [
        (result.name, result.layout, result.detail) for result in results if result.outcome == "failed"
    ]
    assert "passed" in {result.outcome for result in results}
