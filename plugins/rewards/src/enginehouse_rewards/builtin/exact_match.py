from __future__ import annotations

from typing import Any


def exact_match(prompt: str, response: str, *, answer: str, **columns: object) -> dict[str, Any]:
    """Return 1.0 if the response equals the data set's `answer` column, ignoring white space at the ends, else 0.0."""
    text = response.strip()
    return {"reward": float(text == answer.strip()), "answer": text}
