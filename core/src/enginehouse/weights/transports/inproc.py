"""Passes references to the trainer's tensors, bucket by bucket, between two roles of one process.

Training rank i sends to rollout replica i in the same process, without a copy. The rollout engine copies the staged
tensors, unless the trainer lends them. One bucket is in transfer while the trainer gathers the next, so a trainer that
gathers sharded parameters holds at most two gathered buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from enginehouse.engines.weights import Loan, TransferPlan, TransportSession, WeightChunk, WeightSyncError
from enginehouse.weights.buckets import in_plan_order
from enginehouse.weights.checksums import checksum, mixed_checksum
from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import BucketTransport, IdleSender, Receiver, Sender

if TYPE_CHECKING:
    import torch

_mailboxes: dict[tuple[str, int], Mailbox] = {}
_mailboxes_lock = threading.Lock()


class InprocTransport(BucketTransport):
    """Passes tensors by reference from a training rank to the rollout replica of the same number in its process."""

    name = "inproc"
    passes_references = True

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one side of the connection; see `WeightTransport`. Raises `WeightSyncError` if replica `index` is not in
        the process of training rank `index`."""
        key = (plan.session, index)
        if side == "send":
            if index >= plan.receivers:
                return IdleSender()
            with _mailboxes_lock:
                _mailboxes[key] = Mailbox(plan, key)
                return InprocSender(_mailboxes[key])
        with _mailboxes_lock:
            mailbox = _mailboxes.get(key)
        if mailbox is None:
            raise WeightSyncError(
                f"transport 'inproc' needs rollout replica {index} and training rank {index} in one process, but they "
                "are not. Place the rollout in the actor's processes, or choose another transport."
            )
        return InprocReceiver(mailbox)


class Mailbox(Barrier):
    """State that one sender and one receiver share."""

    def __init__(self, plan: TransferPlan, key: tuple[str, int]):
        super().__init__()
        self.plan = plan
        self.key = key
        self.taken = 0  # number of buckets of the newest update that the receiver has taken
        self.bucket: tuple[int, list[tuple[str, torch.Tensor]]] | None = None  # number and tensors in transfer
        self.loan: Loan | None = None  # of the newest update's tensors

    def abort(self, version: int) -> None:
        """Make updates up to `version` fail, and drop their tensors."""
        super().abort(version)
        if self.begun <= version:
            self.bucket = None

    def close(self, why: str = "the connection was closed") -> None:
        super().close(why)
        with self.changed:
            self.bucket = None
        with _mailboxes_lock:
            if _mailboxes.get(self.key) is self:
                del _mailboxes[self.key]


class InprocSession:
    """Base class of both sides."""

    def __init__(self, mailbox: Mailbox):
        self._mailbox = mailbox

    def abort(self, version: int) -> None:
        with self._mailbox.changed:
            self._mailbox.abort(version)

    def close(self) -> None:
        self._mailbox.close()


class InprocSender(InprocSession, Sender):
    """The sending side, at a training rank. Implements `LendingSession`."""

    loan: Loan | None = None

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        box = self._mailbox
        with box.changed:
            box.begin(version)
            box.taken, box.bucket, box.loan = 0, None, self.loan
        sums: dict[str, str] = {}
        sum_of = mixed_checksum if box.plan.sums_in_place else checksum
        planned = in_plan_order(box.plan, source)
        count = len(box.plan.buckets)
        for number, bucket in enumerate(box.plan.buckets):
            tensors = []
            for _ in bucket:
                parameter, tensor = next(planned)
                sums[parameter.name] = sum_of(tensor)
                tensors.append((parameter.name, tensor.detach()))
            with box.changed:
                self._wait_taken(number, version, deadline, count)
                box.bucket = (number, tensors)
                box.changed.notify_all()
        for _ in planned:  # raises if there are surplus weights
            pass
        with box.changed:
            self._wait_taken(count, version, deadline, count)
        return sums

    def _wait_taken(self, taken: int, version: int, deadline: Deadline, count: int) -> None:
        box = self._mailbox
        missing = f"rollout replica {box.key[1]} did not take bucket {taken} of {count}"
        box.wait(lambda: box.taken >= taken, version, deadline, lambda: missing)


class InprocReceiver(InprocSession, Receiver):
    """The receiving side, at a rollout replica."""

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        box = self._mailbox
        for number in range(len(box.plan.buckets)):
            yield WeightChunk(self._take(number, version, deadline), loan=box.loan)
            with box.changed:
                box.check(version)
                box.bucket = None
                box.taken = number + 1
                box.changed.notify_all()

    def _take(self, number: int, version: int, deadline: Deadline) -> list[tuple[str, torch.Tensor]]:
        box = self._mailbox
        with box.changed:
            count = len(box.plan.buckets)
            missing = f"bucket {number + 1} of {count} from training rank {box.key[1]} did not arrive"
            box.wait(lambda: box.begun > version or (box.begun == version and box.bucket is not None),
                     version, deadline, lambda: missing)  # fmt: skip
            if box.begun > version:
                raise WeightSyncError(
                    f"the receiver waits for weight update {version}, but the trainer has already begun update "
                    f"{box.begun}"
                )
            assert box.bucket is not None
            arrived, tensors = box.bucket
            if arrived != number:
                raise WeightSyncError(
                    f"weight update {version}: expected bucket {number + 1}, but bucket {arrived + 1} arrived"
                )
            return tensors
