"""The simplest verifiable reward: the response is the answer, or it is not."""

from __future__ import annotations


def exact_match(prompt: str, response: str, *, answer: str, **columns: object) -> float:
    """Return 1.0 if the response equals the data set's `answer` column, white space at the ends aside, else 0.0."""
    return float(response.strip() == answer.strip())
