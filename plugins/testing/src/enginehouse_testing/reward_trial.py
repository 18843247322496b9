"""Calls a reward under test in a process of a reward pool, as a run does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginehouse.errors import UserError
from enginehouse.plugin import Reward, resolve
from enginehouse.plugin.records import keywords
from enginehouse_rewards.pool import RewardPool
from enginehouse_rewards.program import RowScore
from enginehouse_testing.given import Given
from enginehouse_testing.trial import Trial

Row = Mapping[str, Any]

RESPONSES = ("4", "The answer is 5.", "<think>2 + 2</think> 4", "\\boxed{\\frac{8}{2}}", "four\n#### 4", "7 7 7")
"""Responses that a model may give to the made-up prompt."""

ODD: Mapping[str, str] = {
    "nothing": "",
    "white space": " \n\t ",
    "a null character": "4\x00",
    "other alphabets": "答えは四です 🙂 الجواب ٤",
    "a replacement character": "4\ufffd",
    "braces that do not close": "\\boxed{\\frac{1}{",
    "a number beyond all bounds": "1e999999",
    "a division by zero": "\\boxed{1/0}",
    "not a number": "nan",
    "a line that never ends": "4" * 20_000,
    "the same word again and again": "and so on " * 2_000,
    "a program that is none": "```python\ndef (:\n```",
}
"""Responses of models that are not trained well yet, by what is odd about them."""

GIVEN_BY_THE_RUN = ("prompt", "messages", "response", "response_tokens", "finish_reason")


@dataclass(frozen=True, slots=True)
class RewardTrial(Trial):
    """Scores rows of data.

    Attributes:
        pool: scores rows. A row without a score has the reason instead.
        watching: scores rows by the number of bytes that the reward prints.
    """

    record: Reward
    pool: RewardPool
    watching: RewardPool

    def rows(self) -> list[dict[str, Any]]:
        """Return the author's rows, or made-up rows, with the columns that a run adds."""
        examples = self.given.examples or made_up()
        return [complete({name: value for name, value in example.items() if name != "reward"}) for example in examples]

    def scores(self, rows: Sequence[Row]) -> list[RowScore]:
        """Return the score of each row; all rows are sent at once."""
        return self.pool.score(rows)

    def odd_rows(self) -> dict[str, dict[str, Any]]:
        """Return a copy of the first row for each of the odd responses (`ODD`), which replaces the row's response."""
        first = self.rows()[0]
        return {what: complete({**first, "response": text, "response_tokens": None}) for what, text in ODD.items()}


def made_up() -> list[dict[str, Any]]:
    """Return rows with an answer, for a reward whose author gives no examples."""
    return [{"prompt": "What is 2 + 2?", "answer": "4", "response": response} for response in RESPONSES]


def complete(row: Row) -> dict[str, Any]:
    """Return a row with all columns that a run adds to it."""
    response = str(row.get("response", ""))
    tokens = row.get("response_tokens") or len(response.split())
    added = {"prompt": "", "messages": None, "finish_reason": "stop"}
    return {**added, **row, "response": response, "response_tokens": tokens}


def pool_of(function: str, arguments: Mapping[str, Any], seconds: float) -> RewardPool:
    """Return a pool of one process, like the pool of a run, except that it continues even if no row gets a score."""
    return RewardPool(
        function, arguments, timeout_seconds=seconds, on_error="zero", max_failures=1.0, python_path=sys.path
    )


def check_examples(record: Reward, given: Given) -> None:
    """Raise `UserError` if the rows lack a column that the reward needs."""
    function = resolve(record.function)
    if keywords(function) is None:
        return
    columns = {*GIVEN_BY_THE_RUN, *given.arguments}.union(*(given.examples or made_up()))
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in columns]
    if needed:
        named = ", ".join(map(repr, needed))
        raise UserError(
            f"reward {record.name!r} takes {named}, which is neither among its arguments nor in the examples; give "
            f'examples = [{{"prompt": ..., "response": ..., {needed[0]!r}: ...}}], or --examples FILE.jsonl'
        )
