"""The prompts of a first run, and which of their columns is what."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginehouse.errors import ConfigError, DataError, nearest
from enginehouse_recipes.init.models import TINY, Model, seen_from
from enginehouse_recipes.init.new_files import NewFiles

SAMPLES = {"sorting": "grpo", "calculator": "calculator"}
"""Data that is made, and the recipe with which the tiny model learns it."""
SAMPLE_ANSWERS = {"sorting": "012345", "calculator": "2146"}
"""An answer of each."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages", "conversation", "input")
ANSWERS = (
    *("answer", "final_answer", "ground_truth", "reward_model", "expected_answer", "gold", "target", "label"),
    *("expected", "solution", "output", "completion"),
)
"""What columns are called, the likeliest first."""
NESTED = {"reward_model": "ground_truth"}
"""The key of an answer within its column, as verl's data has it."""
HELD_OUT = ("validation", "valid", "val", "test", "dev", "eval")
SAMPLE_ROWS, HELD_OUT_ROWS = 512, 64
LOOKED_AT = 200
"""Rows whose values are looked at for what a column is; all are read for whether they have it."""
READ_SECONDS = 5.0


class PromptsUnknown(DataError):
    """No column is known to hold the prompts."""


@dataclass(frozen=True)
class Rows:
    """Prompts, and what is known of them.

    Attributes:
        train: file or files, as the config names them.
        validation: file of held-out prompts; None: there is none.
        prompt: column.
        answer: column; None: there is none.
        columns: of the rows, without the prompt.
        chats: whether prompts are chat messages.
        count: how many rows; 0: they are to be made.
        answers: of the first rows.
        tools: whether the calculator is to be called.
    """

    train: str | list[str]
    validation: str | None
    prompt: str = "prompt"
    answer: str | None = "answer"
    columns: tuple[str, ...] = ("answer",)
    chats: bool = False
    count: int = 0
    answers: Sequence[Any] = ("012345",)
    tools: bool = False

    @property
    def said(self) -> str:
        """What was found, in words."""
        kind = "chat messages" if self.chats else "text"
        answer = "no column with an answer" if self.answer is None else f"answer: column {self.answer!r}"
        held_out = f"held out: {self.validation}" if self.validation else "no held-out file beside it"
        count = f"{self.count:,} rows; " if self.count else ""
        return f"{count}prompt: column {self.prompt!r}, {kind}; {answer}; {held_out}"


def read_rows(
    answer: str, model: Model, files: NewFiles, prompt: str | None = None, answers: str | None = None
) -> Rows:
    """The rows of an answer: `"sorting"`, `"calculator"`, or a path of prompts.

    Args:
        model: what reads them.
        files: takes in a file that has to be made.
        prompt: the column of prompts; None: it is guessed.
        answers: that of answers.

    Raises:
        PromptsUnknown: nothing says which column has the prompts.
        DataError: naming file, row and column.
        ConfigError: the model cannot learn from them.
    """
    if answer in SAMPLES:
        return _sample(answer, model, files)
    path = Path(answer).expanduser()
    if not path.exists() and not path.suffix:
        raise DataError(f"there is no data {answer!r}: give a path, or one of these; {nearest(answer, SAMPLES)}")
    if not model.path and path.exists():
        raise ConfigError(
            f"the model {TINY!r} knows the few characters of {' and '.join(SAMPLES)}, and cannot read {path}: name a "
            f"model of your own, or data {next(iter(SAMPLES))}"
        )
    train, validation = _files(path, files)
    rows = _looked_at(train, prompt, answers)
    if rows.chats and not model.chats:
        raise ConfigError(
            f"the column {rows.prompt!r} of {path} holds chat messages, and the model {model.path} has no chat "
            "template to write them by: name a chat model, or data whose prompts are text"
        )
    seen = [seen_from(one, files.directory) for one in train]
    held_out = None if validation is None else seen_from(validation, files.directory)
    return Rows(**{**vars(rows), "train": seen[0] if len(seen) == 1 else seen, "validation": held_out})


def _sample(name: str, model: Model, files: NewFiles) -> Rows:
    """Rows that are made here; the tiny model's are those of its recipe."""
    tools = name == "calculator"
    if tools:
        from enginehouse.plugin import Environment, plugins

        plugins().get(Environment, "tools")
        if not model.chats:
            raise ConfigError(
                f"the model {model.path} has no chat template, by which tools are called: name a chat model, or data "
                "sorting"
            )
    chats = tools if not model.path else model.chats
    if not model.path:
        from enginehouse_recipes import recipe
        from enginehouse_rl.config.document import parse

        one = recipe(SAMPLES[name])
        data = parse(one.text, str(one.path))[0]["data"]
        train, validation = data["train"], data["validation"]
    else:
        rng = random.Random(0)
        lines = list(dict.fromkeys(_line(tools, chats, rng) for _ in range(2 * SAMPLE_ROWS)))
        held_out, trained = lines[:HELD_OUT_ROWS], lines[HELD_OUT_ROWS : HELD_OUT_ROWS + SAMPLE_ROWS]
        train = files.write("train.jsonl", "".join(trained))
        validation = files.write("validation.jsonl", "".join(held_out))
    count = SAMPLE_ROWS if model.path else 0
    return Rows(train, validation, chats=chats, tools=tools, count=count, answers=(SAMPLE_ANSWERS[name],))


def _line(product: bool, chats: bool, rng: random.Random) -> str:
    """A row, as a line of its file."""
    if product:
        first, second = rng.randrange(32, 1000), rng.randrange(32, 1000)
        question, answer = f"What is {first} * {second}? Use the calculator.", str(first * second)
    else:
        digits = "".join(rng.choices("0123456789", k=6))
        question, answer = (
            f"Write the digits of {digits} in ascending order, and nothing else.",
            "".join(sorted(digits)),
        )
    prompt = [{"role": "user", "content": question}] if chats else f"Question: {question}\nAnswer:"
    return json.dumps({"prompt": prompt, "answer": answer}) + "\n"


def _files(path: Path, files: NewFiles) -> tuple[list[Path], Path | None]:
    """The training files that a path stands for, and one of held-out prompts beside them."""
    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        return _from_disk(path, files)
    if path.suffix.lower() in (".csv", ".tsv"):
        return [_from_csv(path, files)], None
    if not path.is_dir():
        return [path], _beside(path)
    from enginehouse_rl.data.files import SUFFIXES

    found = sorted(one for one in path.rglob("*") if one.suffix.lower() in SUFFIXES)
    train = [one for one in found if "train" in one.stem] or found[:2]
    if not train or (len(train) > 1 and "train" not in train[0].stem):
        listed = ", ".join(str(one) for one in found[:10]) or "no data files"
        raise DataError(f"{path} is a directory with {listed}: name the file of training prompts")
    held_out = [one for name in HELD_OUT for one in found if name in one.stem]
    return train, held_out[0] if held_out else None


def _beside(path: Path) -> Path | None:
    """A file of held-out prompts that is called as the training file is."""
    names = [path.stem.replace("train", one) if "train" in path.stem else f"{path.stem}_{one}" for one in HELD_OUT]
    return next((one for name in names if (one := path.with_name(name + path.suffix)).is_file()), None)


def _from_csv(path: Path, files: NewFiles) -> Path:
    """A file of comma- or tab-separated values, as JSONL: every value stays the text that it is."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, row in enumerate(rows):
        if None in row or None in row.values():
            raise DataError(f"{path}, row {number}, does not have as many values as there are columns")
    return files.directory / files.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _from_disk(path: Path, files: NewFiles) -> tuple[list[Path], Path | None]:
    """What `datasets` saved to disk, as Parquet."""
    import datasets

    held = datasets.load_from_disk(str(path))
    splits = {"train": held} if isinstance(held, datasets.Dataset) else dict(held)
    if "train" not in splits:
        raise DataError(f"{path} has no split 'train': {nearest('train', splits)}")
    validation = next((name for name in HELD_OUT if name in splits), None)
    made = []
    for name in filter(None, ("train", validation)):
        files.write(f"{name}.parquet", "")
        splits[name].to_parquet(str(files.directory / f"{name}.parquet"))
        made.append(files.directory / f"{name}.parquet")
    return made[:1], made[1] if validation else None


def _looked_at(paths: Sequence[Path], prompt: str | None, answer: str | None) -> Rows:
    """Which column is what; every row has to have those."""
    from enginehouse_rl.data.files import RowProblems, check_file, open_table

    columns = list(check_file(paths[0], [one for one in (prompt, answer) if one]))
    head = _head(paths[0], columns)
    columns = list(dict.fromkeys([*columns, *(name for row in head for name in row)]))
    prompt = prompt or _guess(columns, PROMPTS, head, _is_prompt)
    if prompt is None:
        raise PromptsUnknown(
            f"no column of {paths[0]} is known to hold prompts, which are text, or chat messages of which the last is "
            f"not the assistant's; it has {', '.join(columns)}: say which by --prompt COLUMN"
        )
    if "response" in columns:
        raise DataError(f"{paths[0]}: a reward gets 'response' from the run; rename the column 'response' in the data")
    answer = answer or _guess([one for one in columns if one != prompt], ANSWERS, head, _is_answer)
    table = open_table(paths, [one for one in (prompt, answer) if one], READ_SECONDS)
    problems = RowProblems()
    for name, fits, what in ((prompt, _is_prompt, "prompt"), (answer, _is_answer, "answer")):
        for row, value in enumerate(table.needed[name] if name else ()):
            if not fits(inside(name, value)):
                said = f"the column {name!r} holds {str(value)[:60]!r}, which is no {what}"
                problems.add(f"{table.where(row)}: {said}")
    problems.raise_any()
    return Rows(
        train="", validation=None, prompt=prompt, answer=answer,
        columns=tuple(one for one in columns if one != prompt),
        chats=isinstance(table.needed[prompt][0], list),
        count=len(table) + table.unread,
        answers=[inside(answer, value) for value in table.needed[answer][:LOOKED_AT]] if answer else (),
    )  # fmt: skip


def _head(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The first rows."""
    from enginehouse_rl.data.files import PARQUET_SUFFIXES, open_table

    if path.suffix.lower() not in PARQUET_SUFFIXES:  # rows may have different columns
        table = open_table(path, [], READ_SECONDS)
        return table.others(range(min(len(table), LOOKED_AT)))
    needed = open_table(path, columns, READ_SECONDS).needed
    return [dict(zip(needed, values, strict=True)) for values in zip(*(one[:LOOKED_AT] for one in needed.values()))]


def _guess(
    columns: Sequence[str], names: Sequence[str], head: Sequence[Mapping[str, Any]], fits: Callable[[Any], bool]
) -> str | None:
    """The column that is called as such a one mostly is, and whose values could be: the first row that has any."""
    for name in names:
        for column in columns:
            values = [inside(column, row[column]) for row in head if row.get(column) is not None]
            if column.lower() == name and values and fits(values[0]):
                return column
    return None


def inside(column: str | None, value: Any) -> Any:
    """The answer in a column of answers: its value, or what lies in it."""
    return value.get(NESTED[column]) if column in NESTED and isinstance(value, dict) else value


def _is_prompt(value: Any) -> bool:
    """Whether a run could answer it."""
    if isinstance(value, str):
        return bool(value.strip())
    chat = isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value)
    return bool(chat) and value[-1]["role"] != "assistant"


def _is_answer(value: Any) -> bool:
    """Whether a response could be compared with it."""
    return isinstance(value, int | float) or (isinstance(value, str) and bool(value.strip()))
