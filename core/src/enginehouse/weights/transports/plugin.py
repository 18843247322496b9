"""The built-in weight transports, and core's own choice among all that are installed."""

from __future__ import annotations

import sys

from enginehouse.errors import ConfigError
from enginehouse.plugin import Transport, hookimpl
from enginehouse.plugin.capabilities import CROSS_HOST, SAME_HOST, SAME_PROCESS


@hookimpl
def enginehouse_register_transports(register):
    register(
        Transport(
            name="inproc",
            summary="Between two roles of one process: no copy leaves it",
            transport="enginehouse.weights.transports.inproc:InprocTransport",
            capabilities={SAME_PROCESS},
        )
    )
    if sys.platform == "linux":  # elsewhere memory without a name cannot be reached; `collective` serves there
        register(
            Transport(
                name="shared_memory",
                summary="Between processes of one host, written once into memory that all replicas read",
                transport="enginehouse.weights.transports.shared_memory:SharedMemoryTransport",
                capabilities={SAME_HOST},
            )
        )
    register(
        Transport(
            name="collective",
            summary="Between hosts, broadcast in buckets through a torch.distributed group of its own",
            transport="enginehouse.weights.transports.collective:CollectiveTransport",
            capabilities={CROSS_HOST},
        )
    )


@hookimpl(trylast=True)
def enginehouse_pick_transport(cluster, transports):
    """The first transport, core's own before others, with the shortest reach that suffices.

    Between hosts, several training ranks send their own parts (`point_to_point`, where enginehouse-transports is
    installed): to gather them for `collective` takes longer than to send them (`make bench NAME=transports`).
    """
    if cluster.colocated:
        where, reaches = "in one process (rollout.placement: colocated)", [SAME_PROCESS]
    elif cluster.hosts == 1:
        where, reaches = "in processes of one host", [SAME_HOST, CROSS_HOST]
    else:
        where, reaches = "on several hosts, as far as is known", [CROSS_HOST]
        if cluster.training_ranks > 1:
            transports = sorted(transports, key=lambda one: one.name != "point_to_point")
    for reach in reaches:
        for transport in transports:
            if reach in transport.capabilities:
                return transport.name
    there = ", ".join(f"{one.name} ({', '.join(sorted(one.capabilities))})" for one in transports) or "none"
    raise ConfigError(
        f"actor and rollout are {where}, and no installed weight transport has the capability "
        f"{' or '.join(reaches)}. Installed: {there}. Place the two roles nearer to each other, or install a plugin "
        "with such a transport."
    )
