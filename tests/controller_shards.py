"""The worker classes of the controller's tests that work on batches."""

import asyncio

import torch

from enginehouse.controller import Worker, register
from enginehouse.data import Batch, Ragged
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

    @register("dp")
    def identity(self, batch: Batch):
        """The batch as it came; from a rank that is not asked for results something that fits nowhere."""
        self.seen.append(batch.tensor("number").tolist())
        dense = [name for name in ("number", "added") if name in batch]
        self.places = {name: place_in_shared_memory(batch.tensor(name)) for name in dense}
        return batch if self.mesh.is_output_rank else "nobody asked for this"

    @register("dp", collect="list")
    def answering_rank(self, batch: Batch) -> int:
        return self.context.rank

    def where_it_lay(self, column: str) -> tuple[int, int] | None:
        return self.places[column]

    def what_was_seen(self):
        return self.seen

    def lie_on(self, sizes: dict[str, int], output: dict[str, int] | None = None) -> None:
        """Take a place on a mesh, as an engine does that is set up after it was made."""
        self.mesh = Mesh.of(sizes, self.context.rank, output)
        self.seen = []


def place_in_shared_memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Inode and offset of the shared file a tensor's memory is mapped from: the same in all processes that share it.

    None for memory of this process alone.
    """
    address = tensor.data_ptr()
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, permissions, offset, _, inode, *_ = line.split()
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                return (int(inode), int(offset, 16) + address - start) if permissions.endswith("s") else None
    return None


read_in_this_process: list[str] = []
"""Names of the witnesses that were unpickled here."""


class Witness:
    """An object that notices where it is read."""

    def __init__(self, name: str):
        self.name = name

    def __reduce__(self):
        return _testify, (self.name,)


def _testify(name: str) -> Witness:
    read_in_this_process.append(name)
    return Witness(name)


class Writer(Worker):
    """Makes batches and hands them on."""

    def lie_on(self, sizes: dict[str, int]) -> None:
        self.mesh = Mesh.of(sizes, self.context.rank)

    @register("dp")
    def write(self, prompts: Batch) -> Batch:
        """Rows of 1, 2, 3 ... tokens, with a witness each."""
        rows = len(prompts)
        numbers = prompts["number"].tolist()
        ids = Ragged.from_list([[number] * (1 + number) for number in numbers], torch.int32)
        witnesses = [Witness(f"row {number}") for number in numbers]
        return prompts.with_columns(ids=ids, padding=torch.zeros(rows, 50_000), witness=witnesses)

    @register("dp")
    def same(self, batch: Batch) -> Batch:
        return batch

    @register(collect="distributed")
    async def tell_and_write(self, prompts: Batch) -> tuple[str, Batch]:
        return "told", self.write(prompts)

    @register("dp", blocking=False)
    async def same_later(self, batch: Batch) -> Batch:
        return batch

    @register("dp", collect="list")
    def numbers_and_tokens(self, batch: Batch) -> tuple[list[int], int]:
        return batch["number"].tolist(), batch["ids"].tokens

    @register("dp")
    def fail_on_the_last_row(self, batch: Batch) -> Batch:
        if 4 in batch["number"].tolist():
            raise ValueError("no row 4, please")
        return batch

    @register("dp")
    def answer(self, batch: Batch, samples: int) -> Batch:
        return batch.repeat(samples)

    @register("dp")
    def drop_rows(self, batch: Batch) -> Batch:
        return batch.slice(0, self.context.rank)

    @register("dp")
    def other_dtype_on_rank_one(self, batch: Batch) -> Batch:
        return batch.with_columns(number=batch["number"].float()) if self.context.rank == 1 else batch

    @register("dp")
    def pair(self, batch: Batch, other: Batch) -> Batch:
        return batch

    @register("dp")
    async def never(self, batch: Batch) -> Batch:
        self.asleep = asyncio.Event()
        await self.asleep.wait()
        return batch

    async def wake(self) -> None:
        while not hasattr(self, "asleep"):
            await asyncio.sleep(0)
        self.asleep.set()

    @register
    def count(self, batch: Batch) -> int:
        return len(batch)

    def read_here(self) -> list[str]:
        return read_in_this_process

    def node_id(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()
