"""Compares mathematical answers in LaTeX by math-verify: `\\frac{1}{2}` is `0.5`, `x \\in (1, 2)` is `(1, 2)`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ConfigError
from enginehouse.plugin import checked_reward
from enginehouse_rewards.builtin.numeric import find_boxed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIMEOUT_SECONDS = 5
"""Time limit for parsing one text, and for comparing two expressions."""


def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
    """Raise `ConfigError` if math-verify is not installed."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the reward 'math' needs math-verify: pip install 'enginehouse[math]' ({type(error).__name__}: {error})"
        ) from error


@checked_reward(check)
def math(response: str, *, answer: str | float) -> dict[str, Any]:
    """Return 1.0 if the response's last answer, in LaTeX or plain, equals the data set's `answer` column, else 0.0.

    An answer that takes longer to parse or to compare counts as wrong.
    """
    from math_verify import parse, verify

    # math-verify keeps time by SIGALRM, which only a main thread may use; elsewhere the caller keeps time.
    seconds = TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
    text = str(answer)
    if "\\boxed" not in text and "$" not in text:
        text = f"\\boxed{{{text}}}"
    expected = parse(text, parsing_timeout=seconds)
    last = find_boxed(response)  # math-verify would read several boxes as a set
    parsed = parse(response if last is None else f"\\boxed{{{last}}}", parsing_timeout=seconds)
    right = float(verify(expected, parsed, timeout_seconds=seconds))
    return {"reward": right, "answer": str(parsed[0]) if parsed else ""}
