"""Compares the last number of a response with the answer's number by value, as for GSM8K."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

from pydantic import Field

LONGEST_NUMBER = 100
"""Maximum number of characters of a number, and largest exponent of ten. Larger exact values would fill the memory."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\].])[-+])?\$?(?P<value>{_DECIMAL})(?P<power>[eE][-+]?\d+)?"
    rf"(?:\s*/\s*(?P<divisor>{_DECIMAL}))?(?P<percent>\s*%)?"
)
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_MIXED = re.compile(r"(?<![\w.,])(\d+)\s*\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")


class Number(NamedTuple):
    """A number in a text; the value of `50%` is a half."""

    value: Fraction
    percent: bool


def numeric(response: str, *, answer: str | float, tolerance: Annotated[float, Field(ge=0)] = 1e-6) -> dict[str, Any]:
    """Return 1.0 if the number in the response equals the number in the data set's `answer` column, else 0.0.

    The number follows the last `####`, else is inside the last `\\boxed{}`, else is the last number of the text.
    `1,234.5`, `1e3`, `3/4`, `\\frac{3}{4}` and `75%` are numbers. If only one of the two numbers has a percent sign,
    the other may mean percents or not: `50%` is `0.5` and `50`.

    Args:
        tolerance: largest absolute difference of the two numbers.
    """
    actual, expected = number(response), number(str(answer))
    if actual is None or expected is None:
        return {"reward": 0.0, "answer": "" if actual is None else str(actual.value)}
    close = abs(actual.value - expected.value) <= tolerance
    if actual.percent != expected.percent:
        scale = 100 if actual.percent else Fraction(1, 100)
        close = close or abs(actual.value * scale - expected.value) <= tolerance
    return {"reward": float(close), "answer": str(actual.value)}


def number(text: str) -> Number | None:
    """Return the last number of a text, as `numeric` describes it, or None."""
    if "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    elif (inside := find_boxed(text)) is not None:
        text = inside
    numbers = list(_find_numbers(text))
    return numbers[-1] if numbers else None


def find_boxed(text: str) -> str | None:
    """Return the inside of the last complete `\\boxed{}`, or None."""
    opened: list[int | None] = []  # start of each open brace's inside, if it is a box's
    inside = None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else None)
        elif opened and (begin := opened.pop()) is not None:
            inside = text[begin : brace.start()]
    return inside


def _find_numbers(text: str) -> Iterator[Number]:
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"\\[,!;: ]", "", text)
    text = _MIXED.sub(_convert_mixed, text)
    text = _FRACTION.sub(r" \1\2\3/\4\5", text)
    for match in _NUMBER.finditer(text):
        power = int(match["power"][1:]) if match["power"] and len(match["power"]) < 10 else match["power"]
        if len(match[0]) > LONGEST_NUMBER or isinstance(power, str) or abs(power or 0) > LONGEST_NUMBER:
            continue
        divisor = _parse_decimal(match["divisor"]) if match["divisor"] else Fraction(1)
        if not divisor:
            continue
        value = _parse_decimal(match["value"]) * Fraction(10) ** (power or 0) / divisor
        percent = match["percent"] is not None
        yield Number((-value if match["sign"] == "-" else value) / (100 if percent else 1), percent)


def _convert_mixed(mixed: re.Match[str]) -> str:
    """Return a mixed number such as `3\\frac{1}{2}` as a fraction."""
    integer, *parts = mixed.groups(default="")
    above, below = parts[0] or parts[1], parts[2] or parts[3]
    return rf"\frac{{{int(integer) * int(below) + int(above)}}}{{{below}}}"


def _parse_decimal(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", ""))
