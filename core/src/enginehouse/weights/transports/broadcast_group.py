"""A process group of a sender and its receivers, separate from the default group of `torch.distributed`.

A collective cannot be cancelled, because a rank that has begun it can only end it together with all other ranks. So the
group is abandoned after a failure, and the next update makes a new group.
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
"""Time limit for connecting two ranks, because a rank that dies after it published its address never connects."""

LATE_SECONDS = 5.0
"""Time that a collective may take after the deadline, so that the waits fail first: their errors say more."""


class BroadcastGroup:
    """One rank's membership in a group, and the rank's buffers.

    A thread joins the group, broadcasts in the requested order, and leaves. After a failure all broadcasts fail.

    Args:
        own_host: address of this rank, on the interface by which it reaches the other ranks.
        number: number of the group, unique in its store.

    Attributes:
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
        self._broadcasts: queue.SimpleQueue[tuple[torch.Tensor, Deadline, Future[None]] | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"weights-group-{number}", daemon=True)
        self._thread.start()

    def broadcast(self, slot: int, nbytes: int, deadline: Deadline) -> Future[None]:
        """Broadcast the first `nbytes` of a buffer, which nobody may touch until the future ends. The future fails with
        a `RuntimeError` of `torch.distributed` if another rank left, died or did not take part."""
        future: Future[None] = Future()
        self._broadcasts.put((self.buffers[slot][:nbytes], deadline, future))
        return future

    def leave(self) -> None:
        """Leave the group after the current join or broadcast. The other ranks' broadcasts then fail."""
        self._left.set()
        self._broadcasts.put(None)

    def await_end(self, seconds: float) -> None:
        """Wait until this rank has left the group, for at most `seconds`."""
        self._thread.join(seconds)

    def _serve(self) -> None:
        group: Any = None
        failure: BaseException | None = None
        try:
            group = self._join()
        except BaseException as error:
            failure = error
        while (broadcast := self._broadcasts.get()) is not None:
            buffer, deadline, future = broadcast
            if failure is None:
                try:
                    self._move(group, buffer, deadline)
                except BaseException as error:
                    failure = error.with_traceback(None)  # a traceback would keep the group alive
                    group = None  # closes its connections, so that no rank waits for this rank
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

    def _join(self) -> Any:
        import torch.distributed as dist

        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=MEETING_SECONDS)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_host)]
        store = self._store.for_group(f"{self.number}:", self._deadline)
        group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        store.set(f"joined {self._rank}", "")
        store.wait([f"joined {rank}" for rank in range(self._size)])  # an early leave would block other ranks' joins
        return group

    def _move(self, group: Any, buffer: torch.Tensor, deadline: Deadline) -> None:
        import torch.distributed as dist

        if self._left.is_set():
            raise RuntimeError("this rank has left the group")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=deadline.left + LATE_SECONDS)
        group.broadcast([buffer], options).wait()


def buffer_bytes(nbytes: int) -> int:
    """Return the size in bytes of a buffer for a heading and a bucket of `nbytes`."""
    return ALIGNMENT + nbytes


def write_heading(buffer: torch.Tensor, version: int, bucket: int) -> None:
    """Write a version and a bucket's number into a buffer's heading."""
    import torch

    buffer[:16].copy_(torch.tensor([version, bucket], dtype=torch.int64).view(torch.uint8))


def read_heading(buffer: torch.Tensor) -> tuple[int, int]:
    """Read the version and the bucket's number from a buffer's heading."""
    import torch

    version, bucket = buffer[:16].view(torch.int64).tolist()
    return version, bucket
