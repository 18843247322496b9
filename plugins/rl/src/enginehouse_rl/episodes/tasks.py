"""Which tasks come next: those that were handed out and not trained on, then new ones."""

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
    """The rows of a data set in a sampler's order, numbered without end.

    Args:
        sampler: stands before the first of them.
    """

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self._again: list[int] = []

    @property
    def drawn(self) -> int:
        """How many were handed out, in this run and in those it goes on with, but for those that are to come again."""
        return self._sampler.drawn - len(self._again)

    def metrics(self) -> dict[str, float]:
        """How far the rows that were handed out go: epochs of each source, those drawn again included."""
        return self._sampler.metrics()

    def next(self, count: int) -> list[Task]:
        """The next so many."""
        again, self._again = self._again[:count], self._again[count:]
        serials = [*again, *self._sampler.next_serials(count - len(again))]
        return make_tasks(self._sampler.rows(serials), serials) if serials else []

    def repeat(self, serials: Iterable[int]) -> None:
        """Have tasks that were handed out come once more, before new ones."""
        self._again.extend(serials)

    def state(self, under_way: Iterable[int]) -> dict[str, Any]:
        """Plain data to go on from: without `under_way`, which are to be handed out again."""
        return {"prompts": self._sampler.state_dict(), "again": [*under_way, *self._again]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; one of before there was `again` has none.

        Raises:
            DataError: the data are not those the state is of.
        """
        self._sampler.load_state_dict(state["prompts"])
        again = state.get("again", [])
        numbers = isinstance(again, Sequence) and all(type(one) is int for one in again)
        if not numbers or any(not 0 <= one < self._sampler.drawn for one in again):
            raise DataError(
                "cannot resume: the checkpoint is damaged: the tasks to be drawn again are no numbers of tasks that "
                "were handed out"
            )
        self._again = list(again)


class PromptReader:
    """Reads a run's files of prompts. All rows are looked at here, before anything starts; the plan may have looked at
    fewer.

    Args:
        plan: of the run.
        progress: where it is said how many are left out.

    Attributes:
        tokenizer: the model's.
        too_long: how many prompts were left out as they are too long, by file.
    """

    def __init__(self, plan: PlayPlan, progress: Progress):
        model = plan.config.model
        self._plan, self._progress = plan, progress
        self.tokenizer = load_tokenizer(model.path, model.trust_remote_code, plan.config.data.template_arguments)
        self.too_long: dict[str, int] = {}

    def read(self, path: str | list[str] | dict[str, float], order_by: str | None = None) -> PromptDataset:
        """Read prompts; `path` is as `data.train`, and `order_by` as `data.order_by`."""
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
