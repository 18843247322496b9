"""Decodes JSON from files and messages that may be damaged."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["decode_json"]


def decode_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if the text is not JSON, or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"the JSON is nested too deeply: {error}") from error
