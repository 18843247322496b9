"""A process group of one sender and its receivers, apart from the default group of `torch.distributed`.

A collective cannot be taken back: a rank that has begun one ends it with all others, or not at all. So a group is used
as long as everything arrives, and given up after a failure; the next update has a new one.
"""

from __future__ import annotations

import datetime
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from enginehouse.engines.weights import ALIGNMENT
from enginehouse.weights.buckets import AHEAD
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.store import Store

if TYPE_CHECKING:
    import torch

MEETING_SECONDS = 30.0
"""How long a rank waits for a connection from another that has told its address: one that died then never comes."""

LATE_SECONDS = 5.0
"""How much longer a collective may take than those wait who wait for it: their own errors say more than its own."""


class BroadcastGroup:
    """One rank's part in a group, and its buffers.

    All that may wait without a limit of its own runs on one thread: it joins, broadcasts in the order asked for, and
    leaves. After a failure everything that was asked for fails.

    Args:
        store: where the ranks find each other.
        own_host: this rank's address, on the interface by which it reaches the others.
        rank: 0 sends.
        size: number of ranks.
        number: of the group; those of one store differ.
        nbytes: size of a buffer.
        deadline: for joining.

    Attributes:
        number: of the group.
        buffers: `AHEAD` tensors of bytes.
    """

    def __init__(self, store: Store, own_host: str, rank: int, size: int, number: int, nbytes: int, deadline: Deadline):
        import torch

        self.number = number
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(AHEAD)]
        self._store = store
        self._own_host = own_host
        self._rank, self._size = rank, size
        self._deadline = deadline
        self._asked: queue.SimpleQueue[tuple[torch.Tensor, Deadline, Future[None]] | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"weights-group-{number}", daemon=True)
        self._thread.start()

    def broadcast(self, slot: int, nbytes: int, deadline: Deadline) -> Future[None]:
        """Broadcast the first bytes of a buffer; it is left alone until the result is there.

        The result is a `RuntimeError` of `torch.distributed` where another rank left, or died, or did not take part.
        """
        future: Future[None] = Future()
        self._asked.put((self.buffers[slot][:nbytes], deadline, future))
        return future

    def leave(self) -> None:
        """Leave the group, once it was joined and the broadcast that is on its way has ended; the others' then fail."""
        self._left.set()
        self._asked.put(None)

    def ended(self, seconds: float) -> bool:
        """Wait until the group was left; returns whether it was."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        group: Any = None
        failure: BaseException | None = None
        try:
            group = self._join()
        except BaseException as error:
            failure = error
        while (asked := self._asked.get()) is not None:
            buffer, deadline, future = asked
            if failure is None:
                try:
                    self._move(group, buffer, deadline)
                except BaseException as error:
                    failure = error.with_traceback(None)  # which would keep the group
                    group = None  # closes its connections: nobody is to wait for this rank any more
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

    def _join(self) -> Any:
        import torch.distributed as dist

        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._timeout = datetime.timedelta(seconds=MEETING_SECONDS)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_host)]
        store = self._store.for_group(f"{self.number}:", self._deadline)
        group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        store.set(f"joined {self._rank}", "")
        store.wait([f"joined {rank}" for rank in range(self._size)])  # one that left now would keep others joining
        return group

    def _move(self, group: Any, buffer: torch.Tensor, deadline: Deadline) -> None:
        import torch.distributed as dist

        if self._left.is_set():
            raise RuntimeError("the group was left")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=deadline.left + LATE_SECONDS)
        group.broadcast([buffer], options).wait()


def room(nbytes: int) -> int:
    """Bytes of a buffer for buckets of `nbytes`: a heading comes first."""
    return ALIGNMENT + nbytes


def head(buffer: torch.Tensor, version: int, bucket: int) -> None:
    """Write what a buffer holds into its heading."""
    import torch

    buffer[:16].copy_(torch.tensor([version, bucket], dtype=torch.int64).view(torch.uint8))


def heading(buffer: torch.Tensor) -> tuple[int, int]:
    """Version and number of the bucket that a buffer holds."""
    import torch

    version, bucket = buffer[:16].view(torch.int64).tolist()
    return version, bucket
