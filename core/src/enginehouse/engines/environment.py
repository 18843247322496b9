"""The protocol of an environment: what turns a task and a policy into episodes. Tokens in and tokens out, awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from enginehouse.engines.rollout import Completion, SamplingParams

__all__ = ["Environment", "Episode", "EpisodeContext", "Group", "Policy", "Score", "Scored", "Segment", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the data set, as often as it is drawn.

    Attributes:
        serial: counts the tasks of a run. What is random in its episodes depends on it, and on nothing of when they
            were made.
        prompt_ids: the prompt's tokens.
        prompt: the prompt as text, as given or as the chat template rendered it.
        messages: the chat messages of which the template rendered it, that of `data.system` too; None for a text.
        columns: the row's other columns.
    """

    serial: int
    prompt_ids: Sequence[int]
    prompt: str
    messages: Any
    columns: Mapping[str, Any]


class Policy(Protocol):
    """What an environment asks for tokens: the model that is trained, by any replica.

    Attributes:
        tokenizer: the model's, as of `transformers`.
        sampling: how it draws unless a call says otherwise, but for `n` and `seed`, which are a call's own.
    """

    tokenizer: Any
    sampling: SamplingParams

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Continue `tokens`; as the run is configured, unless `sampling` says otherwise.

        Raises:
            EnginehouseError: the engine refuses the request: it is too long, or not possible.
        """
        ...

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """`n` continuations of the same tokens, for the price of one prompt."""
        ...

    def branch(self, name: str) -> Policy:
        """The same model with other seeds: they depend on this policy's and on `name`, not on what others draw."""
        ...


class Score(Protocol):
    """The reward of a row."""

    @property
    def reward(self) -> float:
        """What is trained on."""
        ...

    @property
    def figures(self) -> Mapping[str, float]:
        """Others of the reward's figures, by name."""
        ...

    @property
    def failure(self) -> str:
        """Why the row has no reward, and counts as 0; empty where it has one."""
        ...

    @property
    def answer(self) -> str:
        """What the response answers, as text by which responses agree; empty where the reward looks for none."""
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A score that an environment gives by itself; a `Score`, whose attributes it says.

    Attributes:
        reward: what is trained on; finite.
        figures: numbers of its own, by name, each logged as the mean `reward/NAME`; docs/rewards.md says which names
            are taken.
        failure: why there is no reward, if it was to be asked for.
        answer: what the episode answers.
    """

    reward: float
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    answer: str = ""


class EpisodeContext(Protocol):
    """What an environment is given beside task and policy.

    Attributes:
        samples: how many episodes are asked for.
        most_tokens: how long a row may be, so that the models read it; None where that is not known.
    """

    samples: int
    most_tokens: int | None

    async def score(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Score]:
        """The configured reward of each row, whose values it gets by name; see docs/rewards.md.

        Raises:
            RewardError: there is no score, and the run is to end for it.
        """
        ...

    async def each(self, play: Callable[[int, Policy], Awaitable[Episode]]) -> Sequence[Episode]:
        """Play `samples` episodes by themselves, all at once: one that fails does not end the others.

        Each has `rollout.episode_seconds` to itself, and one that fails is dealt with as `rollout.on_failure` says.
        With `mask` its place has the prompt alone, no token of it chosen, and a reward of 0 that counts in its group.

        Args:
            play: makes an episode, given its number and what it is to ask for tokens: the seeds of that depend on the
                number, and on how often the episode was tried, not on time.

        Returns:
            Those that are left, in the order of their numbers; at least one.

        Raises:
            Exception: the group is dropped, or the run ends: to be left alone.
        """
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """A row of an episode that has several: before its history was summarised, say, or another branch.

    Attributes:
        tokens: as of `Episode`, as all others.
        mask: true on a token in one row only where several begin alike.
        logprobs: 0 where `mask` is false.
        versions: of no meaning where `mask` is false.
        prompt: what was asked, as text, for people.
        response: what came of it, as text, for people.
        token_rewards: None: there are none.
    """

    tokens: Sequence[int] | np.ndarray
    mask: Sequence[bool] | np.ndarray
    logprobs: Sequence[float] | np.ndarray
    versions: Sequence[int] | np.ndarray
    prompt: str = ""
    response: str = ""
    token_rewards: Sequence[float] | np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One row to train on: any interleaving of tokens that were given and tokens that the policy chose.

    An episode may have other rows, `earlier`. It has one reward all the same, which all its rows are credited with, and
    counts once in its group.

    Attributes:
        tokens: all of them.
        mask: one a token: whether the policy chose it, so that it is trained on.
        logprobs: one a token, as the rollout reported it; 0 where `mask` is false.
        versions: one a token: weight version it was drawn from; of no meaning where `mask` is false. An engine does
            not say at which token a version changed: the last of a completion has the newest, the others the oldest.
        score: its reward, by `EpisodeContext.score` or the environment's own (`Scored`).
        prompt: what was asked, as text, for people.
        response: what came of it, as text, for people.
        finish: why it ended: `"stop"`, `"length"`, or a word of the environment's; `"failed"`: it could not be made.
        token_rewards: one a token, beside the score's reward, which is that of the last one; 0 where `mask` is false.
            Only some advantages read them, as `process_rewards` does. None: there are none.
        earlier: its other rows, in the order in which they were drawn.
    """

    tokens: Sequence[int] | np.ndarray
    mask: Sequence[bool] | np.ndarray
    logprobs: Sequence[float] | np.ndarray
    versions: Sequence[int] | np.ndarray
    score: Score
    prompt: str = ""
    response: str = ""
    finish: str = "stop"
    token_rewards: Sequence[float] | np.ndarray | None = None
    earlier: Sequence[Segment] = ()

    @property
    def rows(self) -> Sequence[Episode | Segment]:
        """All its rows: `earlier` and itself."""
        return *self.earlier, self


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of a task, which are judged against each other.

    Attributes:
        task: which it is.
        episodes: those that are left.
        baseline: the reward of a greedy one beside them, where the advantage compares with it.
    """

    task: Task
    episodes: Sequence[Episode]
    baseline: float | None = None


class Environment(Protocol):
    """Makes the episodes of a task, which are judged against each other. Any number of calls run at once.

    A process makes one, `Class(**environment.arguments)`, and plays training and validation by it. It may have a static
    method `check(arguments, columns)`: `plan` calls it with the arguments, and with the names of the rows' columns
    besides the prompt, None where they are not known; it raises `ConfigError` where a run could not go well. A static
    method `check_tokenizer(arguments, tokenizer)` is called alike, with the model's tokenizer, and raises a `UserError`
    where that cannot render what the environment says, as tool calls. It may say by `needs_reward` whether it asks for
    the configured reward: with True, a config without a reward is refused; with False, as it never asks, a reward is
    noted as unused; None says that it depends.

    What it returns is checked (`enginehouse_rl.episodes.checks`): a chosen token has to be one that `policy` drew in
    this call of `run`, after just the tokens that stand before it, with the logprob that it was drawn with, at the
    run's temperature. Anything malformed is a mistake of the environment's, and ends the run.

    Where `run` raises, or takes longer than `rollout.episode_seconds`, all its episodes have failed, and
    `rollout.on_failure` says what becomes of the task. `EpisodeContext.each` has them fail one by one.
    """

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """Play a task.

        Args:
            task: a row of the data.
            policy: to be asked for tokens.
            context: how many episodes are wanted, and the reward.

        Returns:
            `context.samples` episodes, or those that `context.each` left, in an order that does not depend on time.
        """
        ...
