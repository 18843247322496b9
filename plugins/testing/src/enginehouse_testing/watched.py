"""A reward that watches another at work. Light: it is imported in processes of a reward pool."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from enginehouse.plugin.records import is_batched, keywords, resolve


def printed_bytes(*, watched: str, watched_arguments: Mapping[str, Any], **row: Any) -> float:
    """How many bytes a reward prints for a row, to the standard output or error, which are one file there.

    Args:
        watched: `"module:function"`.
        watched_arguments: of it.
        row: as it gets them.
    """
    function = resolve(watched)
    taken = keywords(function)
    given = {name: value for name, value in row.items() if taken is None or name in taken}
    if is_batched(function):
        given = {name: [value] for name, value in given.items()}
    before = os.fstat(1).st_size
    returned = function(**given, **watched_arguments)
    if inspect.isawaitable(returned):
        asyncio.run(_awaited(returned))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    return float(os.fstat(1).st_size - before)


async def _awaited(returned: Any) -> Any:
    return await returned
