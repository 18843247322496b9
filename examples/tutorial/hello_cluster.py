"""Each rank of a group says where it runs: the smallest program that needs a cluster. `docs/operators.md` runs it.

    python examples/tutorial/hello_cluster.py [NODES]

takes NODES pairs of processes (one by default), each pair on one node, on up to NODES nodes: a large node may have
several pairs. It uses the cluster that RAY_ADDRESS names, or one that it starts.
"""

import sys

import ray

from enginehouse.controller import ResourcePool, Worker, WorkerGroup, WorkerSpec, register, start_ray


class Greeter(Worker):
    """Says where it is."""

    @register
    def greet(self) -> str:
        """Return a line with this rank and its node."""
        node = ray.get_runtime_context().get_node_id()
        return f"hello from rank {self.context.rank} of {self.context.world_size} on node {node[:8]}"


def nodes_asked_for(arguments: list[str]) -> int:
    """Return the number of nodes on the command line. If it is invalid, print a line and exit with code 2."""
    given = " ".join(arguments) or "1"
    if not given.isdecimal() or int(given) == 0:
        print(f"usage: hello_cluster.py [NODES], where NODES is a whole number from 1, not {given!r}", file=sys.stderr)
        raise SystemExit(2)
    return int(given)


def main(nodes: int) -> None:
    """Start the group, let every rank greet, and end it."""
    spec = WorkerSpec(Greeter).options(distributed=False)  # no torch.distributed: it starts faster
    with start_ray(), WorkerGroup(ResourcePool([2] * nodes), spec, name="greeter") as group:
        print("\n".join(group.greet()))


if __name__ == "__main__":
    main(nodes_asked_for(sys.argv[1:]))
