"""Reads preferences: pairs of responses of which one is better, or single responses that are rated good or bad.

The formats are the same as in TRL. A pair has a prompt and two responses, as strings or chat messages. Without a column
of prompts, both responses begin with the prompt, which is the part that they share. If the column of prompts has the
prompt as plain text, and the responses are chats, both chats may begin with the prompt too. A rated response has a
prompt and a label. This module does not import torch, because `plan` uses this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginehouse.data.messages import read_text_or_chat
from enginehouse_rl.data.files import RowProblems, Table, check_file, open_table
from enginehouse_rl.data.rendering import Counted, Renderer, Response, Where, skip_counting

FIGURES = {"margin": "a number", "label": "true or false"}
"""Required values in a column of margins or labels, for messages."""


@dataclass(frozen=True, slots=True)
class PreferenceColumns:
    """The columns of a file of preferences.

    Attributes:
        responses: the columns of the better and the worse response, or of the only response.
        figure: the kind of the additional value of each row, `"margin"` or `"label"`; empty: there is no such value.
        figure_column: the column of this value.
        tools: the column of the tools that the model may call; empty: there is none.
    """

    prompt: str
    responses: tuple[str, ...]
    figure: str = ""
    figure_column: str = ""
    tools: str = ""


class PreferenceTable:
    """The rows of files of preferences, before they are tokenized.

    Args:
        seconds: the time limit for reading, as for `open_table`.

    Attributes:
        has_prompts: true if there is a column of prompts.

    Raises:
        DataError: a file, a row or a column is wrong.
    """

    def __init__(
        self, path: str | Path | Sequence[str | Path], columns: PreferenceColumns, seconds: float | None = None
    ):
        self.columns = columns
        first = path if isinstance(path, str | Path) else path[0]
        self.has_prompts = len(columns.responses) == 1 or columns.prompt in check_file(Path(first), columns.responses)
        prompt, figure = columns.prompt if self.has_prompts else None, columns.figure_column if columns.figure else None
        self.table: Table = open_table(path, [prompt, *columns.responses, figure, columns.tools or None], seconds)
        if not self.has_prompts:
            problems = RowProblems()
            for shape in self.table.shapes():
                if columns.prompt in shape.columns:
                    problems.add(
                        f"{self.table.where(shape.first)} has a column {columns.prompt!r}, but the first row has none: "
                        "either all rows must have this column, or no row, with both responses beginning with the "
                        "prompt"
                    )
            problems.raise_any()

    def __len__(self) -> int:
        return len(self.table)

    def texts(self, row: int) -> tuple[Any, ...]:
        """Return the prompt of a row, if there is a column of prompts, and its responses, unchanged from the file."""
        names = [self.columns.prompt, *self.columns.responses] if self.has_prompts else self.columns.responses
        return tuple(self.table.needed[name][row] for name in names)

    def tokenize(
        self, renderer: Renderer, rows: Sequence[int], problems: RowProblems, counted: Counted = skip_counting
    ) -> tuple[list[np.ndarray], list[list[Response]]]:
        """Tokenize some rows.

        Returns:
            The token ids of each prompt, and the responses of each column. In a row with a problem, responses are
            empty.
        """
        needed = self.table.needed

        def where(index: int) -> str:
            return self.table.where(rows[index])

        responses = [[needed[name][row] for row in rows] for name in self.columns.responses]
        if self.has_prompts:
            prompts = [needed[self.columns.prompt][row] for row in rows]
            for index, pair in enumerate(zip(*responses, strict=True)):
                split = _split_repeated(read_text_or_chat(prompts[index]), list(map(read_text_or_chat, pair)))
                if split is not None:
                    prompts[index], *parts = split
                    for column, part in zip(responses, parts, strict=True):
                        column[index] = part
        else:
            prompts, responses = self._split_prompts(responses, where, problems)
        tools = [needed[self.columns.tools][row] for row in rows] if self.columns.tools else None
        rendered = renderer.render_prompts(prompts, where, counted, problems, tools)
        completions = [
            renderer.render_completions(prompts, rendered, column, name, where, problems, tools)
            for name, column in zip(self.columns.responses, responses, strict=True)
        ]
        return rendered[1], completions

    def _split_prompts(
        self, responses: list[list[Any]], where: Where, problems: RowProblems
    ) -> tuple[list[Any], list[list[Any]]]:
        """Return the prompts with which the responses begin, and the rest of the responses."""
        prompts: list[Any] = []
        remaining: list[list[Any]] = [[] for _ in responses]
        for index, pair in enumerate(zip(*responses, strict=True)):
            prompt, *parts = _split_shared(*map(read_text_or_chat, pair))
            if not prompt or not any(parts):
                fault = "have no common beginning, which would be the prompt" if not prompt else "are equal"
                problems.add(
                    f"{where(index)}: there is no prompt (column {self.columns.prompt!r}), and columns "
                    f"{' and '.join(map(repr, self.columns.responses))} {fault}"
                )
                prompt, parts = "-", ["-"] * len(parts)
            prompts.append(prompt)
            for column, part in zip(remaining, parts, strict=True):
                column.append(part)
        return prompts, remaining

    def check_figures(self, problems: RowProblems) -> list[Any]:
        """Check and return each row's margin or label; empty if the columns have neither."""
        columns = self.columns
        values = self.table.needed[columns.figure_column] if columns.figure else []
        kinds = (bool,) if columns.figure == "label" else (int, float)
        for row, value in enumerate(values):
            if type(value) not in kinds or not math.isfinite(value):
                problems.add(
                    f"{self.table.where(row)}: column {columns.figure_column!r} is {value!r}, "
                    f"expected {FIGURES[columns.figure]}"
                )
        return values


def _split_shared(first: Any, second: Any) -> tuple[Any, Any, Any]:
    """Return the prompt with which two responses begin, and the rest of each. A space between prompt and rest belongs
    to the rest."""
    if type(first) is not type(second) or not isinstance(first, str | list):
        return "", first, second
    length = next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
    if isinstance(first, str) and length and first[length - 1] == " ":
        length -= 1
    return first[:length], first[length:], second[length:]


def _split_repeated(prompt: Any, pair: Sequence[Any]) -> tuple[Any, Any, Any] | None:
    """Split two chats that both begin with the text `prompt` (UltraFeedback); None for other data."""
    if not isinstance(prompt, str) or len(pair) != 2 or not all(isinstance(response, list) for response in pair):
        return None
    shared, *parts = _split_shared(*pair)
    last = shared[-1] if shared else None
    return (shared, *parts) if last == {"role": "user", "content": prompt} else None
