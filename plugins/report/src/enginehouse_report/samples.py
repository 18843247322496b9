"""What the model said, as a page shows it: a line a row for its table, and whole rows with their tokens for some."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.jsontext import decode_json
from enginehouse_report.columns import number, significant

NAME = re.compile(r"(step|validation)-(\d{1,9})\.jsonl")
KINDS = ("step", "validation")
MOST_ROWS = 100_000
"""Rows of the table; of more, the newest files'."""
PROMPT_HEAD, PROMPT_TAIL, RESPONSE_HEAD = 40, 80, 160
"""Characters of a prompt's beginning and end (a chat begins alike for all), and of a response's beginning."""
TOKEN_DIGITS = 4
BEST_AND_WORST = 4
"""So many of the best and of the worst rows of each file come before all others."""
PER_TOKEN = ("mask", "logprob", "advantage", "version")

_BY_TOKEN = b', "by_token": {'
_KEY, _BEHIND, _LAST = b', "', b']}, "', b"]}}"
_NUMBERS = {"tokens": "tokens", "episode": "episode", "segment": "segment", "group": "group", "task": "task"}


class Place(NamedTuple):
    """Where a row stands."""

    file: Path
    offset: int
    length: int


class SampleTable:
    """The rows of a run's `samples/`, as far as a table shows them.

    Attributes:
        columns: of each name its values, None where a row has none: `kind` (of `KINDS`), `step`, `line`, `reward`,
            `finish`, `prompt`, `response`, ..., and `reward/NAME`.
        places: where each row stands.
        damaged: lines that hold no row.
        unread: files that there was no time or no room for, oldest first.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.places: list[Place] = []
        self.damaged = 0
        self.unread: list[str] = []

    def add(self, file: Path) -> None:
        """Take in the rows of a file, as far as it is there and whole."""
        named = NAME.fullmatch(file.name)
        if named is None:
            return
        kind, step, offset = KINDS.index(named[1]), int(named[2]), 0
        try:
            lines = file.read_bytes().split(b"\n")[:-1]
        except OSError:  # deleted meanwhile, by a run that was resumed
            return
        for number_, line in enumerate(lines, start=1):
            row = _row_without_tokens(line)
            if row is None:
                self.damaged += 1
            else:
                place = Place(file, offset, len(line))
                self._append(place, {"kind": kind, "step": step, "line": number_, **_shown(row)})
            offset += len(line) + 1

    def _append(self, place: Place, row: Mapping[str, Any]) -> None:
        for name in row.keys() - self.columns.keys():
            self.columns[name] = [None] * len(self.places)
        for name, values in self.columns.items():
            values.append(row.get(name))
        self.places.append(place)

    def part(self, begin: int = 0) -> dict[str, Any]:
        """The rows from one on, for a page."""
        return {
            "rows": len(self.places) - begin,
            "columns": {name: values[begin:] for name, values in self.columns.items()},
            "damaged": self.damaged,
            "unread": self.unread,
        }


def sample_files(directory: Path) -> list[Path]:
    """The files of a run's samples, by step."""
    named = [(match, path) for path in (directory / "samples").glob("*.jsonl") if (match := NAME.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda one: (int(one[0][2]), one[0][1]))]


def read_samples(directory: Path, seconds: float | None = None, most: int = MOST_ROWS) -> SampleTable:
    """The table of a run, of its newest files first: what there is no time or no room for is in `unread`.

    Args:
        directory: the run's.
        seconds: for so long; the newest file is read in any case.
        most: rows.
    """
    table, until = SampleTable(), None if seconds is None else time.monotonic() + seconds
    files = sample_files(directory)
    for file in reversed(files):
        late = until is not None and time.monotonic() > until
        if table.places and (late or len(table.places) >= most):
            table.unread.append(file.name)
        else:
            table.add(file)
    table.unread.reverse()
    return table


def in_order_of_worth(table: SampleTable) -> list[int]:
    """The rows whose tokens shall be in a page, the first first: the best and the worst of each file, of the newest
    first, then all others."""
    rewards = table.columns.get("reward", [])
    first, then = [], []
    for _, group in itertools.groupby(range(len(table.places)), key=lambda index: table.places[index].file):
        ranked = sorted(group, key=lambda index: (rewards[index] is not None, rewards[index] or 0.0))
        best_and_worst = [*ranked[:BEST_AND_WORST], *ranked[BEST_AND_WORST:][-BEST_AND_WORST:]]
        first += best_and_worst
        then += sorted(set(ranked) - set(best_and_worst))
    return first + then


def whole_row(place: Place) -> dict[str, Any] | None:
    """A row with all it has, its figures of tokens checked and rounded; None if it is there no more."""
    try:
        with place.file.open("rb") as file:
            file.seek(place.offset)
            row = decode_json(file.read(place.length))
    except (OSError, ValueError):
        return None
    if not isinstance(row, dict):
        return None
    tokens = tokens_of(row.pop("by_token", None))
    return row if tokens is None else {**row, "by_token": tokens}


def tokens_of(found: Any) -> dict[str, list[Any]] | None:
    """The figures of a row's tokens as a page has them: only what is whole; None where there are none."""
    texts = found.get("text") if isinstance(found, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    tokens: dict[str, list[Any]] = {"text": texts}
    for name in PER_TOKEN:
        values = found.get(name)
        if isinstance(values, list) and len(values) == len(texts):
            tokens[name] = [
                None if (one := number(value)) is None else significant(one, TOKEN_DIGITS) for value in values
            ]
    return tokens


def _row_without_tokens(line: bytes) -> dict[str, Any] | None:
    """A line's row, without the figures of its tokens, which are most of a line: they are not read.

    In a JSON text no quote stands unescaped within a string, so `_BY_TOKEN` is found where it is a key, or nowhere.
    What is cut out wrongly is no JSON any more, and the whole line is read then.
    """
    head, found, rest = line.partition(_BY_TOKEN)
    _, more, tail = rest.rpartition(_BEHIND)
    cut = [] if not found else [head + b"}"] if rest.endswith(_LAST) else [head + _KEY + tail] if more else []
    for text in [*cut, line]:
        try:
            row = decode_json(text)
        except ValueError:
            continue
        return row if isinstance(row, dict) else None
    return None


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the table has of a row."""
    shown: dict[str, Any] = {
        "prompt": _prompt_head(_text(row.get("prompt"))),
        "response": _text(row.get("response"))[:RESPONSE_HEAD],
    }
    for name, key in _NUMBERS.items():
        if (value := number(row.get(key))) is not None:
            shown[name] = value
    for key, value in row.items():
        if (key == "reward" or key.startswith("reward/")) and (one := number(value)) is not None:
            shown[key] = significant(one)
    if isinstance(row.get("finish_reason"), str):
        shown["finish"] = row["finish_reason"]
    if row.get("reward_failure"):
        shown["failure"] = _text(row["reward_failure"])[:RESPONSE_HEAD]
    if isinstance(row.get("turns"), list):
        shown["turns"] = len(row["turns"])
    return shown


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _prompt_head(text: str) -> str:
    if len(text) <= PROMPT_HEAD + PROMPT_TAIL:
        return text
    return f"{text[:PROMPT_HEAD]} … {text[-PROMPT_TAIL:]}"


def chosen(table: SampleTable) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a table with all they have, as `in_order_of_worth`; those that are gone are left out."""
    for index in in_order_of_worth(table):
        if (row := whole_row(table.places[index])) is not None:
            yield index, row
