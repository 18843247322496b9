"""The last number of a response against the answer's, as for GSM8K: what is compared is the value, not how it is
written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

from pydantic import Field

LONGEST_NUMBER = 100
"""Characters; and a power of ten beyond this is none either: exact values of such would fill memory."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\].])[-+])?\$?(?P<value>{_DECIMAL})(?P<power>[eE][-+]?\d+)?"
    rf"(?:\s*/\s*(?P<divisor>{_DECIMAL}))?(?P<percent>\s*%)?"
)
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_MIXED = re.compile(r"(?<![\w.,])(\d+)\s*\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")


class Number(NamedTuple):
    """A number as it is written: of `50%` the value is a half."""

    value: Fraction
    percent: bool


def numeric(response: str, *, answer: str | float, tolerance: Annotated[float, Field(ge=0)] = 1e-6) -> dict[str, Any]:
    """1.0 if the response's number is that of the data set's `answer` column, else 0.0.

    The number is what follows the last `####`; else what the last `\\boxed{}` holds; else the last one of the text.
    `1,234.5`, `1e3`, `3/4`, `\\frac{3}{4}` and `75%` are numbers. Where only one of the two has a percent sign, the
    other may mean percents or not: `50%` is `0.5` and `50`.

    Args:
        tolerance: how far the two may be apart, absolutely.
    """
    given, wanted = number(response), number(str(answer))
    said = "" if given is None else str(given.value)
    if given is None or wanted is None:
        return {"reward": 0.0, "answer": said}
    close = abs(given.value - wanted.value) <= tolerance
    if given.percent != wanted.percent:
        scale = 100 if given.percent else Fraction(1, 100)
        close = close or abs(given.value * scale - wanted.value) <= tolerance
    return {"reward": float(close), "answer": said}


def number(text: str) -> Number | None:
    """The number that a text ends in, as `numeric` says; None: there is none."""
    if "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    elif (inside := boxed(text)) is not None:
        text = inside
    last = None
    for one in _numbers(text):
        last = one
    return last


def boxed(text: str) -> str | None:
    """What the last whole `\\boxed{}` holds."""
    opened: list[int | None] = []  # where the inside of each brace begins, if it is a box's
    inside = None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else None)
        elif opened and (begin := opened.pop()) is not None:
            inside = text[begin : brace.start()]
    return inside


def _numbers(text: str) -> Iterator[Number]:
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"\\[,!;: ]", "", text)
    text = _MIXED.sub(_improper, text)
    text = _FRACTION.sub(r" \1\2\3/\4\5", text)
    for found in _NUMBER.finditer(text):
        power = int(found["power"][1:]) if found["power"] and len(found["power"]) < 10 else found["power"]
        if len(found[0]) > LONGEST_NUMBER or isinstance(power, str) or abs(power or 0) > LONGEST_NUMBER:
            continue
        divisor = _value(found["divisor"]) if found["divisor"] else Fraction(1)
        if not divisor:
            continue
        value = _value(found["value"]) * Fraction(10) ** (power or 0) / divisor
        percent = found["percent"] is not None
        yield Number((-value if found["sign"] == "-" else value) / (100 if percent else 1), percent)


def _improper(mixed: re.Match[str]) -> str:
    """`3\\frac{1}{2}` as a fraction."""
    whole, *parts = mixed.groups(default="")
    above, below = parts[0] or parts[1], parts[2] or parts[3]
    return rf"\frac{{{int(whole) * int(below) + int(above)}}}{{{below}}}"


def _value(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", ""))
