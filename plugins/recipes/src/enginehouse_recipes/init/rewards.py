"""Chooses the reward of a first run, and writes its file and its test."""

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
from enginehouse_recipes.init.prompt_data import NESTED

if TYPE_CHECKING:
    from enginehouse_recipes.init.prompt_data import PromptData

REWARD, TEST = "reward.py", "test_reward.py"
TEMPLATES = Path(__file__).parent / "templates"

OWN = "own"
"""The answer for a reward that the user writes."""
REWARDS = ("numeric", "math", "exact_match")
"""Built-in rewards that compare a response with an answer."""
LONG_ANSWER = 120
"""Number of characters from which on no response can be expected to repeat an answer word for word."""


def fitting_rewards(rows: PromptData) -> dict[str, str]:
    """Return for each reward the reason why it does not fit the rows, or an empty text. The best reward comes first.

    A reward fits if it gives a score above 0 to every answer when the answer itself is the response.
    """
    if rows.answer is None:
        return {OWN: "", **dict.fromkeys(REWARDS, "the data has no column with an answer")}
    texts = [str(answer) for answer in rows.answers]
    reasons = {**{name: _explain_misfit(name, texts) for name in REWARDS}, OWN: ""}
    ranked = sorted(reasons, key=lambda name: (bool(reasons[name]), _rank_reward(name, texts)))
    return {name: reasons[name] for name in ranked}


def _rank_reward(name: str, texts: Sequence[str]) -> int:
    numbers = all("####" in text or re.fullmatch(r"[-+$]?(0|[1-9][\d,]*)(\.\d+)?%?", text.strip()) for text in texts)
    latex = any("\\" in text or "$" in text for text in texts)
    best = "numeric" if numbers else "math" if latex else "exact_match"
    if best == "exact_match" and max(map(len, texts)) > LONG_ANSWER:
        best = OWN
    return (best, *REWARDS, OWN).index(name)


def _explain_misfit(name: str, texts: Sequence[str]) -> str:
    from enginehouse_rl.plan.reward_columns import run_own_check

    function = builtin(name)
    try:
        run_own_check(function, name, {}, None)
    except ConfigError as error:
        return str(error)
    prompt = {"prompt": ""} if takes_prompt(function) else {}
    for text in texts[:20] if name == "math" else texts:
        if not function(**prompt, response=text, answer=text)["reward"]:  # it scores the reference answer as wrong
            return f"it finds no answer in {text[:60]!r}, which is an answer in the data"
    return ""


def builtin(name: str) -> Callable[..., Any]:
    """Return the function of a built-in reward."""
    from enginehouse.plugin import Reward, plugins

    return plugins().function(Reward, name)


def takes_prompt(function: Callable[..., Any]) -> bool:
    """True if a built-in reward has the parameter `prompt`, which none of them uses."""
    return "prompt" in inspect.signature(function).parameters


def read_reward(answer: str, rows: PromptData) -> str:
    """Read the answer that names a reward.

    Raises:
        ConfigError: there is no such reward, or it does not fit the rows.
    """
    fitting = fitting_rewards(rows)
    answer = answer.strip().lower()
    able = [name for name, why in fitting.items() if not why]
    if answer not in fitting:
        raise ConfigError(
            f"unknown reward {answer!r}. {nearest(answer, able)}. Others, and several at once: docs/rewards.md"
        )
    if fitting[answer]:
        raise ConfigError(f"the reward {answer!r} does not fit: {fitting[answer]}. Available: {', '.join(able)}")
    return answer


def reward_texts(rows: PromptData, reward: str) -> dict[str, str]:
    """Return the texts of the reward's file and of its test, by file name."""
    column = rows.answer
    is_name = column is not None and column.isidentifier() and not keyword.iskeyword(column)
    is_name = is_name and column not in (*vars(builtins), *REWARDS)  # the file's function may call these
    parameter = column if is_name else "**columns"
    expression = (column if is_name else f"columns[{column!r}]") if column else ""
    if column in NESTED:
        expression = f"{expression}[{NESTED[column]!r}]"
    if any(not isinstance(answer, str) for answer in rows.answers) and reward in ("exact_match", OWN):
        expression = f"str({expression})"
    if reward == OWN:
        values = {
            "parameters": ", ".join(filter(None, ["response", parameter if column else ""])),
            "columns": ", ".join(map(repr, rows.columns)).replace("\\", "").replace('"', "'") or "none",
            "value": f"float({expression} in response)" if column else "float(0 < len(response) <= 200)",
        }
        source = "own_reward.txt"
    else:
        values = {**_describe_builtin(reward, expression), "parameter": str(parameter)}
        source = "built_in_reward.txt"
    right = str(rows.answers[0]) if column else "A short response."
    first = {NESTED[column]: rows.answers[0]} if column in NESTED else rows.answers[0] if column else None
    test_values = {"columns": repr({column: first} if column else {}), "right": repr(right), "wrong": repr("")}
    return {REWARD: _fill(source, values), TEST: _fill("test_reward.txt", test_values)}


def _describe_builtin(reward: str, answer: str) -> dict[str, str]:
    function = builtin(reward)
    arguments = ['prompt=""'] * takes_prompt(function) + ["response=response", f"answer={answer}"]
    summary = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
    return {
        "module": function.__module__,
        "name": function.__name__,
        "summary": summary.replace("the data set's `answer` column", "the answer"),
        "arguments": ", ".join(arguments),
    }


def _fill(template: str, values: Mapping[str, str]) -> str:
    return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
