"""Stages a new weight version in this host's memory and has SGLang load all of it or nothing.

SGLang itself changes weights in place, and an exception while it does so ends its server. A server that a worker
started therefore loads a version from this host's memory by code that raises nothing (`loader.py`); a server that ran
already gets the bytes. In both cases this worker keeps the served version, and has it loaded again if the new one
fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.weights import WeightState, WeightSyncError
from enginehouse.errors import EnginehouseError
from enginehouse.weights.buckets import group_by_bytes
from enginehouse.weights.reports import Reports
from enginehouse.weights.staged_source import StagedSource
from enginehouse.weights.staging import StagedWeights, Version
from enginehouse_sglang.http import HTTPStatusError
from enginehouse_sglang.labels import Labels
from enginehouse_sglang.loader import LOADER, build_order
from enginehouse_sglang.server import SGLangServer

SENT_BYTES = 64 << 20
"""Bytes of weights in one request to a server that ran already."""


class SGLangWeights(StagedWeights):
    """Keeps two versions in this host's memory: the staged version and the served version.

    Attributes:
        keeps_cache: True if running rows keep their keys and values at the next switch. Later rows do not find these,
            because they name another version as their `extra_key`.
        adapter_settings: settings of the adapter, as SGLang reads them, if updates bring one.
    """

    def __init__(self, spec: ModelSpec, where: str, labels: Labels, reads_back: bool = True):
        super().__init__(spec, where)
        self._labels = labels
        self._reads_back = reads_back
        self.keeps_cache = False
        self.adapter_settings: Mapping[str, Any] | None = None
        self._reports: Reports | None = None

    async def state(self, server: SGLangServer) -> WeightState:
        """Return the version that SGLang says it serves, or None if it has no weights.

        Checksums are of the parameters that each of SGLang's processes found in its model after the load. There are
        none for a server that this worker did not start.

        Raises:
            WeightSyncError: The version did not come from this replica: another client changes this server.
        """
        async with self.switching:
            if self.is_lost:
                return WeightState(None)
            label = (await server.model())["weight_version"]
            try:
                return self.state_of(self._labels.number(label))
            except EnginehouseError as error:
                raise WeightSyncError(str(error)) from error

    async def commit(self, server: SGLangServer, ranks: int, version: int) -> None:
        """Have SGLang load what was staged and serve it as `version`; see `serve`."""
        await self.serve(version, partial(self._load, server, ranks))

    async def give_first(self, server: SGLangServer, ranks: int) -> None:
        """Send the weights of the model's directory as version 0; raises `WeightSyncError` if SGLang rejects them."""
        with suppress(HTTPStatusError):  # mostly there is no open update: only a run that died during one leaves it
            await server.end_update()
        await self._load(server, ranks, 0, None)

    async def _load(self, server: SGLangServer, ranks: int, version: int, staged: Version | None) -> None:
        """Load a version, and note what was read back of it; without one, load version 0. Drop keys and values of older
        weights, unless they are kept. Raises `WeightSyncError` if the version was not loaded, or only in part."""
        source = self.source_of(staged)
        read: list[Any] = []
        try:
            await server.begin_update()
            try:
                if server.process is not None:
                    read = await self._order(server, ranks, source, version)
                else:
                    await _send(server, ranks, source, self._labels.label(version), self.keeps_cache)
            finally:
                await server.end_update()
            if self._reports is not None and staged is not None:
                if self.adapter is None:
                    read = self._reports.check(self._where, f"read back weight version {version}")
                staged.note_read(read)
        except (HTTPStatusError, OSError) as error:
            raise WeightSyncError(f"{self._where}: sglang could not load weight version {version}: {error}") from error

    async def _order(self, server: SGLangServer, ranks: int, source: dict[str, Any], version: int) -> list[Any]:
        """Have each process load a version from this host's memory, and return what it reports."""
        if self._reports is None:
            self._reports = Reports(ranks, "sglang")
        self._reports.clear()
        order = build_order(source, self._reports.path, self._reads_back, self.adapter_settings)
        await server.load(order, ranks, LOADER, self._labels.label(version), self.keeps_cache)
        reports = self._reports.check(self._where, f"load weight version {version}")
        self._reports.clear()  # for the report at the end of the update
        return reports


async def _send(server: SGLangServer, ranks: int, source: dict[str, Any], label: str, keeps_cache: bool) -> None:
    staged = StagedSource(source.get("parameters", ()), source.get("directory", ""))
    parts = _split(staged)
    with staged.checked():
        part = next(parts, [])
        while part:
            after = next(parts, [])
            await server.load(part, ranks, None, None if after else label, keeps_cache)
            part = after
    staged.close()


def _split(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield weights in parts, as copies, because a tensor is sent with all the memory it is a view of."""
    for part in group_by_bytes(weights, lambda weight: weight[1].nbytes, SENT_BYTES):
        yield [(name, tensor.clone()) for name, tensor in part]
