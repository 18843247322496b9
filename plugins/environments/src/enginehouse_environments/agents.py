"""Any agent that asks a model at an OpenAI URL: it runs unchanged, and what it asks is recorded.

The agent is told a URL and a key of its own. It asks as often as it likes, in as many conversations as it likes, and
returns its answer, which the configured reward scores, or a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from enginehouse.engines.environment import Scored
from enginehouse.errors import ConfigError, EnginehouseError, UserError, nearest
from enginehouse.plugin import ResolveError, resolve
from enginehouse_environments.calls import FORMATS
from enginehouse_environments.dialogue import ChatTemplate
from enginehouse_environments.endpoint import MODEL, Endpoint, Served
from enginehouse_environments.recording import Limits, Recording, Templates
from enginehouse_environments.threads import in_thread

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Score, Task
    from enginehouse_environments.recording import Answer

log = logging.getLogger(__name__)

LIMIT = "limit"
"""Why an episode ended whose agent did not go on after a limit."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent is given: plain data, which may be handed to another process.

    Attributes:
        base_url: of the endpoint, with `/v1`.
        api_key: of this episode. It is good until the agent returns.
        model: what the model is called.
        messages: the prompt as chat messages; of a prompt that is text, one of the user's.
        prompt: the prompt as text, as given or as the chat template rendered it.
        columns: the row's other columns, by name.
    """

    base_url: str
    api_key: str
    model: str
    messages: list[dict[str, Any]]
    prompt: str
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which programs and libraries find the endpoint, for a process of its own."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


class OpenAIAgent:
    """An agent of yours that asks the policy through an OpenAI endpoint.

    Args:
        agent: `module:function`, called with an `AgentTask`; awaited, or if it is a plain function run in a thread.
        arguments: given to it by name.
        max_calls: most requests of an episode.
        max_tokens: most tokens that an episode may draw. Unset: any number.
        max_row_tokens: most tokens of one conversation. Unset: what the models read.
        ignored: parameters of requests that are not heeded, as `temperature`.
        format: how the model writes calls: `auto`: as its chat template does; or the name of a form.
        template: what the chat template is given by name, as `enable_thinking`.
    """

    def __init__(
        self,
        agent: str,
        arguments: dict[str, Any] | None = None,
        max_calls: Annotated[int, Field(gt=0)] = 100,
        max_tokens: Annotated[int, Field(gt=0)] | None = None,
        max_row_tokens: Annotated[int, Field(gt=0)] | None = None,
        ignored: Sequence[str] = (),
        format: str = "auto",
        template: dict[str, Any] | None = None,
    ):
        self._agent, self._arguments = found(agent, arguments or {}), dict(arguments or {})
        self._agents = RecordedAgents(Limits(max_calls, max_tokens, max_row_tokens), ignored, format, template)

    needs_reward = None  # a text that an agent returns is scored, a reward is not

    @staticmethod
    def check(arguments: Mapping[str, Any], columns: object) -> None:
        """Refuse an agent that there is not or that cannot be called so, and a form of calls that there is not."""
        found(arguments["agent"], arguments.get("arguments") or {})
        if (name := arguments.get("format", "auto")) not in ("auto", *FORMATS):
            raise ConfigError(f"format: there is none {name!r}: {nearest(name, ['auto', *FORMATS])}")

    @staticmethod
    def check_tokenizer(arguments: Mapping[str, Any], tokenizer: Any) -> None:
        """Refuse a tokenizer without a chat template."""
        ChatTemplate(tokenizer, None, arguments.get("template"))

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """See the protocol."""
        return await self._agents.play(task, policy, context, self._acted)

    async def _acted(self, task: AgentTask) -> Any:
        if inspect.iscoroutinefunction(inspect.unwrap(self._agent)):
            return await self._agent(task, **self._arguments)
        returned = await in_thread(lambda: self._agent(task, **self._arguments), "agent")
        return await returned if inspect.isawaitable(returned) else returned


def found(agent: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that a config names.

    Raises:
        ConfigError: there is none, or it does not take a task and these arguments.
    """
    try:
        function = resolve(agent)
    except ResolveError as error:
        raise ConfigError(f"agent: {error}") from error
    if not callable(function):
        raise ConfigError(f"agent: {agent!r} is {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(f"agent: {agent} is called with a task and arguments.arguments by name: {error}") from error
    return function


class RecordedAgents:
    """Plays tasks by agents, at an endpoint that is served from the first time on, on the loop that plays.

    Args:
        limits: of an episode.
        ignored: as of `OpenAIAgent`, as all others.
        format: how the model writes calls.
        template: what the chat template is given.
    """

    def __init__(
        self,
        limits: Limits,
        ignored: Sequence[str] = (),
        format: str = "auto",
        template: Mapping[str, Any] | None = None,
    ):
        self._limits, self._ignored, self._template = limits, tuple(ignored), (format, template)
        self._warned = False
        self._here: tuple[Any, Templates, Endpoint, Served] | None = None

    async def play(
        self, task: Task, policy: Policy, context: EpisodeContext, act: Callable[[AgentTask], Awaitable[Any]]
    ) -> Sequence[Episode]:
        """The episodes of a task.

        Args:
            task: what to play.
            policy: of the task.
            context: of the task.
            act: the agent; what it returns is as `scored` says.

        Raises:
            UserError: the tokenizer has no chat template, or the agent returned what is no answer.
        """
        templates, endpoint, served = self._served(policy.tokenizer)
        row = self._limits.row_tokens
        limits = replace(self._limits, row_tokens=context.most_tokens if row is None else row)

        async def play(number: int, policy: Policy) -> Episode:
            recording = Recording(policy, templates, limits)
            with endpoint.recorded(recording) as key:
                messages = [dict(one) for one in task.messages or [{"role": "user", "content": task.prompt}]]
                told = AgentTask(served.url, key, MODEL, messages, task.prompt, dict(task.columns))
                returned = await _first(act(told), recording)
            self._warn(recording.temperature, policy.sampling.temperature)
            return await _episode(returned, recording, task, context)

        return await context.each(play)

    def _warn(self, asked: float | None, own: float) -> None:
        """Say once that what an agent asks for is not trained on. A greedy validation tells nothing of that."""
        if asked is None or not own or self._warned:
            return
        self._warned = True
        log.warning(
            "the agent asks at temperature %g, and the run draws at %g: what is drawn so is not trained on. Have it "
            "ignored, environment.arguments.ignored=[temperature], or the agent leave it away",
            asked, own,
        )  # fmt: skip

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint, while something is played."""
        assert self._here is not None
        return self._here[2]

    def _served(self, tokenizer: Any) -> tuple[Templates, Endpoint, Served]:
        loop = asyncio.get_running_loop()
        if self._here is None or self._here[0] is not loop:  # a run has one loop, tests have many
            templates = Templates(tokenizer, *self._template)
            templates.of((), {})
            endpoint = Endpoint(tokenizer, self._ignored)
            self._here = loop, templates, endpoint, Served(endpoint.app)
        return self._here[1:]


async def _episode(returned: Any, recording: Recording, task: Task, context: EpisodeContext) -> Episode:
    """The episode of an agent that returned this."""
    answers = [one for one in recording.answers if one.trained]
    if not answers:
        did = f"returned {str(returned)[:60]!r}, and asked the policy nothing at its base_url"
        if isinstance(returned, _Stopped):
            did = f"ended at a limit before anything was drawn: {returned.limit}"
        raise EnginehouseError(f"the agent {did}: there is nothing to train on")
    if isinstance(returned, _Stopped):
        return recording.episode(Scored(0.0, failure=f"the agent ended at a limit: {returned.limit}"), LIMIT)
    return recording.episode(await scored(returned, task, context, answers[-1]), answers[-1].finish_reason)


async def scored(returned: Any, task: Task, context: EpisodeContext, last: Answer) -> Score:
    """The score of what an agent returned.

    Args:
        returned: the answer, a text, which the configured reward scores; or a reward; or a dict of `reward`, figures of
            its own, and `answer`, a text.
        task: what was played.
        context: scores.
        last: the last answer, whose tokens and end stand for the text's.

    Raises:
        UserError: it returned something else.
    """
    if isinstance(returned, str):
        row = {"prompt": task.prompt, "messages": task.messages, "response": returned}
        ended = {"response_tokens": len(last.completion.token_ids), "finish_reason": last.finish_reason}
        (score,) = await context.score([{**task.columns, **row, **ended}])
        return score
    said = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    answer = said.pop("answer", "")
    numbers = {}
    for name, value in said.items():
        with suppress(TypeError, ValueError):
            numbers[name] = float(value)
    if "reward" not in numbers or len(numbers) < len(said) or not isinstance(answer, str):
        raise UserError(
            f"the agent returned {str(returned)[:80]!r}: a text is wanted, its answer, which the reward of the config "
            'scores; or a reward, a number; or a dict, {"reward": 1.0, "answer": "text", "figure": 2.0}'
        )
    return Scored(numbers.pop("reward"), numbers, "", answer)


@dataclass(frozen=True, slots=True)
class _Stopped:
    """In place of what an agent returns that raised after a limit."""

    limit: str


async def _first(acting: Awaitable[Any], recording: Recording) -> Any:
    """What the agent returns; raises what the policy does, as soon as it does."""

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            return await acting, None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # what is no `Exception` would end the event loop
            return None, error

    agent = asyncio.create_task(outcome())
    try:
        await asyncio.wait((agent, recording.failed), return_when=asyncio.FIRST_COMPLETED)
    finally:
        agent.cancel()
    if recording.failed.done():
        recording.failed.result()
    returned, error = agent.result()
    if error is None:
        return returned
    if recording.limit and isinstance(error, Exception):
        return _Stopped(recording.limit)
    raise error
