"""A reward that measures how much another reward prints. It imports little, because pool processes import it."""

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
    """Return the bytes that a reward prints for a row. Standard output and error are one file in this process.

    Args:
        watched: the reward, as `"module:function"`.
        watched_arguments: arguments of the reward.
        row: columns of the row.
    """
    function = resolve(watched)
    accepted = keywords(function)
    columns = {name: value for name, value in row.items() if accepted is None or name in accepted}
    if is_batched(function):
        columns = {name: [value] for name, value in columns.items()}
    before = os.fstat(1).st_size
    returned = function(**columns, **watched_arguments)
    if inspect.isawaitable(returned):
        asyncio.run(_await(returned))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    return float(os.fstat(1).st_size - before)


async def _await(returned: Any) -> Any:
    return await returned
