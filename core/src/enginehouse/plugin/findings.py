"""Findings of a config's checks: problems, which prevent the run, and notes, which do not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from enginehouse.errors import ConfigError, UserError, join_problems

logger = logging.getLogger(__name__)


class Findings:
    """Collects problems, so that one check does not hide the next, and raises them together.

    Attributes:
        problems: errors in order of discovery.
        notes: sentences about effects that the user may not expect.
        seen: facts about the data, as pairs of name and value, which the plan shows.
    """

    def __init__(self) -> None:
        self.problems: list[UserError] = []
        self.notes: list[str] = []
        self.seen: list[tuple[str, str]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add a `UserError` raised in the block to the problems, and continue after the block."""
        try:
            yield
        except UserError as error:
            self.problems.append(error)

    def refuse(self, message: str) -> None:
        self.problems.append(ConfigError(message))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def doing(self, words: str) -> None:
        """Log the current check, which may take seconds. `enginehouse.cli.console` shows it on a terminal."""
        logger.info(words)

    def raise_problems(self, where: str) -> None:
        """Raise a single problem unchanged, or several as one error.

        Args:
            where: the place of the problems, for the heading of their list.

        Raises:
            UserError: if there is a problem.
        """
        self.doing("")
        problems = {str(problem): problem for problem in self.problems}  # two checks may find the same problem
        if len(problems) == 1:
            raise next(iter(problems.values()))
        if problems:
            raise ConfigError(join_problems(list(problems), where))
