"""The worker class of the controller's tests that works on batches."""

from __future__ import annotations

from enginehouse.controller import Worker, register
from enginehouse.data import Batch
from enginehouse.engines.mesh import Mesh


class Sharded(Worker):
    """Works on data shards of a mesh."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    @register("dp")
    def times(self, batch: Batch, factor: int = 2) -> Batch:
        self.seen.append(batch.tensor("x").tolist())
        return Batch({"x": batch.tensor("x") * factor, "name": batch.objects("name")})

    @register("dp", collect="list")
    def rows(self, batch) -> int:
        return len(batch)

    @register("dp")
    def answer_from(self, batch):
        return [(self.context.rank, len(batch))]

    @register("dp")
    def nothing(self, batch) -> None:
        return None

    def what_was_seen(self):
        return self.seen

    def lie_on(self, sizes: dict[str, int], output: dict[str, int] | None = None) -> None:
        """Take a place on a mesh, as an engine does that is set up after it was made."""
        self.mesh = Mesh.of(sizes, self.context.rank, output)
        self.seen = []
