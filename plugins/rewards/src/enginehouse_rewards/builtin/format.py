from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from enginehouse.errors import ConfigError
from enginehouse.plugin import checked_reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
    """Raise `ConfigError` if `pattern` is not a regular expression."""
    try:
        re.compile(str(arguments.get("pattern", "")))
    except re.error as error:
        raise ConfigError(f"the pattern {arguments['pattern']!r} is no regular expression: {error}") from error


@checked_reward(check)
def format(response: str, *, pattern: str, match: Literal["full", "search"] = "full") -> float:
    """Return 1.0 if the response matches, else 0.0. `.` also matches newlines.

    `reward.timeout_seconds` ends a pattern that takes exponential time, and the row then has no score.

    Args:
        pattern: a Python regular expression.
        match: `full`: the whole response, ignoring white space at its ends; `search`: some part of it.
    """
    compiled = re.compile(pattern, re.DOTALL)
    hit = compiled.fullmatch(response.strip()) if match == "full" else compiled.search(response)
    return float(hit is not None)
