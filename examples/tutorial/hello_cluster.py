"""Each rank of a group says where it runs: the smallest program that needs a cluster. `docs/newcomers.md` runs it.

    python examples/tutorial/hello_cluster.py [NODES]

takes two processes on each of NODES nodes (one by default), on the cluster that RAY_ADDRESS names or on one that it
starts.
"""

import sys

import ray

from enginehouse.controller import ResourcePool, Worker, WorkerGroup, WorkerSpec, register, start_ray


class Greeter(Worker):
    """Says where it is."""

    @register
    def greet(self) -> str:
        """One line: this rank and its node."""
        node = ray.get_runtime_context().get_node_id()
        return f"hello from rank {self.context.rank} of {self.context.world_size} on node {node[:8]}"


def main(nodes: int) -> None:
    """Start the group, let every rank greet, and end it."""
    spec = WorkerSpec(Greeter).options(distributed=False)  # no torch.distributed: it starts faster
    with start_ray(), WorkerGroup(ResourcePool([2] * nodes), spec, name="greeter") as group:
        print("\n".join(group.greet()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
