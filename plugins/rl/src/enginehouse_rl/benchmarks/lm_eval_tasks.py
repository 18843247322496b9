"""Creates tasks of lm-eval, and lets them write the prompts of a benchmark.

In lm-eval itself, `lm_eval.simple_evaluate` does this. This module seeds the same random generators, so it gets the
same prompts as lm-eval.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS, DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

from enginehouse.errors import DataError, first_line
from enginehouse_rl.benchmarks.names import BENCHMARKS

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of settings that its tasks leave at defaults


class Item(NamedTuple):
    """An item of a benchmark.

    Attributes:
        task: the lm-eval task that it belongs to.
        doc: the row of the data set, as the task has prepared it.
        prompt: the prompt: text, or chat messages for a chat template.
    """

    task: str
    doc: dict[str, Any]
    prompt: str | list[dict[str, Any]]


class BenchmarkItems(NamedTuple):
    """The items of a benchmark, and the settings for generating the responses.

    Attributes:
        until: strings before which a response ends.
        description: the version of the task and its number of shots, for display.
    """

    items: tuple[Item, ...]
    until: tuple[str, ...]
    max_tokens: int
    description: str


def list_tasks(name: str) -> list[str]:
    """Return the names of the lm-eval tasks that a benchmark consists of: its task, or the tasks of its group."""
    task = BENCHMARKS[name].task
    members = (_open_folder(name).task_index[task].cfg or {}).get("task")
    return members if isinstance(members, list) else [task]


def make_tasks(name: str, tasks: Sequence[str], **settings: Any) -> list[ConfigurableTask]:
    """Return tasks of a benchmark, in which `settings` replace the settings of the same names."""
    group = {"group": "enginehouse", "task": [{"task": task, **settings} for task in tasks]}
    return list(_open_folder(name).load([group])["tasks"].values())


@functools.cache
def _open_folder(name: str) -> lm_eval.tasks.TaskManager:
    """Return a loader of only the tasks in a benchmark's folder. Reading the other ten thousand tasks of lm-eval would
    take long."""
    folder = Path(lm_eval.tasks.__file__).parent / BENCHMARKS[name].folder
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(folder))


@functools.lru_cache
def read_items(name: str, folder: Path, limit: int | None, is_chat: bool) -> BenchmarkItems:
    """Return the items of a benchmark. They are read once per process, so that a run reuses what its plan has read.

    Args:
        folder: the directory with the benchmark's data set.
        limit: the maximum number of items of each task; None: all.
        is_chat: true if prompts are chat messages, with the shots as earlier turns; false if they are plain text.

    Raises:
        DataError: the files are not the data set of the benchmark.
    """
    with _fix_seeds(), _hide_bars():
        try:
            tasks = make_tasks(name, list_tasks(name), dataset_path=str(folder))
            items = [item for task in tasks for item in _list_items(task, limit, is_chat)]
        except Exception as error:  # of many kinds: a split, a column or a file is missing
            raise DataError(
                f"cannot read the benchmark {name} from {folder}: {type(error).__name__}: {first_line(error)}"
            ) from error
    task, generation = tasks[0], tasks[0].config.generation_kwargs or {}
    title = BENCHMARKS[name].task
    shots = f"{task.config.num_fewshot or 0} shots"
    return BenchmarkItems(
        items=tuple(items),
        until=tuple(filter(None, generation.get("until", ()))),
        max_tokens=generation.get("max_gen_toks", DEFAULT_MAX_GEN_TOKS),
        description=f"{title} of lm-eval {lm_eval.__version__}, version {task.VERSION}, {shots}",
    )


def _list_items(task: ConfigurableTask, limit: int | None, is_chat: bool) -> Iterator[Item]:
    """Yield the items of a task, with prompts as lm-eval writes them."""
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    template = _keep_messages if is_chat else None
    for _, doc in task.doc_iterator(limit=limit):
        prompt: Any = task.fewshot_context(
            doc,
            num_fewshot=task.config.num_fewshot or 0,
            apply_chat_template=is_chat,
            fewshot_as_multiturn=is_chat,
            chat_template=template,
            gen_prefix=task.doc_to_prefix(doc),
        )
        yield Item(task.task_name, doc, prompt)


def _keep_messages(messages: list[dict[str, Any]], add_generation_prompt: bool) -> Any:
    """Return chat messages unchanged. lm-eval calls this in place of a chat template, because the messages are rendered
    and tokenized later, like the messages of any chat."""
    return messages


@contextmanager
def _fix_seeds() -> Iterator[None]:
    """Seed `random`, by which lm-eval shuffles the choices of a question, and restore its state afterwards."""
    state = random.getstate()
    random.seed(DEFAULT_RANDOM_SEED)
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def _hide_bars() -> Iterator[None]:
    """Prevent `datasets` from drawing progress bars."""
    quiet = datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not quiet:
            datasets.enable_progress_bars()


def make_scorer(name: str, task: str, doc: dict[str, Any]) -> ConfigurableTask:
    """Return a task of a benchmark for scoring responses. This task needs no data set.

    Args:
        doc: an item of the benchmark. It stands in for the data set, so that the task knows the columns.
    """
    rows = datasets.Dataset.from_list([doc])

    def make_splits(**settings: Any) -> Any:
        return _EverySplit(rows)

    return make_tasks(name, [task], custom_dataset=make_splits, process_docs=None, num_fewshot=0)[0]


class _EverySplit(dict[str, Any]):
    """A data set in which every split has the same rows."""

    def __init__(self, rows: datasets.Dataset):
        super().__init__()
        self._rows = rows

    def __missing__(self, split: str) -> datasets.Dataset:
        return self._rows
