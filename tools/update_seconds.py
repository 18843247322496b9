"""Calculate how long weight updates take on GPUs, from assumed speeds, as docs/gpu.md shows it.

python -m tools.update_seconds        # prints the table
"""

from __future__ import annotations

from dataclasses import dataclass

COPY_DOWN = 3.5
"""Gigabytes per second of a copy from a GPU to pageable memory, one thread. Assumed, as all speeds below with GPUs."""
COPY_AND_SUM = 6.3
"""Gigabytes per second of a copy with a checksum in host memory, one thread (measured: benchmarks/results)."""
SUM = 25.0
"""Gigabytes per second of checksums by four threads. One thread sums 9.3 (measured)."""
CHECK = 15.0
"""Gigabytes per second in which a replica's process maps and sums its share of a version, by four threads."""
COPY_UP = 8.0
"""Gigabytes per second of a copy from pageable memory to a GPU, one process."""
LOAD_SECONDS = 8.5e-5
"""Seconds in which vLLM's loaders handle a tensor, beside its copy (measured)."""
STREAM = 4.0
"""Gigabytes per second that a replica takes from all TCP connections together."""
STAGE = 6.3
"""Gigabytes per second of a copy to a replica's own memory, which a transport between hosts needs."""


@dataclass(frozen=True)
class Model:
    """A model in bfloat16 and how it is placed; each training rank and each of a replica's processes has a GPU."""

    name: str
    gigabytes: float
    tensors: int
    ranks: int
    hosts: int
    processes: int

    @property
    def transfer(self) -> float:
        """Seconds in which a version is staged, while the replicas generate."""
        own = self.gigabytes / self.ranks
        summed = self.gigabytes * (1 if self.ranks == 1 else 2) / SUM
        if self.hosts == 1:
            return max(own / COPY_DOWN + own / COPY_AND_SUM, summed)
        return max(own / COPY_DOWN + own / SUM, self.gigabytes / STREAM, summed + self.gigabytes / STAGE)

    @property
    def stop(self) -> float:
        """Seconds in which the replicas do not generate: the load, with the check beside it, and the comparison of what
        is served."""
        share = self.gigabytes / self.processes
        return max(share / CHECK, share / COPY_UP + self.tensors * LOAD_SECONDS) + share / COPY_UP


MODELS = (
    Model("0.6B", 1.2, 311, 1, 1, 1),
    Model("8B", 16.4, 399, 8, 1, 2),
    Model("32B", 65.5, 707, 16, 2, 4),
    Model("30B-A3B", 61.0, 18_867, 16, 2, 4),
    Model("235B-A22B", 470.0, 36_945, 64, 8, 8),
)


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| model | GB | training ranks, hosts | processes of a replica | staged, s | stopped, s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {model.name} | {model.gigabytes:g} | {model.ranks}, {model.hosts} | {model.processes} "
        f"| {model.transfer:.1f} | {model.stop:.1f} |"
        for model in MODELS
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
