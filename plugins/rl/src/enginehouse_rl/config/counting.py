"""Writes numbers with their nouns, for messages."""


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `"2 processes"`."""
    plural = noun + ("es" if noun.endswith(("s", "tch")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"
