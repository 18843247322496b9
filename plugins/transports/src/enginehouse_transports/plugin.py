"""Registers the weight transports of this package."""

from __future__ import annotations

import sys

from enginehouse.plugin import Transport, hookimpl
from enginehouse.plugin.capabilities import CROSS_HOST

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_transports(register):
    register(
        Transport(
            name="point_to_point",
            summary="Between hosts, each training rank's own parts straight to the replicas that need them",
            transport="enginehouse_transports.point_to_point:PointToPointTransport",
            capabilities={CROSS_HOST},
        )
    )
    if sys.platform == "linux":  # only Linux can open memory without a name
        register(
            Transport(
                name="differences",
                summary="Between hosts with slow links, as point_to_point, but only the elements that changed",
                transport="enginehouse_transports.differences:DifferencesTransport",
                capabilities={CROSS_HOST},
                trainer_copies=1,
                replica_copies=2,
            )
        )
