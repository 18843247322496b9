"""A `torch.distributed` store, through which the ranks of a process group exchange addresses when they connect.

The store sends its values over the connections of the session. torch's own store would need an additional port, and its
waits would not obey the deadlines of the session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.deadline import Deadline

if TYPE_CHECKING:
    import torch.distributed as dist


class Store:
    """Short values by name. Each rank has a copy, and all copies are equal once all values have arrived.

    Args:
        barrier: barrier whose `changed` guards the values, and which also detects a broken connection.
    """

    def __init__(self, barrier: Barrier, publish: Callable[[str, bytes], None]):
        self._barrier = barrier
        self._publish = publish
        self._values: dict[str, bytes] = {}

    def post(self, name: str, value: bytes) -> None:
        with self._barrier.changed:
            self.put(name, value)
            self._publish(name, value)

    def put(self, name: str, value: bytes) -> None:
        """Set a value. The caller holds the barrier's `changed`."""
        self._values[name] = value
        self._barrier.changed.notify_all()

    def read(self, name: str, deadline: Deadline) -> bytes:
        """Wait for a value. Raises `RuntimeError` if the deadline passed, or the connection is broken."""
        barrier = self._barrier
        with barrier.changed:
            barrier.changed.wait_for(lambda: name in self._values or bool(barrier.broken), deadline.left)
            if name not in self._values:
                raise RuntimeError(f"the ranks could not connect: {barrier.broken or f'{name!r} did not arrive'}")
            return self._values[name]

    def for_group(self, prefix: str, deadline: Deadline) -> dist.Store:
        """Return a store of `torch.distributed` for one group, backed by this store."""
        store: dist.Store = _torch_store_class()(self, prefix, deadline)
        return store


@cache
def _torch_store_class() -> type:
    """Return a subclass of torch's store. Torch is imported only at the first call."""
    import torch.distributed as dist

    class TorchStore(dist.Store):
        """The methods of a store that the construction of a process group calls."""

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
