from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from enginehouse.engines.environment import Scored
from enginehouse.errors import ConfigError, DataError, first_line, nearest
from enginehouse_environments.dialogue import ChatTemplate
from enginehouse_rl.environments.single_turn import SingleTurn

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Task

FIRST_UNNUMBERED = 1_000_000_000
"""Smallest index of an entry for a row without an index. Held-out rows with a smaller index thus have other entries."""

TasksArgument = Annotated[list[str | dict[str, Any]], Field(min_length=1)]


class ReasoningGym:
    """Questions of the package `reasoning_gym`, each answered once and scored from 0 to 1 by the scorer of its task.

    The model sees only the question. The prompts of the data are for people.

    Args:
        tasks: names of tasks; or mappings of a `name`, a `weight` (default 1), the `level` of its curriculum (for all
            its attributes, or by attribute), and the task's own parameters.
        seed: the seed of all tasks.
        index: column with the index of a row's entry. A row without an index gets an entry by its serial number, at an
            index of at least 1,000,000,000.
        system_prompt: name of a system prompt of `reasoning_gym`, which asks for the answer between `<answer>` tags; or
            your own text; None: no system prompt.
        answer: `tagged` scores the text between the last tags, `whole` the whole response.
        template: arguments of the chat template by name, such as `enable_thinking`.
    """

    def __init__(
        self,
        tasks: TasksArgument,
        seed: Annotated[int, Field(ge=0)] = 0,
        index: str = "index",
        system_prompt: str | None = "default",
        answer: Literal["tagged", "whole"] = "tagged",
        template: dict[str, Any] | None = None,
    ):
        self._mixture = Mixture(read_specs(tasks), seed)
        self._index, self._template = index, template
        self._extract = load_package("utils").extract_answer if answer == "tagged" else str.strip
        self._system = find_system_prompt(system_prompt)
        # The generators and scorers of the package keep state, so that one thread must call them all.
        self._thread = ThreadPoolExecutor(1, "reasoning_gym")

    needs_reward = False

    @staticmethod
    def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
        """Raise `ConfigError` for unknown tasks, parameters, levels and system prompts."""
        read_specs(arguments["tasks"])
        find_system_prompt(arguments.get("system_prompt", "default"))
        if "index" in arguments and columns is not None and (index := arguments["index"]) not in columns:
            raise ConfigError(f"index: the data has no column {index!r}. {nearest(index, columns)}")

    @staticmethod
    def check_tokenizer(arguments: Mapping[str, Any], tokenizer: Any) -> None:
        """Raise `UserError` for a tokenizer without a chat template."""
        ChatTemplate(tokenizer, arguments=arguments.get("template"))

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        run_in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, self._thread)
        question = await run_in_thread(self._mixture.draw, self._read_index(task))
        template = ChatTemplate(policy.tokenizer, arguments=self._template)
        messages = [{"role": "user", "content": question.entry["question"]}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        opening = template.opening(messages)

        async def score(rows: Sequence[Mapping[str, Any]]) -> Sequence[Scored]:
            answers = [self._extract(row["response"]) for row in rows]
            return [await run_in_thread(question.score, answer) for answer in answers]

        question_task = replace(task, prompt_ids=opening, prompt=template.decode(opening), messages=messages)
        return await SingleTurn().run(question_task, policy, _OwnScores(context, score))

    def _read_index(self, task: Task) -> int:
        """Return the index of the task's entry."""
        index = task.columns.get(self._index)
        if index is None:
            return FIRST_UNNUMBERED + task.serial
        if not isinstance(index, int) or index < 0:
            raise DataError(
                f"environment.arguments.index: the column {self._index!r} must hold a whole number of at least 0, "
                f"not {index!r}"
            )
        return index


class _OwnScores:
    """The context of a run, except that `score` is the environment's own function."""

    def __init__(self, context: EpisodeContext, score: Any):
        self.samples, self.most_tokens = context.samples, context.most_tokens
        self.each, self.score = context.each, score


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task, its weight among the questions, and its config of `reasoning_gym`."""

    name: str
    weight: float
    dataset: Any  # class of the package
    config: Any


@dataclass(frozen=True, slots=True)
class Question:
    """An entry of a task's data set."""

    task: str
    entry: dict[str, Any]
    dataset: Any

    def score(self, answer: str | None) -> Scored:
        """Return the score by the task's own scorer; 0 if the scorer cannot read the answer."""
        try:
            reward = float(self.dataset.score_answer(answer, self.entry)) if answer is not None else 0.0
        except Exception:  # some scorers raise an error for an answer in an unexpected format
            reward = 0.0
        return Scored(reward, {self.task: reward}, answer=answer or "")


class Mixture:
    """Endless questions of several tasks, chosen by their weights.

    For a single task, the entry `index` is `create_dataset(name, seed=seed, ...)[index]` up to the task's `size`. Some
    tasks have no entries beyond it, so each further `size` entries come from a data set with another seed.
    """

    def __init__(self, specs: Sequence[TaskSpec], seed: int):
        self._specs, self._seed = specs, seed
        self._open = functools.lru_cache(maxsize=4 * len(specs))(self._make_dataset)

    def draw(self, index: int) -> Question:
        """Return the question with this index."""
        weights = [spec.weight for spec in self._specs]
        (place,) = random.Random(f"{self._seed} {index}").choices(range(len(weights)), weights)
        spec = self._specs[place]
        within = index % spec.config.size
        dataset = self._open(place, index - within)
        with _fix_seeds(f"{self._seed} {index}"):
            return Question(spec.name, dataset[within], dataset)

    def _make_dataset(self, place: int, begin: int) -> Any:
        spec, seed = self._specs[place], (self._seed + begin) % 2**32
        with _fix_seeds(str(seed)):
            return spec.dataset(dataclasses.replace(spec.config, seed=seed))


@contextmanager
def _fix_seeds(text: str) -> Iterator[None]:
    """Seed the random generators of the process, which some tasks use, and restore their states afterwards."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(text)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def read_specs(tasks: Sequence[str | Mapping[str, Any]]) -> list[TaskSpec]:
    """Return the tasks that a config names.

    Raises:
        ConfigError: a task, parameter or level does not exist.
    """
    package = load_package("factory")
    names = sorted(package.DATASETS.keys() - {"composite"})
    specs = [_read_spec({"name": task} if isinstance(task, str) else task, package, names) for task in tasks]
    spec_names = [spec.name for spec in specs]
    if doubled := next((name for name in spec_names if spec_names.count(name) > 1), None):
        raise ConfigError(f"tasks: {doubled!r} is named twice; give it a weight instead")
    return specs


def _read_spec(task: Mapping[str, Any], package: Any, names: Sequence[str]) -> TaskSpec:
    parameters = dict(task)
    name, weight, level = parameters.pop("name", None), parameters.pop("weight", 1.0), parameters.pop("level", None)
    if name not in names:
        raise ConfigError(f"tasks: reasoning_gym has no task {name!r}. {nearest(str(name), names)}")
    if not isinstance(weight, int | float) or weight <= 0:
        raise ConfigError(f"tasks: the weight of {name!r} must be a number above 0, not {weight!r}")
    dataset, config_class = package.DATASETS[name]
    fields = {field.name for field in dataclasses.fields(config_class)} - {"seed"}
    for key in parameters.keys() - fields:
        raise ConfigError(f"tasks: {name!r} has no parameter {key!r}. {nearest(key, [*fields, 'level', 'weight'])}")
    try:
        config = dataclasses.replace(_make_config(package, name, level, config_class), **parameters)
        if hasattr(config, "validate"):  # a few tasks check nothing
            config.validate()
    except ConfigError:
        raise
    except Exception as error:  # the checks of a task raise errors of any kind
        raise ConfigError(f"tasks: parameters of {name!r} are invalid: {first_line(error)}") from error
    return TaskSpec(name, float(weight), dataset, config)


def _make_config(package: Any, name: str, level: int | Mapping[str, int] | None, config_class: type) -> Any:
    """Return the config of a level of the task's curriculum, or the task's default config if the level is None."""
    if level is None:
        return config_class()
    if not package.has_curriculum(name):
        raise ConfigError(f"tasks: {name!r} has no curriculum, and so no level")
    curriculum = package.create_curriculum(name)
    if isinstance(level, int):
        curriculum.set_global_level(level)
        return curriculum.generate_configuration()
    for attribute, number in level.items():
        if attribute not in curriculum.attributes:
            choices = nearest(attribute, curriculum.attributes)
            raise ConfigError(f"tasks: the curriculum of {name!r} has no attribute {attribute!r}. {choices}")
        curriculum.set_attr_level(attribute, number)
    return curriculum.generate_configuration()


def find_system_prompt(name: str | None) -> str:
    """Return the system prompt of `reasoning_gym` with this name. A name of several words is itself the prompt. For
    None, the prompt is empty.

    Raises:
        ConfigError: there is no such system prompt.
    """
    if name is None or len(name.split()) > 1:
        return name or ""
    prompts = load_package("utils").SYSTEM_PROMPTS
    if name not in prompts:
        raise ConfigError(f"system_prompt: reasoning_gym has no system prompt {name!r}. {nearest(name, prompts)}")
    return prompts[name]


def load_package(module: str) -> Any:
    """Return a module of the package `reasoning_gym`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        importlib.import_module("reasoning_gym")  # registers its tasks
        return importlib.import_module(f"reasoning_gym.{module}")
    except ImportError as error:
        raise ConfigError(
            f"reasoning_gym is not installed. Try: pip install 'enginehouse-environments[reasoning-gym]' ({error})"
        ) from error
