"""What a call's arguments look like on their way to Ray actors.

Small arguments travel inside the call. A large one that several ranks receive is stored once, and ranks on a node
read it without a copy. A `Future` is passed on by reference where its output is one object.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from enginehouse.controller.dispatch import Call
from enginehouse.controller.future import Future
from enginehouse.controller.launchers.host import Late, Shared

STORE_BYTES = 64 * 1024
"""Arguments of at least this size that several ranks receive are stored once."""

_PLAIN = frozenset({type(None), bool, int, float, str})


def encode(role: str, method: str, calls: Sequence[Call | None], keep: frozenset[int]) -> list[tuple[Any, ...] | None]:
    """For each rank the arguments of `Host.call`: the head and what travels beside it; None for a rank not called."""
    if all(call is None or _is_plain(call) for call in calls):
        return _encode_plain(role, method, calls, keep)
    receivers = Counter(id(value) for call in calls if call is not None for value in _values(call))
    stored: dict[int, Any] = {}
    encoded: list[tuple[Any, ...] | None] = []
    for rank, call in enumerate(calls):
        if call is None:
            encoded.append(None)
            continue
        beside: list[Any] = []

        def stand_in(value: Any, beside: list[Any] = beside) -> Any:
            if isinstance(value, Future):
                reference = value.reference()
                return value.result() if reference is None else Late(reference)
            if receivers[id(value)] > 1 and payload_bytes(value) >= STORE_BYTES:
                if id(value) not in stored:
                    stored[id(value)] = _put(value)
                beside.append(stored[id(value)])
                return Shared(len(beside) - 1)
            return value

        args = tuple(stand_in(value) for value in call[0])
        kwargs = {name: stand_in(value) for name, value in call[1].items()}
        encoded.append(((role, method, rank in keep, args, kwargs), *beside))
    return encoded


def _encode_plain(
    role: str, method: str, calls: Sequence[Call | None], keep: frozenset[int]
) -> list[tuple[Any, ...] | None]:
    """Pickle once, here, what several ranks get: Ray sends bytes on as they are, which costs it a third of a tuple."""
    pickled: dict[tuple[int, bool], bytes] = {}
    encoded: list[tuple[Any, ...] | None] = []
    for rank, call in enumerate(calls):
        if call is None:
            encoded.append(None)
            continue
        kind = (id(call), rank in keep)
        if kind not in pickled:
            pickled[kind] = pickle.dumps((role, method, rank in keep, *call))
        encoded.append((pickled[kind],))
    return encoded


def _is_plain(call: Call) -> bool:
    return all(type(value) in _PLAIN for value in _values(call))


def payload_bytes(value: Any, depth: int = 3) -> int:
    """Roughly how many bytes a value is: what says `nbytes`, strings, and containers of them; 0 for what is unknown."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    items: Iterable[Any]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    else:
        return 0
    return 8 * len(value) + (sum(payload_bytes(item, depth - 1) for item in items) if depth else 0)


def _values(call: Call) -> Iterable[Any]:
    yield from call[0]
    yield from call[1].values()


def _put(value: Any) -> Any:
    import ray

    return ray.put(value)
