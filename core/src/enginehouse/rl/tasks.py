"""Which tasks come next: those that were handed out and not trained on before a resume, then new ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse.errors import DataError
from enginehouse.rl.episodes import tasks_of

if TYPE_CHECKING:
    from enginehouse.data.sampler import Sampler
    from enginehouse.engines.environment import Task


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
        """How many different ones were handed out, in this run and in those it goes on with."""
        return self._sampler.drawn - len(self._again)

    def metrics(self) -> dict[str, float]:
        """How far the rows that were handed out go: epochs of each source, those drawn again included."""
        return self._sampler.metrics()

    def next(self, count: int) -> list[Task]:
        """The next so many."""
        again, self._again = self._again[:count], self._again[count:]
        serials = [*again, *self._sampler.next_serials(count - len(again))]
        return tasks_of(self._sampler.rows(serials), serials) if serials else []

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
