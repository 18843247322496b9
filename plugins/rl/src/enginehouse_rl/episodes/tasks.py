"""The next tasks of a run: first the tasks that were handed out but not trained on, then new tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse.errors import DataError
from enginehouse_rl.data.prompts import PromptDataset
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.episodes.scored_group import make_tasks
from enginehouse_rl.plan.reward_columns import check_rewards, list_columns
from enginehouse_rl.plan.rewards import REWARD_GETS
from enginehouse_rl.plan.rows import name_files

if TYPE_CHECKING:
    from enginehouse.engines.environment import Task
    from enginehouse_rl.data.sampler import Sampler
    from enginehouse_rl.plan.plan import PlayPlan
    from enginehouse_rl.runs import Progress


class Tasks:
    """Hands out the rows of a data set as numbered tasks, in the order of a sampler and without end.

    Args:
        sampler: Sampler that has handed out no task yet.
    """

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self._again: list[int] = []

    @property
    def drawn(self) -> int:
        """Number of tasks handed out in this run and in the runs that it resumes, minus the tasks to be repeated."""
        return self._sampler.drawn - len(self._again)

    def metrics(self) -> dict[str, float]:
        """Return the number of epochs of each source that were handed out. A repeated task is not counted again."""
        return self._sampler.metrics()

    def next(self, count: int) -> list[Task]:
        again, self._again = self._again[:count], self._again[count:]
        serials = [*again, *self._sampler.next_serials(count - len(again))]
        return make_tasks(self._sampler.rows(serials), serials) if serials else []

    def repeat(self, serials: Iterable[int]) -> None:
        """Hand out these tasks again, before new ones."""
        self._again.extend(serials)

    def state(self, under_way: Iterable[int]) -> dict[str, Any]:
        """Return plain data from which `restore` resumes. After resuming, the tasks with the serial numbers `under_way`
        are handed out again."""
        return {"prompts": self._sampler.state_dict(), "again": [*under_way, *self._again]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned; states of older versions may lack `again`.

        Raises:
            DataError: The state belongs to other data, or it is damaged.
        """
        self._sampler.load_state_dict(state["prompts"])
        again = state.get("again", [])
        are_numbers = isinstance(again, Sequence) and all(type(serial) is int for serial in again)
        if not are_numbers or any(not 0 <= serial < self._sampler.drawn for serial in again):
            raise DataError(
                "cannot resume: the checkpoint is damaged: its tasks to repeat must be numbers of tasks that were "
                "handed out"
            )
        self._again = list(again)


class PromptReader:
    """Reads a run's prompt files. Unlike the plan, it checks all rows before anything starts.

    Attributes:
        too_long: Number of prompts that were dropped because they are too long, by file.
    """

    def __init__(self, plan: PlayPlan, progress: Progress):
        model = plan.config.model
        self._plan, self._progress = plan, progress
        self.tokenizer = load_tokenizer(model.path, model.trust_remote_code, plan.config.data.template_arguments)
        self.too_long: dict[str, int] = {}

    def read(self, path: str | list[str] | dict[str, float], order_by: str | None = None) -> PromptDataset:
        """Read prompts. `path` and `order_by` take the same values as the config keys `data.train` and
        `data.order_by`."""
        plan, data, (name, _) = self._plan, self._plan.config.data, name_files(path)
        dataset = PromptDataset.load(
            path,
            self.tokenizer,
            data.prompt,
            plan.prompt_limit,
            data.chat_template,
            data.overlong_prompts,
            self._progress.count,
            order_by,
            data.system,
            data.tools,
            data.columns,
        )
        columns = list_columns(dataset.shapes(), name, data.prompt, dataset.where)
        if plan.is_single_turn:
            check_rewards(plan.rewards, columns, REWARD_GETS)
        if dataset.dropped:
            self.too_long[name] = dataset.dropped
            limit = plan.prompt_limit.option
            self._progress.note(
                f"{dataset.dropped:,} prompts of {name} are left out: they have more tokens than {limit}"
            )
        return dataset
