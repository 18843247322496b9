"""A long answer is no hang: SGLang answers at its end, and is asked meanwhile whether it gets on."""

import asyncio

import pytest

from enginehouse.errors import EnginehouseError
from enginehouse_sglang import request_queue
from enginehouse_sglang.labels import Labels
from enginehouse_sglang.request_queue import RequestQueue


def noted(monkeypatch: pytest.MonkeyPatch, *loads: object) -> int:
    """Return how often progress was noted while SGLang told these loads, one a look."""
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    left = list(loads)

    class Server:
        async def load_now(self) -> object:
            told = left.pop(0)
            if not left:
                queue._pending.clear()
            if isinstance(told, Exception):
                raise told
            return told

    monkeypatch.setattr(request_queue, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(request_queue, "note_progress", note)
    queue = RequestQueue(Server, None, Labels("rollout"), frozenset())
    queue._pending = {1: object()}
    asyncio.run(queue._note_progress())
    assert not queue._watching
    return count


def test_tokens_that_come_are_progress_and_a_scheduler_that_hangs_makes_none(monkeypatch: pytest.MonkeyPatch):
    assert noted(monkeypatch, [(10, 4)], [(50, 4)], [(90, 3)]) == 2
    assert noted(monkeypatch, [(10, 4)], [(10, 4)], [(10, 4)]) == 0
    assert noted(monkeypatch, [(10, 4)], EnginehouseError("no such path"), [(90, 4)]) == 0, "an older server"
