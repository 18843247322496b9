"""What the ranks of a group tell each other to find together: the store of `torch.distributed`, over connections that
exist already. A store of torch's own would be one more port, and waits in it end at no deadline of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from enginehouse.weights.transports.barrier import Gate
from enginehouse.weights.transports.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed import Store


class Noticeboard:
    """Short values by name, the same on every rank once they have travelled.

    Args:
        gate: whose `changed` guards it, and tells of a broken connection.
        publish: tells the other ranks of a value.
    """

    def __init__(self, gate: Gate, publish: Callable[[str, bytes], None]):
        self._gate = gate
        self._publish = publish
        self._notes: dict[str, bytes] = {}

    def post(self, name: str, value: bytes) -> None:
        """Put up a value of this rank."""
        with self._gate.changed:
            self.put(name, value)
            self._publish(name, value)

    def put(self, name: str, value: bytes) -> None:
        """Put up what another rank told, holding the gate's `changed`."""
        self._notes[name] = value
        self._gate.changed.notify_all()

    def read(self, name: str, deadline: Deadline) -> bytes:
        """Wait for a value.

        Raises:
            RuntimeError: it does not come: the deadline passed, or the connection is broken.
        """
        gate = self._gate
        with gate.changed:
            gate.changed.wait_for(lambda: name in self._notes or bool(gate.broken), deadline.left)
            if name not in self._notes:
                raise RuntimeError(f"the ranks did not find together: {gate.broken or f'no {name!r}'}")
            return self._notes[name]

    def store(self, prefix: str, deadline: Deadline) -> Store:
        """The board as a store, for one group."""
        made: Store = _store_class()(self, prefix, deadline)
        return made


@cache
def _store_class() -> type:
    """The store's class, made when torch is needed."""
    from torch.distributed import Store

    class NoticeboardStore(Store):
        """As much of a store as it takes to make a process group."""

        def __init__(self, board: Noticeboard, prefix: str, deadline: Deadline):
            super().__init__()
            self._board = board
            self._prefix = prefix
            self._deadline = deadline

        def set(self, key: str, value: bytes | str) -> None:
            self._board.post(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return self._board.read(self._prefix + key, self._deadline)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            for key in keys:
                self.get(key)

    return NoticeboardStore
