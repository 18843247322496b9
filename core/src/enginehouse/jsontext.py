"""JSON of files and messages that others may have damaged."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["decode_json"]


def decode_json(text: str | bytes) -> Any:
    """Return what a text says in JSON.

    Raises:
        ValueError: it is none, or too deeply nested for Python to read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"this is nested too deeply: {error}") from error
