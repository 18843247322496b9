"""The worker class of the tests of `megatron_compute`. In a module of its own because worker processes import it."""

from enginehouse.controller import Worker, register
from enginehouse.engines.mesh import Mesh


class Witness(Worker):
    """Answers with its place on a Megatron mesh and what it was given."""

    def __init__(self, sizes: dict[str, int]):
        self.mesh = Mesh.of(sizes, self.context.rank, output={"pp": sizes["pp"] - 1})

    @register("megatron_compute")
    def answer(self, entry: str, scale: int = 1) -> tuple[int, str, int]:
        return (self.context.rank, entry, scale)
