"""A reward under test: scored where a run scores it, in a process of a reward pool."""

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

Row = Mapping[str, Any]

RESPONSES = ("4", "The answer is 5.", "<think>2 + 2</think> 4", "\\boxed{\\frac{8}{2}}", "four\n#### 4", "7 7 7")
"""What a model may say to the made-up prompt."""

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
"""Responses of models that are not well yet."""

GIVEN_BY_THE_RUN = ("prompt", "messages", "response", "response_tokens", "finish_reason")


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """What an act is given.

    Attributes:
        record: the reward.
        given: its arguments, and rows of data.
        pool: scores rows. A row that gets no score says why.
        watching: scores rows by how many bytes the reward prints.
    """

    record: Reward
    given: Given
    pool: RewardPool
    watching: RewardPool

    def rows(self) -> list[dict[str, Any]]:
        """Rows as a run has them: the author's, or made-up ones."""
        examples = self.given.examples or made_up()
        return [filled({name: value for name, value in one.items() if name != "reward"}) for one in examples]

    def scores(self, rows: Sequence[Row]) -> list[RowScore]:
        """The score of each row, handed in at once."""
        return self.pool.score(rows)

    def odd_rows(self) -> dict[str, dict[str, Any]]:
        """The first row with other responses, by what is odd about each."""
        first = self.rows()[0]
        return {what: filled({**first, "response": text, "response_tokens": None}) for what, text in ODD.items()}


def made_up() -> list[dict[str, Any]]:
    """Rows with an answer, for a reward whose author gives none."""
    return [{"prompt": "What is 2 + 2?", "answer": "4", "response": response} for response in RESPONSES]


def filled(row: Row) -> dict[str, Any]:
    """A row with all that a run adds to it."""
    response = str(row.get("response", ""))
    tokens = row.get("response_tokens") or len(response.split())
    return {
        "prompt": "",
        "messages": None,
        "finish_reason": "stop",
        **row,
        "response": response,
        "response_tokens": tokens,
    }


def pool_of(function: str, arguments: Mapping[str, Any], seconds: float) -> RewardPool:
    """A pool of one process, as a run has it; its rows may all be without a score."""
    return RewardPool(
        function, arguments, timeout_seconds=seconds, on_error="zero", max_failures=1.0, python_path=sys.path
    )


def check_examples(record: Reward, given: Given) -> None:
    """Check that the rows have what the reward takes.

    Raises:
        UserError: it takes a column that they do not have.
    """
    function = resolve(record.function)
    if keywords(function) is None:
        return
    there = {*GIVEN_BY_THE_RUN, *given.arguments}.union(*(given.examples or made_up()))
    parameters = inspect.signature(function).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.name not in there]
    if needed:
        named = ", ".join(map(repr, needed))
        raise UserError(
            f"reward {record.name!r} takes {named}, which is neither among its arguments nor in the examples; give "
            f'examples = [{{"prompt": ..., "response": ..., {needed[0]!r}: ...}}], or --examples FILE.jsonl'
        )
