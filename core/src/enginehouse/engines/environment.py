"""The protocol of an environment, which turns a task and a policy into episodes of tokens. It is asynchronous."""

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
    """A row of the data set. A row that is used twice makes two tasks.

    Attributes:
        serial: number of the task in the run. Randomness in its episodes may depend on it, but never on time.
        prompt_ids: token ids of the prompt.
        prompt: the prompt as text, as given or as the chat template rendered it.
        messages: the chat messages that the template rendered, `data.system` included. None if the prompt is text.
        columns: the row's other columns by name.
    """

    serial: int
    prompt_ids: Sequence[int]
    prompt: str
    messages: Any
    columns: Mapping[str, Any]


class Policy(Protocol):
    """The trained model, from which an environment requests tokens. Any rollout replica may answer.

    Attributes:
        tokenizer: the model's tokenizer, from `transformers`.
        sampling: default sampling parameters of a call. `n` and `seed` are always set per call.
    """

    tokenizer: Any
    sampling: SamplingParams

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Continue `tokens`, with the run's sampling parameters unless `sampling` is given.

        Raises:
            EnginehouseError: if the engine rejects the request, for example because it is too long.
        """
        ...

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """Return `n` continuations of the same tokens. The prompt is computed once."""
        ...

    def branch(self, name: str) -> Policy:
        """Return the same model with other seeds, which depend only on this policy's seed and on `name`."""
        ...


class Score(Protocol):
    """The reward of a row."""

    @property
    def reward(self) -> float:
        """The value to train on."""
        ...

    @property
    def figures(self) -> Mapping[str, float]:
        """Further numbers that the reward computed, by name."""
        ...

    @property
    def failure(self) -> str:
        """Reason why the row has no reward; its reward then counts as 0. Empty if the row has a reward."""
        ...

    @property
    def answer(self) -> str:
        """The answer that the reward found in the response, as text. Two responses agree if these texts are equal.
        Empty if the reward does not look for an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A `Score` that an environment computes itself.

    Attributes:
        reward: the value to train on; finite.
        figures: other numbers by name. Each is logged as the mean `reward/NAME`. docs/rewards.md lists the reserved
            names.
        failure: reason why there is no reward. Empty if there is one.
        answer: the answer in the episode, as text.
    """

    reward: float
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    answer: str = ""


class EpisodeContext(Protocol):
    """The part of a run that an environment gets besides task and policy.

    Attributes:
        samples: number of episodes to return.
        most_tokens: maximum number of tokens of a row that the models read; None if unknown.
    """

    samples: int
    most_tokens: int | None

    async def score(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Score]:
        """Return the configured reward of each row. The reward gets the row's values by name; see docs/rewards.md.

        Raises:
            RewardError: if there is no score and the run must end.
        """
        ...

    async def each(self, play: Callable[[int, Policy], Awaitable[Episode]]) -> Sequence[Episode]:
        """Play `samples` episodes separately and concurrently. A failed episode does not end the others.

        The time limit of each episode is `rollout.episode_seconds`. `rollout.on_failure` decides what happens to a
        failed episode. If it is `mask`, the prompt replaces the episode: no token counts as chosen, and a reward of 0
        counts in the group.

        Args:
            play: makes one episode from its number and a policy. The policy's seeds depend on that number and on how
                often the episode was tried, not on time.

        Returns:
            The remaining episodes in order of their numbers; at least one.

        Raises:
            Exception: if the group is dropped or the run ends. Do not catch it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """One of several rows of an episode, for example the history before it was summarised, or another branch.

    All fields have the meaning of the same fields of `Episode`.

    Attributes:
        tokens: all token ids of the row.
        mask: True for the tokens that the policy chose. If several rows begin with the same tokens, each of these
            tokens may be True in the mask of only one row.
        logprobs: 0 where `mask` is False.
        versions: meaningless where `mask` is False.
        prompt: the question as text, for display.
        response: the response as text, for display.
        token_rewards: None if there are none.
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
    """One row to train on. Given tokens and tokens that the policy chose may alternate.

    An episode may have further rows, `earlier`. It still has one reward, which is credited to all its rows, and counts
    once in its group.

    Attributes:
        tokens: all token ids of the row, `(tokens,)`. The other columns have the same length.
        mask: True for the tokens that the policy chose. Training uses only these.
        logprobs: log-probability of each token as the rollout reported it, in nats; 0 where `mask` is False.
        versions: weight version that sampled each token; meaningless where `mask` is False. Engines do not report at
            which token the version changed. The last token of a completion therefore has the completion's newest
            version, and all its other tokens have the oldest.
        score: the reward, from `EpisodeContext.score` or the environment's own (`Scored`).
        prompt: the question as text, for display.
        response: the response as text, for display.
        finish: reason of the end: `"stop"`, `"length"` or the environment's own word; `"failed"` if the episode failed.
        token_rewards: reward of each token, in addition to the score's reward, which belongs to the last token; 0 where
            `mask` is False. Only some advantages read them, such as `process_rewards`. None if there are none.
        earlier: the other rows, in the order in which they were generated.
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
        """All rows: `earlier`, then this one."""
        return *self.earlier, self


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of a task. Advantages compare them with each other.

    Attributes:
        task: the task.
        episodes: the episodes that did not fail.
        baseline: the reward of the prompt's greedy response; None if the run generates none.
    """

    task: Task
    episodes: Sequence[Episode]
    baseline: float | None = None


class Environment(Protocol):
    """Makes the episodes of a task, which are compared with each other. Any number of calls of `run` run at once.

    A process makes one object, `Class(**environment.arguments)`, for training and validation. The class may have:

    * a static method `check(arguments, columns)`, which `plan` calls. `columns` are the names of the rows' columns
      besides the prompt, or None if they are unknown. It raises `ConfigError` if a run could not succeed.
    * a static method `check_tokenizer(arguments, tokenizer)`, which `plan` calls with the model's tokenizer. It raises
      a `UserError` if the tokenizer cannot render the environment's messages, such as tool calls.
    * an attribute `needs_reward`. True: a config without a reward is rejected. False: `plan` notes that a configured
      reward is unused. None: a config may have a reward or not.

    Every returned episode is checked (`enginehouse_rl.episodes.checks`). A chosen token must be one that `policy`
    sampled in this call of `run`, directly after the tokens before it, with the same logprob, at the run's
    temperature. A malformed episode is an error of the environment and ends the run.

    If `run` raises, or takes longer than `rollout.episode_seconds`, all its episodes have failed, and
    `rollout.on_failure` decides about the task. `EpisodeContext.each` lets episodes fail separately.
    """

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """Play a task.

        Args:
            task: a row of the data set.
            policy: the model to ask for tokens.
            context: the number of episodes, and the configured reward.

        Returns:
            `context.samples` episodes, or those that `context.each` returned, in an order that does not depend on time.
        """
        ...
