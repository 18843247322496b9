"""What the ranks of a group tell each other to meet: the store of `torch.distributed`, over connections that
exist already. A store of torch's own would be one more port, and waits in it end at no deadline of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.deadline import Deadline

if TYPE_CHECKING:
    import torch.distributed as dist


class Store:
    """Short values by name, the same on every rank once they have travelled.

    Args:
        barrier: whose `changed` guards it, and tells of a broken connection.
        publish: tells the other ranks of a value.
    """

    def __init__(self, barrier: Barrier, publish: Callable[[str, bytes], None]):
        self._barrier = barrier
        self._publish = publish
        self._notes: dict[str, bytes] = {}

    def post(self, name: str, value: bytes) -> None:
        """Put up a value of this rank."""
        with self._barrier.changed:
            self.put(name, value)
            self._publish(name, value)

    def put(self, name: str, value: bytes) -> None:
        """Put up what another rank told, holding the barrier's `changed`."""
        self._notes[name] = value
        self._barrier.changed.notify_all()

    def read(self, name: str, deadline: Deadline) -> bytes:
        """Wait for a value.

        Raises:
            RuntimeError: it does not come: the deadline passed, or the connection is broken.
        """
        barrier = self._barrier
        with barrier.changed:
            barrier.changed.wait_for(lambda: name in self._notes or bool(barrier.broken), deadline.left)
            if name not in self._notes:
                raise RuntimeError(f"the ranks did not meet: {barrier.broken or f'no {name!r}'}")
            return self._notes[name]

    def for_group(self, prefix: str, deadline: Deadline) -> dist.Store:
        """What `torch.distributed` takes for its store, for one group."""
        made: dist.Store = _torch_store()(self, prefix, deadline)
        return made


@cache
def _torch_store() -> type:
    """A class of torch's, made when torch is needed."""
    import torch.distributed as dist

    class TorchStore(dist.Store):
        """As much of a store as it takes to make a process group."""

        def __init__(self, store: Store, prefix: str, deadline: Deadline):
            super().__init__()
            self._store = store
            self._prefix = prefix
            self._deadline = deadline

        def set(self, key: str, value: bytes | str) -> None:
            self._store.post(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return self._store.read(self._prefix + key, self._deadline)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            for key in keys:
                self.get(key)

    return TorchStore
