"""Reports of an engine's own processes to their worker, about steps of a weight update.

They use shared memory, because an exception may end the engine's process, or leave answers of other ranks unread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from enginehouse.engines.weights import WeightSyncError
from enginehouse.weights.host_memory import AnonymousMemory

log = logging.getLogger(__name__)

LABEL = "enginehouse-reports"
PAGE = 1 << 22
"""Size in bytes of the page of a rank, enough to report on 40,000 parameters."""

MOST_ERROR = 2048
"""Maximum number of characters of an error."""

_LENGTH = 4


class Reports:
    """The worker's side of the reports: shared memory with a page for each rank of the engine."""

    def __init__(self, ranks: int, engine: str):
        self._pages = AnonymousMemory.create(LABEL, ranks * PAGE, f"for the reports of {engine}'s processes")
        self._engine = engine
        self._ranks = ranks
        self.path = self._pages.path

    def clear(self) -> None:
        for rank in range(self._ranks):
            self._pages.memory[rank * PAGE : rank * PAGE + _LENGTH] = bytes(_LENGTH)

    def check(self, where: str, doing: str) -> list[Any]:
        """Return what the work of each rank has returned. Raises `WeightSyncError` if a rank failed, or reported
        nothing."""
        results = []
        for rank in range(self._ranks):
            begin = rank * PAGE
            length = int.from_bytes(self._pages.memory[begin : begin + _LENGTH], "little")
            sender = f"{where}: {self._engine}" + (f" rank {rank}" if self._ranks > 1 else "")
            if not length:
                raise WeightSyncError(f"{sender} did not {doing}: it reported nothing")
            report = json.loads(self._pages.memory[begin + _LENGTH : begin + _LENGTH + length])
            if "error" in report:
                raise WeightSyncError(f"{sender} could not {doing}: {report['error']}", report["parameters"])
            results.append(report["result"])
        return results


class Reporter:
    """The side of one rank, which opens the memory at the `path` of `Reports`."""

    def __init__(self, path: str, rank: int):
        self._memory = AnonymousMemory.attach(path, LABEL).memory
        self._begin = rank * PAGE

    def run(self, work: Callable[[], Any]) -> bool:
        """Call `work`, and report its error or its result: plain data, or None if it is too long. Return True if `work`
        succeeded."""
        try:
            report = {"result": work()}
        except Exception as error:
            kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
            names = list(getattr(error, "parameters", ()))[:20]
            report = {"error": f"{kind}{error}"[:MOST_ERROR], "parameters": [name[:256] for name in names]}
        text = json.dumps(report).encode()
        if len(text) > PAGE - _LENGTH:
            log.warning("a report of %d bytes is too long: nothing counts as read back", len(text))
            text = json.dumps({"result": None}).encode()
        begin = self._begin + _LENGTH
        self._memory[begin : begin + len(text)] = text
        self._memory[self._begin : begin] = len(text).to_bytes(_LENGTH, "little")
        return "error" not in report
