"""Finds or creates the prompts of a first run, and guesses their columns."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginehouse.errors import ConfigError, DataError, describe_os_error, nearest
from enginehouse_recipes.init.models import TINY, ChosenModel, config_path
from enginehouse_recipes.init.new_files import NewFiles

SAMPLES = {"sorting": "grpo", "calculator": "calculator"}
"""Names of the data sets that are created here, each with the recipe by which the tiny model learns from it."""
SAMPLE_ANSWERS = {"sorting": "012345", "calculator": "2146"}
"""An example answer for each of `SAMPLES`."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages", "conversation", "input")
ANSWERS = (
    *("answer", "final_answer", "ground_truth", "reward_model", "expected_answer", "gold", "target", "label"),
    *("expected", "solution", "output", "completion"),
)
"""Likely names of the column of answers, most likely first."""
NESTED = {"reward_model": "ground_truth"}
"""The key of the answer inside a column, as in verl's data."""
HELD_OUT = ("validation", "valid", "val", "test", "dev", "eval")
SAMPLE_ROWS, HELD_OUT_ROWS = 512, 64
LOOKED_AT = 200
"""Number of rows by which columns are guessed. All rows are checked afterwards."""
READ_SECONDS = 5.0


class PromptsUnknown(DataError):
    """The column of prompts cannot be guessed."""


@dataclass(frozen=True)
class PromptData:
    train: str | list[str]  # file or files, as the config names them
    validation: str | None  # file of held-out prompts
    prompt: str = "prompt"  # column
    answer: str | None = "answer"  # column; None: there is none
    columns: tuple[str, ...] = ("answer",)  # all but the prompt
    chats: bool = False  # prompts are chat messages
    count: int = 0  # number of rows; 0: they are not created yet
    answers: Sequence[Any] = ("012345",)  # values of the first rows
    tools: bool = False  # the task needs the calculator

    @property
    def summary(self) -> str:
        """One line that describes the prompts."""
        kind = "chat messages" if self.chats else "text"
        answer = "no column with an answer" if self.answer is None else f"answer: column {self.answer!r}"
        held_out = f"held out: {self.validation}" if self.validation else "no held-out file beside it"
        count = f"{self.count:,} rows; " if self.count else ""
        return f"{count}prompt: column {self.prompt!r}, {kind}; {answer}; {held_out}"


def read_rows(
    answer: str, model: ChosenModel, files: NewFiles, prompt: str | None = None, answers: str | None = None
) -> PromptData:
    """Read an answer: `"sorting"`, `"calculator"`, or a path of prompts.

    Args:
        model: the model that reads the prompts.
        files: writes any file that must be created.
        prompt: column of prompts; None: guess it.
        answers: column of answers; None: guess it.

    Raises:
        PromptsUnknown: the column of prompts cannot be guessed.
        DataError: the data is wrong; the message names file, row and column.
        ConfigError: the model cannot learn from the data.
    """
    if answer in SAMPLES:
        return _make_sample(answer, model, files)
    path = Path(answer).expanduser()
    if not path.exists() and not path.suffix:
        raise DataError(f"unknown data {answer!r}. Give a path or a sample. {nearest(answer, SAMPLES)}")
    if not model.path and path.exists():
        raise ConfigError(
            f"the model {TINY!r} knows only the characters of {' and '.join(SAMPLES)}, and cannot read {path}: choose "
            f"a model of your own, or the data {next(iter(SAMPLES))}"
        )
    train, validation = _find_files(path, files)
    rows = _inspect(train, prompt, answers)
    if rows.chats and not model.chats:
        raise ConfigError(
            f"the column {rows.prompt!r} of {path} holds chat messages, but the model {model.path} has no chat "
            "template: choose a chat model, or data whose prompts are text"
        )
    paths = [config_path(file, files.directory) for file in train]
    held_out = None if validation is None else config_path(validation, files.directory)
    return replace(rows, train=paths[0] if len(paths) == 1 else paths, validation=held_out)


def _make_sample(name: str, model: ChosenModel, files: NewFiles) -> PromptData:
    """Return one of the data sets in `SAMPLES`. For the tiny model, it is the data of the recipe. For other models, new
    files are written."""
    tools = name == "calculator"
    if tools:
        from enginehouse.plugin import Environment, plugins

        plugins().get(Environment, "tools")
        if not model.chats:
            raise ConfigError(
                f"the model {model.path} has no chat template, which tool calls need: choose a chat model, or the data "
                "sorting"
            )
    chats = tools if not model.path else model.chats
    if not model.path:
        from enginehouse_recipes import recipe
        from enginehouse_rl.config.document import parse

        source = recipe(SAMPLES[name])
        data = parse(source.text, str(source.path))[0]["data"]
        train, validation = data["train"], data["validation"]
    else:
        rng = random.Random(0)
        lines = list(dict.fromkeys(_write_line(tools, chats, rng) for _ in range(2 * SAMPLE_ROWS)))
        train_lines = lines[HELD_OUT_ROWS : HELD_OUT_ROWS + SAMPLE_ROWS]
        train = files.write("train.jsonl", "".join(train_lines))
        validation = files.write("validation.jsonl", "".join(lines[:HELD_OUT_ROWS]))
    count = SAMPLE_ROWS if model.path else 0
    return PromptData(train, validation, chats=chats, tools=tools, count=count, answers=(SAMPLE_ANSWERS[name],))


def _write_line(product: bool, chats: bool, rng: random.Random) -> str:
    """Return a row as a line of JSONL."""
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


def _find_files(path: Path, files: NewFiles) -> tuple[list[Path], Path | None]:
    """Return the training files of a path, and its file of held-out prompts."""
    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        return _convert_saved(path, files)
    if path.suffix.lower() in (".csv", ".tsv"):
        return [_convert_csv(path, files)], None
    if not path.is_dir():
        return [path], _find_held_out(path)
    from enginehouse_rl.data.files import SUFFIXES

    data = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    train = [file for file in data if "train" in file.stem] or data[:2]
    if not train or (len(train) > 1 and "train" not in train[0].stem):
        listed = ", ".join(map(str, data[:10])) or "no data files"
        raise DataError(f"{path} is a directory with {listed}: name the file of training prompts")
    return train, next((file for name in HELD_OUT for file in data if name in file.stem), None)


def _find_held_out(path: Path) -> Path | None:
    """Return a file of held-out prompts whose name matches the name of the training file."""
    stems = [path.stem.replace("train", word) if "train" in path.stem else f"{path.stem}_{word}" for word in HELD_OUT]
    return next((file for stem in stems if (file := path.with_name(stem + path.suffix)).is_file()), None)


def _convert_csv(path: Path, files: NewFiles) -> Path:
    """Convert comma- or tab-separated values to JSONL. All values become text."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {describe_os_error(error)}") from error
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise DataError(f"{path}, row {number} does not have as many values as there are columns")
    return files.directory / files.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _convert_saved(path: Path, files: NewFiles) -> tuple[list[Path], Path | None]:
    """Convert data that `datasets` saved to disk to Parquet."""
    import datasets

    data = datasets.load_from_disk(str(path))
    splits = {"train": data} if isinstance(data, datasets.Dataset) else dict(data)
    if "train" not in splits:
        raise DataError(f"{path} has no split 'train'. {nearest('train', splits)}")
    validation = next((name for name in HELD_OUT if name in splits), None)
    converted = []
    for name in filter(None, ("train", validation)):
        files.write(f"{name}.parquet", "")
        splits[name].to_parquet(str(files.directory / f"{name}.parquet"))
        converted.append(files.directory / f"{name}.parquet")
    return converted[:1], converted[1] if validation else None


def _inspect(paths: Sequence[Path], prompt: str | None, answer: str | None) -> PromptData:
    """Guess the columns, and check that every row has them."""
    from enginehouse_rl.data.files import RowProblems, check_file, open_table

    columns = list(check_file(paths[0], [column for column in (prompt, answer) if column]))
    head = _read_head(paths[0], columns)
    columns = list(dict.fromkeys([*columns, *(name for row in head for name in row)]))
    prompt = prompt or _guess(columns, PROMPTS, head, _is_prompt)
    if prompt is None:
        raise PromptsUnknown(
            f"no column of {paths[0]} is known to hold prompts (text, or chat messages that do not end with the "
            f"assistant's); it has {', '.join(columns)}: name the column by --prompt COLUMN"
        )
    if "response" in columns:
        raise DataError(f"{paths[0]}: a reward gets 'response' from the run; rename the column 'response' in the data")
    answer = answer or _guess([column for column in columns if column != prompt], ANSWERS, head, _is_answer)
    table = open_table(paths, [column for column in (prompt, answer) if column], READ_SECONDS)
    problems = RowProblems()
    for name, fits, what in ((prompt, _is_prompt, "prompt"), (answer, _is_answer, "answer")):
        for row, value in enumerate(table.needed[name] if name else ()):
            if not fits(read_answer(name, value)):
                problems.add(f"{table.where(row)}: the column {name!r} holds {str(value)[:60]!r}, which is no {what}")
    problems.raise_any()
    return PromptData(
        train="", validation=None, prompt=prompt, answer=answer,
        columns=tuple(column for column in columns if column != prompt),
        chats=isinstance(table.needed[prompt][0], list),
        count=len(table) + table.unread,
        answers=[read_answer(answer, value) for value in table.needed[answer][:LOOKED_AT]] if answer else (),
    )  # fmt: skip


def _read_head(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    from enginehouse_rl.data.files import PARQUET_SUFFIXES, open_table

    if path.suffix.lower() not in PARQUET_SUFFIXES:  # rows may have different columns
        table = open_table(path, [], READ_SECONDS)
        return table.fetch_others(range(min(len(table), LOOKED_AT)))
    needed = open_table(path, columns, READ_SECONDS).needed
    return [
        dict(zip(needed, values, strict=True)) for values in zip(*(column[:LOOKED_AT] for column in needed.values()))
    ]


def _guess(
    columns: Sequence[str], names: Sequence[str], head: Sequence[Mapping[str, Any]], fits: Callable[[Any], bool]
) -> str | None:
    """Return the first of `names`, the most likely first, that is a column whose first value fits; or None."""
    for name in names:
        for column in columns:
            values = [read_answer(column, row[column]) for row in head if row.get(column) is not None]
            if column.lower() == name and values and fits(values[0]):
                return column
    return None


def read_answer(column: str | None, value: Any) -> Any:
    """Return the answer in a value of a column: the value itself, or the entry that `NESTED` names."""
    return value.get(NESTED[column]) if column in NESTED and isinstance(value, dict) else value


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    chat = isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value)
    return bool(chat) and value[-1]["role"] != "assistant"


def _is_answer(value: Any) -> bool:
    """True for a value that a response can be compared with."""
    return isinstance(value, int | float) or (isinstance(value, str) and bool(value.strip()))
