"""Registers the built-in weight transports, and chooses among all installed transports."""

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
            summary="Between two roles of one process, by reference",
            transport="enginehouse.weights.transports.inproc:InprocTransport",
            capabilities={SAME_PROCESS},
        )
    )
    if sys.platform == "linux":  # only Linux can open memory without a name; other systems use `collective`
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
            summary="Between hosts, broadcast in buckets through a separate torch.distributed group",
            transport="enginehouse.weights.transports.collective:CollectiveTransport",
            capabilities={CROSS_HOST},
        )
    )


@hookimpl(trylast=True)
def enginehouse_pick_transport(cluster, transports):
    """Choose the transport with the shortest sufficient reach. Of several, prefer core's own transports.

    Between hosts, several training ranks send their own parts by `point_to_point` if it is installed, because gathering
    the parts for `collective` takes longer than sending them (`make bench NAME=transports`).
    """
    if cluster.colocated:
        where, reaches = "are in one process (rollout.placement: colocated)", [SAME_PROCESS]
    elif cluster.hosts == 1:
        where, reaches = "are in processes of one host", [SAME_HOST, CROSS_HOST]
    else:
        where, reaches = "may be on several hosts", [CROSS_HOST]
        if cluster.training_ranks > 1:
            transports = sorted(transports, key=lambda transport: transport.name != "point_to_point")
    for reach in reaches:
        for transport in transports:
            if reach in transport.capabilities:
                return transport.name
    installed = ", ".join(f"{each.name} ({', '.join(sorted(each.capabilities))})" for each in transports) or "none"
    raise ConfigError(
        f"actor and rollout {where}, and no installed weight transport has the capability "
        f"{' or '.join(reaches)}. Installed: {installed}. Choose another rollout.placement, for which an installed "
        "transport suffices, or install a plugin with such a transport."
    )
