"""Worker classes of the controller's tests, importable in worker processes. Without torch: processes start faster."""

import asyncio
import logging
import os
import threading
import time

from enginehouse.controller import Worker, register
from enginehouse.engines.progress import note_progress
from enginehouse.engines.train import Mean
from enginehouse.errors import ModelError


class Accumulator(Worker):
    """Adds numbers up."""

    def __init__(self, start: int = 0):
        self.total = start

    @register("one_to_all")
    def add(self, value: int) -> int:
        self.total += value
        return self.total

    @register("rank_zero")
    def total_of_rank_zero(self) -> int:
        return self.total

    @register("all_to_all")
    def add_own(self, value: int, scale: int = 1) -> int:
        self.total += value * scale
        return self.total

    @register("one_to_all", collect="first")
    def first(self) -> int:
        return self.context.rank

    @register("one_to_all", collect="merge")
    def metrics(self) -> dict[str, float | Mean]:
        return {"loss": Mean(float(self.context.rank), 1.0), "lr": 0.5}

    @register("one_to_all", blocking=False)
    def add_later(self, value: int) -> int:
        return self.add(value)

    @register(execute="rank_zero")
    def where(self) -> int:
        return self.context.rank

    def restart(self, start: int) -> None:
        self.total = start

    def unregistered(self, value: int = 1) -> int:
        return self.context.rank + value


def repeat_pairs(group, *args, **kwargs):
    """Each argument has two entries, dealt to the ranks in turn."""
    return [
        (tuple(arg[rank % 2] for arg in args), {name: value[rank % 2] for name, value in kwargs.items()})
        for rank in range(group.world_size)
    ]


def as_they_are(group, outputs):
    return outputs


class TwoToAll(Worker):
    """A custom dispatch given in place."""

    def __init__(self, start: int):
        self.start = start

    @register({"dispatch_fn": repeat_pairs, "collect_fn": as_they_are})
    def add(self, x: int, y: int) -> int:
        return self.start + x + y


class Trouble(Worker):
    """Fails in every way: what tests of errors call."""

    def __init__(self, fail: str = "", rank: int = 0):
        logging.getLogger("trouble").warning("being built")
        if fail and self.context.rank == rank:
            if fail == "model":
                raise ModelError("no model at /nowhere")
            if fail == "hang":
                hang_for_ever()
            if fail == "die":
                os._exit(3)
            raise ValueError(fail)

    @register
    def fine(self) -> int:
        return self.context.rank

    @register
    def raise_on(self, rank: int, others_hang: bool = False) -> None:
        logging.getLogger("trouble").warning("about to fail on rank %d", rank)
        if self.context.rank == rank:
            raise ValueError(f"bad value on rank {rank}")
        if others_hang:
            hang_for_ever()

    @register
    def raise_unpicklable(self) -> None:
        raise Unpicklable(1, 2)

    @register
    def die_on(self, rank: int, others_hang: bool = False) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), 9)
        if others_hang:
            hang_for_ever()

    @register
    def hang_on(self, rank: int) -> None:
        if self.context.rank == rank:
            hang_for_ever()

    def hang(self) -> None:
        hang_for_ever()

    @register
    async def hang_async(self) -> None:
        await sleep_for_ever()

    @register
    async def exit_async(self) -> None:
        raise SystemExit(2)

    @register
    def hang_in_native_code(self) -> None:
        hold_the_interpreter()

    @register
    def linger(self, seconds: float, rank: int) -> None:
        if self.context.rank == rank:
            raise ValueError("gone first")
        time.sleep(seconds)

    @register
    def get_on(self, seconds: float, then_hang: bool = False) -> int:
        """Rank 0 gets on with something for so long; the others wait for it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.context.rank == 0:
                note_progress()
            time.sleep(0.02)
        if then_hang:
            hang_for_ever()
        return self.context.rank

    @register
    def exit(self) -> None:
        raise SystemExit(5)

    @register
    def give_back_a_lock(self):
        return threading.Lock()


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("cannot travel")
        self.lock = threading.Lock()


def hang_for_ever() -> None:
    threading.Event().wait()


async def sleep_for_ever() -> None:
    await asyncio.Event().wait()


def hold_the_interpreter() -> None:
    """A C function called through `PyDLL` keeps the interpreter lock."""
    import ctypes

    ctypes.PyDLL(None).sleep(60)


class Diary(Worker):
    """Writes down which thread ran what, for two roles that share a process."""

    lines: list[tuple[str, int, int]] = []  # noqa: RUF012 - shared by the roles of a process on purpose

    @register
    def write(self, number: int) -> None:
        Diary.lines.append((self.context.role, number, threading.get_ident()))

    @register("rank_zero")
    def read(self) -> list[tuple[str, int, int]]:
        return Diary.lines

    @register
    def process(self) -> int:
        return os.getpid()


class Meeting(Worker):
    """Async methods that can only end together."""

    def __init__(self) -> None:
        self.arrived = 0
        self.all_there: asyncio.Event | None = None

    @register
    async def arrive(self, of: int) -> int:
        self.all_there = self.all_there or asyncio.Event()
        self.arrived += 1
        if self.arrived == of:
            self.all_there.set()
        await self.all_there.wait()
        return threading.get_ident()

    @register
    def block_until_arrived(self, of: int) -> bool:
        deadline = time.monotonic() + 20
        while self.arrived < of and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.arrived == of

    @register
    async def fail(self) -> None:
        raise KeyError("async trouble")


class Reducer(Worker):
    """Uses plain torch.distributed."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @register
    def sum_of_ranks(self) -> int:
        import torch
        import torch.distributed as dist

        value = torch.tensor([self.context.rank + 1])
        dist.all_reduce(value)
        return int(value)

    def shutdown(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Surroundings(Worker):
    """Says what it sees."""

    def environ(self, names: list[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def place(self):
        return self.context

    def modules(self, names: list[str]) -> list[bool]:
        import sys

        return [name in sys.modules for name in names]

    def interrupt(self) -> str:
        import signal

        os.kill(os.getpid(), signal.SIGINT)
        return "survived"


class Leaver(Worker):
    """Leaves a note when shut down."""

    def __init__(self, path: str):
        self.path = path

    def start_child(self) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    async def shutdown(self) -> None:
        with open(self.path, "a") as file:
            file.write(f"rank {self.context.rank} left\n")


class Plain:
    """Neither a Worker nor with a context of its own."""

    def __init__(self, value: int):
        self.value = value

    @register
    def get(self) -> int:
        return self.value


class Slow:
    """Waits on the main lane until an async method releases it."""

    def __init__(self):
        self.released = threading.Event()

    def wait(self) -> str:
        return "released" if self.released.wait(20) else "forgotten"

    async def release(self) -> None:
        self.released.set()


def _too_few(group):
    return [((), {})]


def _not_calls(group):
    return ["first", "second"]


class Forgetful:
    """Registered with wrong dispatch functions."""

    @register({"dispatch_fn": _too_few, "collect_fn": lambda group, outputs: outputs})
    def too_few(self): ...

    @register({"dispatch_fn": _not_calls, "collect_fn": lambda group, outputs: outputs})
    def not_calls(self): ...
