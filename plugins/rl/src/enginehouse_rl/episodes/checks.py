"""Checks that a run can train on the episodes of an environment, and above all that the policy generated their tokens.

The policy must have generated each chosen token during this play, after exactly the tokens that precede it in the
episode, and with the logprob that the episode states. An environment that decodes a response and encodes it again, or
that edits messages, silently breaks this rule: the loss would train on tokens that nobody generated. If several rows of
an episode begin with the same generated tokens, only one of the rows may mark these tokens as chosen. Otherwise they
would count more than once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse.engines.environment import Episode, Segment
from enginehouse.errors import EnginehouseError
from enginehouse_rl.plan.rewards import is_reserved

if TYPE_CHECKING:
    from enginehouse_rl.episodes.drawn_tokens import DrawnTokens

FAILED = "failed"
"""Value of `Episode.finish` if an episode could not be generated, and therefore has no tokens of the policy."""


class MalformedEpisode(EnginehouseError):
    """An environment returned an episode that cannot be trained on."""


@dataclass(frozen=True, slots=True)
class EpisodeChecks:
    """The requirements for an environment's episodes.

    Attributes:
        environment: Name of the environment, for messages.
        vocabulary: Number of token ids that all models of the run know. None: any id is permitted.
        most_tokens: Maximum number of tokens of a row. None: no limit.
        token_rewards: True if the run reads `token_rewards`. If the run does not read them, rows must not have any.
        temperature: Temperature at which chosen tokens must have been generated. None: any temperature is permitted.
    """

    environment: str
    vocabulary: int | None = None
    most_tokens: int | None = None
    token_rewards: bool = True
    temperature: float | None = None

    def check(self, episodes: Sequence[Episode], count: int, drawn: DrawnTokens | None, task: str) -> None:
        """Check the result of `Environment.run`.

        Args:
            count: Number of episodes that were requested.
            drawn: Record of the policy's tokens. None: chosen tokens are not checked against a record.
            task: Description of the task, for messages.

        Raises:
            MalformedEpisode: A check failed. The message names the environment, the episode and the first wrong token.
        """
        if not isinstance(episodes, Sequence):
            raise MalformedEpisode(
                f"environment {self.environment!r}, {task}: it returned {type(episodes).__name__}, not a list of "
                "episodes"
            )
        if len(episodes) != count:
            raise MalformedEpisode(
                f"environment {self.environment!r}, {task}: it returned {len(episodes)} episode(s), but must return "
                f"{count} (EpisodeContext.samples)"
            )
        again: Counter[bytes] = Counter()
        for number, episode in enumerate(episodes):
            try:
                problem = self._check_episode(episode, drawn, again)
            except Exception as error:  # classes of the environment may raise errors of any kind
                problem = f"reading it raised {type(error).__name__}: {error}"
            if problem:
                raise MalformedEpisode(
                    f"environment {self.environment!r}, {task}: episode {number} cannot be trained on: {problem}"
                )

    def _check_episode(self, episode: Episode, drawn: DrawnTokens | None, again: Counter[bytes]) -> str:
        """Describe the problem of an episode; empty if there is none."""
        if not isinstance(episode, Episode):
            return f"it is {type(episode).__name__}, not an Episode (enginehouse.engines.environment)"
        earlier = episode.earlier
        wrong_rows = (
            [row for row in earlier if not isinstance(row, Segment)] if isinstance(earlier, Sequence) else [earlier]
        )
        if wrong_rows:
            prefix = "" if wrong_rows[0] is earlier else "a list that holds "
            return (
                f"its earlier rows must be a list of Segments (Episode.earlier), not {prefix}"
                f"{type(wrong_rows[0]).__name__}"
            )
        before: list[tuple[np.ndarray, np.ndarray]] = []
        for number, row in enumerate(episode.rows):
            if problem := self._check_row(row, episode.finish, drawn, before, again):
                return f"row {number} of its {len(episode.rows)}: {problem}" if earlier else problem
        return _check_score(episode.score) or _check_text("its finish", episode.finish)

    def _check_row(
        self,
        row: Episode | Segment,
        finish: str,
        drawn: DrawnTokens | None,
        before: list[tuple[np.ndarray, np.ndarray]],
        again: Counter[bytes],
    ) -> str:
        """Describe the problem of a row; empty if there is none. Add the row to `before`.

        Args:
            finish: The `finish` of the row's episode.
            before: Tokens and mask of the episode's earlier rows.
            again: See `DrawnTokens.find_repeated_choice`.
        """
        columns = {}
        for name, kinds, entry in _COLUMNS:
            try:
                column = np.asarray(getattr(row, name))
            except Exception as error:
                return f"its {name} must be a flat list of numbers: {type(error).__name__}: {error}"
            if column.ndim != 1 or (len(column) and column.dtype.kind not in kinds):
                return f"its {name} must hold one {entry} per token, not {column.dtype} of shape {column.shape}"
            columns[name] = column
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            return f"its columns must have equal lengths, but it has {counts}"
        tokens, mask = columns["tokens"].astype(np.int64), columns["mask"].astype(np.bool_)
        logprobs, versions = columns["logprobs"].astype(np.float32), columns["versions"].astype(np.int64)
        problem = (
            self._check_tokens(tokens)
            or _check_choice(mask, finish)
            or _check_logprobs(logprobs)
            or (drawn.find_problem(tokens, mask, logprobs, versions, self.temperature) if drawn else "")
            or (drawn.find_repeated_choice(tokens, mask, before, again) if drawn and before else "")
            or self._check_token_rewards(row.token_rewards, mask)
            or next(filter(None, (_check_text(f"its {name}", getattr(row, name)) for name in _TEXTS)), "")
        )
        before.append((tokens, mask))
        return problem

    def _check_token_rewards(self, token_rewards: Any, mask: np.ndarray) -> str:
        if token_rewards is None:
            return ""
        if not self.token_rewards:
            return (
                "it has token_rewards, which the advantage of this run does not read: use an advantage that reads "
                "them, such as process_rewards (algorithm.advantage.name)"
            )
        try:
            rewards = np.asarray(token_rewards)
        except Exception as error:
            return f"its token_rewards must be a flat list of numbers: {type(error).__name__}: {error}"
        if rewards.dtype.kind not in "fiu" or rewards.shape != mask.shape:
            return (
                f"its token_rewards must be {len(mask)} numbers, one per token, not {rewards.dtype} of shape "
                f"{rewards.shape}"
            )
        wrong = ~np.isfinite(rewards.astype(np.float32)) | ((rewards != 0) & ~mask)
        if not wrong.any():
            return ""
        place = int(wrong.argmax())
        return f"the reward of its token {place} is {rewards[place]}, but must be " + (
            "finite" if mask[place] else "0, because the policy did not choose this token"
        )

    def _check_tokens(self, tokens: np.ndarray) -> str:
        if not len(tokens):
            return "it has no tokens"
        if self.most_tokens is not None and len(tokens) > self.most_tokens:
            return (
                f"it has {len(tokens)} tokens, but the models of this run read at most {self.most_tokens}: end the "
                "episode earlier"
            )
        unknown = tokens < 0
        if self.vocabulary is not None:
            unknown |= tokens >= self.vocabulary
        if unknown.any():
            place = int(unknown.argmax())
            known = "from 0 on" if self.vocabulary is None else f"0 to {self.vocabulary - 1}"
            return f"its token {place} is {tokens[place]}, but the models of this run only know the ids {known}"
        return ""


_COLUMNS = (
    ("tokens", "iu", "token id"),
    ("mask", "biu", "boolean"),
    ("logprobs", "fiu", "logprob"),
    ("versions", "iu", "weight version"),
)
"""Columns of an episode: name, permitted kinds of numpy dtypes, and a description of the entry for each token."""

_TEXTS = ("prompt", "response")


def _check_text(name: str, value: Any) -> str:
    return "" if isinstance(value, str) else f"{name} is {value!r}, not text"


def _check_choice(mask: np.ndarray, finish: str) -> str:
    if finish == FAILED:
        return f"its finish is {FAILED!r}, but some of its tokens are marked as chosen" if mask.any() else ""
    return "" if mask.any() else "none of its tokens is marked as chosen (Episode.mask)"


def _check_logprobs(logprobs: np.ndarray) -> str:
    finite = np.isfinite(logprobs)
    if finite.all():
        return ""
    place = int((~finite).argmax())
    return f"the logprob of its token {place} is {logprobs[place]}, but must be finite"


_NUMBERS = (int, float, np.integer, np.floating)


def _check_score(score: Any) -> str:
    reward = getattr(score, "reward", None)
    if isinstance(reward, bool) or not isinstance(reward, _NUMBERS):
        return f"its score is {score!r}, but must be a result of EpisodeContext.score or a Scored, such as Scored(1.0)"
    if not math.isfinite(np.float32(reward)):
        return f"its reward is {reward}, but must be finite"
    figures = getattr(score, "figures", None)
    if not isinstance(figures, Mapping):
        return f"the figures of its score must be a mapping from names to numbers, not {figures!r}"
    for name, value in figures.items():
        if problem := _check_text("the name of a figure of its score", name):
            return problem
        if is_reserved(name) or "/" in name:
            return f"its score has a figure {name!r}, which is a reserved name (docs/rewards.md)"
        if not isinstance(value, _NUMBERS) or not math.isfinite(value):
            return f"the figure {name!r} of its score is {value!r}, not a finite number"
    texts = ((f"the {name} of its score", getattr(score, name, None)) for name in ("failure", "answer"))
    return next(filter(None, (_check_text(name, value) for name, value in texts)), "")
