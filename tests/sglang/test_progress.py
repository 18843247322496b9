"""A long answer is no hang: SGLang answers at its end, and is asked meanwhile whether it gets on."""

import asyncio

import pytest

from enginehouse.errors import EnginehouseError
from enginehouse_sglang import engine
from enginehouse_sglang.engine import SGLangRollout


def noted(monkeypatch: pytest.MonkeyPatch, *loads: object) -> int:
    """Return how often progress was noted while SGLang told these loads, one a look."""
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    left = list(loads)

    class Server:
        process = None

        async def load_now(self) -> object:
            told = left.pop(0)
            if not left:
                rollout._calls.clear()
            if isinstance(told, Exception):
                raise told
            return told

    monkeypatch.setattr(engine, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(engine, "note_progress", note)
    rollout = SGLangRollout()
    rollout._where = "rollout"
    rollout._weights = type("Weights", (), {"check": lambda self: None})()
    rollout._server, rollout._calls = Server(), {1: object()}
    asyncio.run(rollout._note_progress())
    assert not rollout._watching
    return count


def test_tokens_that_come_are_progress_and_a_scheduler_that_hangs_makes_none(monkeypatch: pytest.MonkeyPatch):
    assert noted(monkeypatch, [(10, 4)], [(50, 4)], [(90, 3)]) == 2
    assert noted(monkeypatch, [(10, 4)], [(10, 4)], [(10, 4)]) == 0
    assert noted(monkeypatch, [(10, 4)], EnginehouseError("no such path"), [(90, 4)]) == 0, "an older server"
