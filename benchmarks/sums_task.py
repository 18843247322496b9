"""The reward of `benchmarks.real`, for every side. It imports no enginehouse, which TRL's environment does not have."""

from __future__ import annotations

import re


def right_sum(response: str, answer: str, **columns: object) -> float:
    """Return 1.0 if the last number of a response is the answer, else 0.0.

    >>> right_sum("3 + 4 = 7, so", "7"), right_sum("7 or 8", "7"), right_sum("seven", "7")
    (1.0, 0.0, 0.0)
    """
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))
