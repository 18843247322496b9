"""How an engine's own processes say what came of a step of a weight update, to the worker that ordered it.

In memory that both map, not by raising: an exception in a process of an engine may end it, or leave the answers of its
other ranks unread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from enginehouse.engines.weights import WeightSyncError
from enginehouse.weights.host_memory import AnonymousMemory

LABEL = "enginehouse-reports"
PAGE = 1 << 14
"""Bytes each rank may write."""

_LENGTH = 4


class Reports:
    """The worker's end: a page for each rank.

    Args:
        ranks: how many processes the engine's model is split over.
        engine: its name, for messages.
    """

    def __init__(self, ranks: int, engine: str):
        self._pages = AnonymousMemory.create(LABEL, ranks * PAGE, f"for the reports of {engine}'s processes")
        self._engine = engine
        self._ranks = ranks
        self.path = self._pages.path

    def clear(self) -> None:
        """Expect new ones."""
        for rank in range(self._ranks):
            self._pages.memory[rank * PAGE : rank * PAGE + _LENGTH] = bytes(_LENGTH)

    def check(self, where: str, doing: str) -> None:
        """See that every rank did what it was told.

        Raises:
            WeightSyncError: one failed, or says nothing.
        """
        for rank in range(self._ranks):
            begin = rank * PAGE
            length = int.from_bytes(self._pages.memory[begin : begin + _LENGTH], "little")
            who = f"{where}: {self._engine}" + (f" rank {rank}" if self._ranks > 1 else "")
            if not length:
                raise WeightSyncError(f"{who} did not {doing}: it says nothing")
            said = json.loads(self._pages.memory[begin + _LENGTH : begin + _LENGTH + length])
            if said is not None:
                raise WeightSyncError(f"{who} could not {doing}: {said['error']}", said["parameters"])


class Reporter:
    """A rank's end.

    Args:
        path: that of `Reports`.
        rank: this process's number.
    """

    def __init__(self, path: str, rank: int):
        self._memory = AnonymousMemory.attach(path, LABEL).memory
        self._begin = rank * PAGE

    def of(self, work: Callable[[], Any]) -> bool:
        """Do something and report what came of it; returns whether it was done."""
        try:
            work()
            said = None
        except Exception as error:
            kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
            named = list(getattr(error, "parameters", ()))[:20]
            said = {"error": f"{kind}{error}"[: PAGE // 8], "parameters": [name[:256] for name in named]}
        text = json.dumps(said).encode()
        begin = self._begin + _LENGTH
        self._memory[begin : begin + len(text)] = text
        self._memory[self._begin : begin] = len(text).to_bytes(_LENGTH, "little")
        return said is None
