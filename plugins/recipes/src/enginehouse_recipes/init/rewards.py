"""The reward of a first run: which fit the rows, and the file of one with its test."""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ConfigError, nearest
from enginehouse_recipes.init.rows import NESTED

if TYPE_CHECKING:
    from enginehouse_recipes.init.rows import Rows

REWARD, TEST = "reward.py", "test_reward.py"
TEMPLATES = Path(__file__).parent / "templates"

OWN = "own"
"""The reward that is the user's to write."""
REWARDS = ("numeric", "math", "exact_match")
"""The rewards of core that compare a response with an answer."""
LONG_ANSWER = 120
"""Characters: what is longer is no answer that a response would give word for word."""


def fitting_rewards(rows: Rows) -> dict[str, str]:
    """By reward why it does not fit the rows; empty where it does. The one to begin with is first.

    A reward fits if it finds each answer right, given as the response.
    """
    if rows.answer is None:
        return {OWN: "", **dict.fromkeys(REWARDS, "the data has no column with an answer")}
    texts = [str(one) for one in rows.answers]
    found = {name: _misfit(name, texts) for name in REWARDS}
    found[OWN] = ""
    by_preference = sorted(found, key=lambda name: _preference(name, texts))
    return {name: found[name] for name in sorted(by_preference, key=lambda name: bool(found[name]))}


def _preference(name: str, texts: Sequence[str]) -> int:
    numbers = all("####" in text or re.fullmatch(r"[-+$]?(0|[1-9][\d,]*)(\.\d+)?%?", text.strip()) for text in texts)
    latex = any("\\" in text or "$" in text for text in texts)
    best = "numeric" if numbers else "math" if latex else "exact_match"
    if best == "exact_match" and max(map(len, texts)) > LONG_ANSWER:
        best = OWN
    return (best, *REWARDS, OWN).index(name)


def _misfit(name: str, texts: Sequence[str]) -> str:
    from enginehouse_rl.plan.rows import check_by_its_own

    function = builtin(name)
    try:
        check_by_its_own(function, name, {}, None)
    except ConfigError as error:
        return str(error)
    given = {"prompt": ""} if takes_prompt(function) else {}
    for text in texts[:20] if name == "math" else texts:
        if not function(**given, response=text, answer=text)["reward"]:  # the answer itself is wrong to it
            return f"it finds no answer in {text[:60]!r}, which the data has as one"
    return ""


def builtin(name: str) -> Callable[..., Any]:
    """A reward of core."""
    from enginehouse.plugin import Reward, plugins

    return plugins().function(Reward, name)


def takes_prompt(function: Callable[..., Any]) -> bool:
    """Whether a reward of core has to be given the prompt, of which none makes anything."""
    return "prompt" in inspect.signature(function).parameters


def read_reward(answer: str, rows: Rows) -> str:
    """The reward of an answer.

    Raises:
        ConfigError: there is none of that name, or it does not fit the rows.
    """
    fitting = fitting_rewards(rows)
    answer = answer.strip().lower()
    able = [name for name, why in fitting.items() if not why]
    if answer not in fitting:
        raise ConfigError(
            f"there is no reward {answer!r} to begin with; {nearest(answer, able)}. Others, and several at once: "
            "docs/rewards.md"
        )
    if fitting[answer]:
        raise ConfigError(f"the reward {answer!r} does not fit: {fitting[answer]}. Choices: {', '.join(able)}")
    return answer


def reward_texts(rows: Rows, reward: str) -> dict[str, str]:
    """The reward's file and its test, by name."""
    column = rows.answer
    named = column is not None and column.isidentifier() and not keyword.iskeyword(column)
    named = named and column not in (*vars(builtins), *REWARDS)  # which the function calls
    parameter = column if named else "**columns"
    held = (column if named else f"columns[{column!r}]") if column else ""
    expression = f"{held}[{NESTED[column]!r}]" if column in NESTED else held
    if any(not isinstance(one, str) for one in rows.answers) and reward in ("exact_match", OWN):
        expression = f"str({expression})"
    if reward == OWN:
        given = {
            "parameters": ", ".join(filter(None, ["response", parameter if column else ""])),
            "columns": ", ".join(map(repr, rows.columns)).replace("\\", "").replace('"', "'") or "none",
            "value": f"float({expression} in response)" if column else "float(0 < len(response) <= 200)",
        }
        source = "own_reward.txt"
    else:
        given = {**_of_builtin(reward, expression), "parameter": str(parameter)}
        source = "built_in_reward.txt"
    right = str(rows.answers[0]) if column else "A short response."
    first = {NESTED[column]: rows.answers[0]} if column in NESTED else rows.answers[0] if column else None
    tested = {"columns": repr({column: first} if column else {}), "right": repr(right), "wrong": repr("")}
    return {REWARD: _filled(source, given), TEST: _filled("test_reward.txt", tested)}


def _of_builtin(reward: str, answer: str) -> dict[str, str]:
    function = builtin(reward)
    arguments = ['prompt=""'] * takes_prompt(function) + ["response=response", f"answer={answer}"]
    said = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
    return {
        "module": function.__module__,
        "name": function.__name__,
        "summary": said.replace("the data set's `answer` column", "the answer"),
        "arguments": ", ".join(arguments),
    }


def _filled(template: str, values: Mapping[str, str]) -> str:
    return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
