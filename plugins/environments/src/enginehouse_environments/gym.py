from __future__ import annotations

import importlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import gymnasium
from pydantic import Field

from enginehouse.engines.environment import Scored
from enginehouse.errors import ConfigError, DataError, EnginehouseError, nearest
from enginehouse.plugin import ResolveError, resolve
from enginehouse_environments.dialogue import ChatTemplate, Dialogue
from enginehouse_environments.game_processes import GameProcesses, InProcessGames

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Task


class Gym:
    """A `gymnasium` environment as a chat: each observation is a message, and each answer is an action.

    Args:
        id: id as in `gymnasium.make`, or `"module:id"` if the module registers the environment.
        make: other arguments of `gymnasium.make`, such as `{render_mode: ansi, is_slippery: false}`.
        observation: `"module:function"`, which returns the text of an observation. None: the environment's rendering if
            that is text (`render_mode: ansi`), else the printed observation.
        actions: names of the actions 0, 1, ...; or `"module:function"`, which returns the action in a text, or None if
            the text has none. None: a whole number, or the text itself if the environment takes texts.
        seed: column with the seed with which all episodes of a task begin. None: the task's serial number.
        max_turns: maximum number of answers of an episode.
        unparsed: number added to the reward for an answer without an action, after which the model answers again. None:
            such an answer ends the episode.
        token_rewards: give each answer its own reward, besides the score, for advantages that read rewards of tokens.
        processes: number of processes that take steps, for environments with slow steps; 0: steps are taken in this
            process.
        step_seconds: time limit for a step. If it is exceeded, the process is killed and its episodes fail.
    """

    def __init__(
        self,
        id: str,
        make: dict[str, Any] | None = None,
        observation: str | None = None,
        actions: list[str] | str | None = None,
        seed: str | None = None,
        max_turns: Annotated[int, Field(ge=1)] = 50,
        unparsed: float | None = None,
        token_rewards: bool = False,
        processes: Annotated[int, Field(ge=0)] = 0,
        step_seconds: Annotated[float, Field(gt=0)] = 60.0,
    ):
        rules = Rules(id, make or {}, observation, actions)
        self._seed, self._max_turns, self._unparsed = seed, max_turns, unparsed
        self._token_rewards = token_rewards
        self._games = GameProcesses(rules.begin, processes, step_seconds) if processes else InProcessGames(rules.begin)
        self._names = itertools.count()

    needs_reward = False

    @staticmethod
    def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
        """Raise `ConfigError` if the environment, a function or a column does not exist."""
        if (seed := arguments.get("seed")) is not None and columns is not None and seed not in columns:
            raise ConfigError(f"seed: the data has no column {seed!r}. {nearest(seed, columns)}")
        module, _, name = arguments["id"].rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            gymnasium.spec(name)
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(f"gymnasium has no environment {arguments['id']!r}: {error}") from error
        for key in ("observation", "actions"):
            if isinstance(arguments.get(key), str):
                try:
                    resolve(arguments[key])
                except ResolveError as error:
                    raise ConfigError(f"{key}: {error}") from error

    @staticmethod
    def check_tokenizer(arguments: Mapping[str, Any], tokenizer: Any) -> None:
        """Raise `UserError` for a tokenizer without a chat template."""
        ChatTemplate(tokenizer)

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        template, seed = ChatTemplate(policy.tokenizer), self._read_seed(task)

        async def play(number: int, policy: Policy) -> Episode:
            name = next(self._names)
            try:
                dialogue = Dialogue(template, _add_to_messages(task, await self._games.begin(name, seed)))
                most = context.most_tokens or math.inf
                if (length := len(dialogue.transcript.tokens)) >= most:
                    raise EnginehouseError(
                        f"the prompt with the first observation has {length} tokens, but the models of this run read "
                        f"only {most}, which leaves none for an answer"
                    )
                return await self._play(name, dialogue, policy, most)
            finally:
                self._games.end(name)

        return await context.each(play)

    async def _play(self, name: int, dialogue: Dialogue, policy: Policy, most: float) -> Episode:
        """Play until the game is over or a limit is reached."""
        total, finish = 0.0, "length"
        while (room := most - len(dialogue.transcript.tokens)) > 0:
            await dialogue.answer(policy, int(min(room, policy.sampling.max_tokens)))
            step: Step = await self._games.step(name, dialogue.last)
            reward = step.reward if step.is_action else self._unparsed or 0.0
            total += reward
            if self._token_rewards:
                dialogue.transcript.add_reward(reward)
            if reason := self._end_reason(step, len(dialogue.answers)):
                finish = reason
                break
            if not dialogue.say([{"role": "user", "content": step.text}], most - 1):
                break
        figures = {"return": total, "turns": len(dialogue.answers)}
        return dialogue.episode(Scored(0.0 if self._token_rewards else total, figures), finish)

    def _end_reason(self, step: Step, turns: int) -> str:
        """Return the finish reason if the episode ends with this step, else an empty text."""
        if not step.is_action and self._unparsed is None:
            return "unparsed"
        return "stop" if step.is_over else "turns" if turns == self._max_turns else ""

    def _read_seed(self, task: Task) -> int:
        if self._seed is None:
            return task.serial
        if self._seed not in task.columns:
            choices = nearest(self._seed, task.columns)
            raise DataError(f"environment.arguments.seed: the data has no column {self._seed!r}. {choices}")
        seed = task.columns[self._seed]
        if not isinstance(seed, int):
            raise DataError(
                f"environment.arguments.seed: the column {self._seed!r} must hold a whole number, not {seed!r}"
            )
        return seed


@dataclass(frozen=True, slots=True)
class Step:
    text: str  # the observation
    reward: float = 0.0
    is_over: bool = False
    is_action: bool = True  # False: the answer had no action, and nothing was done


@dataclass(frozen=True, slots=True)
class Rules:
    """The arguments of `Gym` that define the game and its texts. May be sent to other processes."""

    id: str
    make: Mapping[str, Any] = field(default_factory=dict)
    observation: str | None = None
    actions: Sequence[str] | str | None = None

    def begin(self, seed: int) -> GymGame:
        return GymGame(self, seed)


class GymGame:
    """A game in progress, played with texts. `text` is the first observation."""

    def __init__(self, rules: Rules, seed: int):
        self._rules = rules
        self._show: Callable[[Any], str] | None = resolve(rules.observation) if rules.observation else None
        self._game = gymnasium.make(rules.id, **rules.make)
        observation, _ = self._game.reset(seed=seed)
        self._game.action_space.seed(seed)
        self.text = self._describe(observation)

    def step(self, answer: str) -> Step:
        """Take the action in an answer."""
        action = self._find_action(answer)
        if action is None:
            return Step(f"no action: {self._describe_expectation()}", is_action=False)
        observation, reward, terminated, truncated, _ = self._take(action, answer)
        return Step(self._describe(observation), float(reward), bool(terminated or truncated))

    def _take(self, action: Any, answer: str) -> tuple[Any, ...]:
        """Step the game. If it raises an error because it does not know the action, explain that."""
        try:
            return self._game.step(action)
        except Exception as error:
            if self._game.action_space.contains(action):
                raise
            raise ValueError(
                f"{self._rules.id} takes {self._game.action_space}, but environment.arguments.actions gave {action!r} "
                f"for the answer {answer[:80]!r}"
            ) from error

    def end(self) -> None:
        self._game.close()

    def _describe(self, observation: Any) -> str:
        if self._show is not None:
            return self._show(observation)
        if self._game.render_mode == "ansi":
            return strip_terminal_codes(str(self._game.render()))
        return str(observation)

    def _find_action(self, answer: str) -> Any:
        """Return the last action in an answer, or None if the answer has none that the game knows."""
        actions, space = self._rules.actions, self._game.action_space
        if isinstance(actions, str):
            return resolve(actions)(answer)
        if actions is not None:
            names = "|".join(re.escape(name) for name in sorted(actions, key=len, reverse=True))
            matches = re.findall(rf"(?<!\w)(?:{names})(?!\w)", answer, re.IGNORECASE)
            return [name.lower() for name in actions].index(matches[-1].lower()) if matches else None
        if isinstance(space, gymnasium.spaces.Text):
            return answer
        numbers = re.findall(r"-?\d+", answer)
        return int(numbers[-1]) if numbers and space.contains(int(numbers[-1])) else None

    def _describe_expectation(self) -> str:
        actions = self._rules.actions
        if isinstance(actions, str) or actions is None:
            return f"an answer of {self._game.action_space}"
        return f"one of {', '.join(actions)}"


def strip_terminal_codes(rendered: str) -> str:
    r"""Remove terminal codes from a text, and put brackets around text that they highlighted, such as the walker in
    FrozenLake.

    >>> strip_terminal_codes("\n\x1b[41mS\x1b[0mFFF")
    '[S]FFF'
    """
    brackets = re.sub(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m", r"[\1]", rendered, flags=re.DOTALL)
    return re.sub(r"\x1b\[[0-9;]*m", "", brackets).strip()


def _add_to_messages(task: Task, text: str) -> list[Mapping[str, Any]]:
    """Return the task's messages, with the first observation added at the end of the user's message."""
    messages: list[Mapping[str, Any]] = list(task.messages or [{"role": "user", "content": task.prompt}])
    if messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n{text}".strip()}]
