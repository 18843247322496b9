"""What checking a config brings to light: problems, which forbid the run, and notes, which do not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from enginehouse.errors import ConfigError, UserError, join_problems

logger = logging.getLogger(__name__)


class Findings:
    """Collects problems, so that one check does not hide the next, and raises them together.

    Attributes:
        problems: errors, in the order they were found.
        notes: what the user may not have expected, a sentence each.
        seen: what the data turned out to be, as facts of the plan.
    """

    def __init__(self) -> None:
        self.problems: list[UserError] = []
        self.notes: list[str] = []
        self.seen: list[tuple[str, str]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take a `UserError` raised in the block as a problem, and go on after it."""
        try:
            yield
        except UserError as error:
            self.problems.append(error)

    def refuse(self, message: str) -> None:
        """Add a problem of the config itself."""
        self.problems.append(ConfigError(message))

    def note(self, sentence: str) -> None:
        """Add a note."""
        self.notes.append(sentence)

    def doing(self, words: str) -> None:
        """Say what is looked at now and may take seconds: a terminal shows it, see `enginehouse.cli.console`."""
        logger.info(words)

    def raise_problems(self, where: str) -> None:
        """Raise the only problem as it is, several as one.

        Args:
            where: what the problems are in, for a list of them.

        Raises:
            UserError: if there is a problem.
        """
        self.doing("")
        problems = {str(problem): problem for problem in self.problems}  # two checks may find the same
        if len(problems) == 1:
            raise next(iter(problems.values()))
        if problems:
            raise ConfigError(join_problems(list(problems), where))
