"""Reads a run's samples for a page: a table of all rows, and some whole rows with their tokens."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.jsontext import decode_json
from enginehouse_report.columns import number, round_significant

NAME = re.compile(r"(step|validation)-(\d{1,9})\.jsonl")
KINDS = ("step", "validation")
MOST_ROWS = 100_000
"""Maximum number of rows of the table. The newest files are read first."""
PROMPT_HEAD, PROMPT_TAIL, RESPONSE_HEAD = 40, 80, 160
"""Number of characters of a prompt's beginning and end, since all chats begin alike, and of a response's beginning."""
TOKEN_DIGITS = 4
BEST_AND_WORST = 4
"""Number of the best and of the worst rows of each file that are ranked before all others."""
PER_TOKEN = ("mask", "logprob", "advantage", "version")

_BY_TOKEN = b', "by_token": {'
_KEY, _BEHIND, _LAST = b', "', b']}, "', b"]}}"
_NUMBERS = {"tokens": "tokens", "episode": "episode", "segment": "segment", "group": "group", "task": "task"}


class RowPosition(NamedTuple):
    """The position of a row in its file, in bytes."""

    file: Path
    offset: int
    length: int


class SampleTable:
    """The table of the rows in a run's `samples/`."""

    def __init__(self) -> None:
        # by name the values, None where a row has none: `kind` (an index of `KINDS`), `step`, `line`, `reward`, ...
        self.columns: dict[str, list[Any]] = {}
        self.places: list[RowPosition] = []
        self.damaged = 0  # lines that hold no row
        self.unread: list[str] = []  # files that were left out, the oldest first

    def add(self, file: Path) -> None:
        """Add the complete rows of a file."""
        match = NAME.fullmatch(file.name)
        if match is None:
            return
        kind, step, offset = KINDS.index(match[1]), int(match[2]), 0
        try:
            lines = file.read_bytes().split(b"\n")[:-1]
        except OSError:  # deleted meanwhile, by a run that was resumed
            return
        for number_, line in enumerate(lines, start=1):
            row = _row_without_tokens(line)
            if row is None:
                self.damaged += 1
            else:
                place = RowPosition(file, offset, len(line))
                self._append(place, {"kind": kind, "step": step, "line": number_, **_table_row(row)})
            offset += len(line) + 1

    def _append(self, place: RowPosition, row: Mapping[str, Any]) -> None:
        for name in row.keys() - self.columns.keys():
            self.columns[name] = [None] * len(self.places)
        for name, values in self.columns.items():
            values.append(row.get(name))
        self.places.append(place)

    def part(self, begin: int = 0) -> dict[str, Any]:
        """Return the rows from an index on, for a page."""
        return {
            "rows": len(self.places) - begin,
            "columns": {name: values[begin:] for name, values in self.columns.items()},
            "damaged": self.damaged,
            "unread": self.unread,
        }


def sample_files(directory: Path) -> list[Path]:
    """Return the files of a run's samples, sorted by step."""
    paths = [(match, path) for path in (directory / "samples").glob("*.jsonl") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(paths, key=lambda item: (int(item[0][2]), item[0][1]))]


def read_samples(directory: Path, seconds: float | None = None, most: int = MOST_ROWS) -> SampleTable:
    """Read the table of a run directory, the newest files first, until `seconds` or `most` rows are exceeded.

    The newest file is always read. `unread` names the files that were not read.
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


def rank_rows(table: SampleTable) -> list[int]:
    """Rank rows for a page: the best and the worst of each file, the newest file first, then all others."""
    rewards = table.columns.get("reward", [])
    first, then = [], []
    for _, group in itertools.groupby(range(len(table.places)), key=lambda index: table.places[index].file):
        ranked = sorted(group, key=lambda index: (rewards[index] is not None, rewards[index] or 0.0))
        best_and_worst = [*ranked[:BEST_AND_WORST], *ranked[BEST_AND_WORST:][-BEST_AND_WORST:]]
        first += best_and_worst
        then += sorted(set(ranked) - set(best_and_worst))
    return first + then


def whole_row(place: RowPosition) -> dict[str, Any] | None:
    """Return a row with the values of its tokens checked and rounded, or None if the file no longer has it."""
    try:
        with place.file.open("rb") as file:
            file.seek(place.offset)
            row = decode_json(file.read(place.length))
    except (OSError, ValueError):
        return None
    if not isinstance(row, dict):
        return None
    tokens = read_tokens(row.pop("by_token", None))
    return row if tokens is None else {**row, "by_token": tokens}


def read_tokens(by_token: Any) -> dict[str, list[Any]] | None:
    """Return the complete columns of a row's tokens, or None if the row has none."""
    texts = by_token.get("text") if isinstance(by_token, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    tokens: dict[str, list[Any]] = {"text": texts}
    for name in PER_TOKEN:
        values = by_token.get(name)
        if isinstance(values, list) and len(values) == len(texts):
            numbers = map(number, values)
            tokens[name] = [None if value is None else round_significant(value, TOKEN_DIGITS) for value in numbers]
    return tokens


def _row_without_tokens(line: bytes) -> dict[str, Any] | None:
    """Read a line's row without parsing the values of its tokens, which are most of the line.

    JSON escapes quotes in strings, so `_BY_TOKEN` matches only the key. If the cut is wrong, the JSON is invalid, and
    the whole line is parsed.
    """
    head, key, body = line.partition(_BY_TOKEN)
    _, more, tail = body.rpartition(_BEHIND)
    cut = [] if not key else [head + _KEY + tail] if more else [head + b"}"] if body.endswith(_LAST) else []
    for text in [*cut, line]:
        try:
            row = decode_json(text)
        except ValueError:
            continue
        return row if isinstance(row, dict) else None
    return None


def _table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row that the table shows."""
    shown: dict[str, Any] = {
        "prompt": _prompt_head(_text(row.get("prompt"))),
        "response": _text(row.get("response"))[:RESPONSE_HEAD],
    }
    for name, key in _NUMBERS.items():
        if (value := number(row.get(key))) is not None:
            shown[name] = value
    for key, value in row.items():
        if (key == "reward" or key.startswith("reward/")) and (figure := number(value)) is not None:
            shown[key] = round_significant(figure)
    for key in ("reference", "answer"):
        if row.get(key) is not None:
            shown[key] = _text(row[key])[:RESPONSE_HEAD]
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


def whole_rows(table: SampleTable) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield whole rows of a table in the order of `rank_rows`, except rows that no longer exist."""
    for index in rank_rows(table):
        if (row := whole_row(table.places[index])) is not None:
            yield index, row
