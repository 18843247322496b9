"""Runs any agent that uses a model through an OpenAI URL, unchanged, and records its requests.

The agent gets a URL and a key. It may send any number of requests in any number of conversations. It returns an answer
or a reward. The configured reward scores an answer.
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
from enginehouse_environments.endpoint import MODEL, AgentEndpoint, AppServer
from enginehouse_environments.recording import Limits, Recording, Templates
from enginehouse_environments.threads import run_in_thread

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Score, Task
    from enginehouse_environments.recording import RecordedAnswer

log = logging.getLogger(__name__)

LIMIT = "limit"
"""Finish reason of an episode whose agent raised an error after the episode had reached a limit."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of an agent: plain data, which may be sent to another process.

    Attributes:
        base_url: URL of the endpoint, with `/v1`.
        api_key: key of the episode, valid until the agent returns.
        model: name of the model.
        messages: the prompt as chat messages; a text prompt is one user message.
        prompt: the prompt as text, unchanged or as the chat template renders it.
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
        """Environment variables for an agent's process, by which programs find the endpoint."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


class OpenAIAgent:
    """An agent that you write, and that uses the policy through an OpenAI endpoint.

    Args:
        agent: `module:function`, called with an `AgentTask`. An `async` function is awaited; any other runs in a
            thread.
        arguments: keyword arguments of the function.
        max_calls: maximum number of requests of an episode.
        max_tokens: maximum number of tokens that an episode may generate. Unset: any number.
        max_row_tokens: maximum number of tokens of one conversation. Unset: the context length of the models.
        ignored: parameters of requests that are ignored, such as `temperature`.
        format: format in which the model writes tool calls. `auto`: as in its chat template; otherwise the name of a
            format.
        template: arguments of the chat template by name, such as `enable_thinking`.
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
        self._agent, self._arguments = load_agent(agent, arguments or {}), dict(arguments or {})
        self._agents = RecordedAgents(Limits(max_calls, max_tokens, max_row_tokens), ignored, format, template)

    needs_reward = None  # only if the agent returns a text

    @staticmethod
    def check(arguments: Mapping[str, Any], columns: object) -> None:
        """Raise `ConfigError` if the agent cannot be imported or called, or the format of tool calls is unknown."""
        load_agent(arguments["agent"], arguments.get("arguments") or {})
        if (name := arguments.get("format", "auto")) not in ("auto", *FORMATS):
            raise ConfigError(f"format: unknown format of tool calls {name!r}. {nearest(name, ['auto', *FORMATS])}")

    @staticmethod
    def check_tokenizer(arguments: Mapping[str, Any], tokenizer: Any) -> None:
        """Raise `UserError` for a tokenizer without a chat template."""
        ChatTemplate(tokenizer, None, arguments.get("template"))

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        return await self._agents.play(task, policy, context, self._call_agent)

    async def _call_agent(self, task: AgentTask) -> Any:
        if inspect.iscoroutinefunction(inspect.unwrap(self._agent)):
            return await self._agent(task, **self._arguments)
        returned = await run_in_thread(lambda: self._agent(task, **self._arguments), "agent")
        return await returned if inspect.isawaitable(returned) else returned


def load_agent(agent: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that a config names.

    Raises:
        ConfigError: there is no such function, or it does not take a task and these arguments.
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
        raise ConfigError(f"agent: {agent} cannot be called with a task and arguments.arguments: {error}") from error
    return function


class RecordedAgents:
    """Lets agents play tasks, through an endpoint that the running loop serves from the first task on.

    `ignored`, `format` and `template` have the same meaning as in `OpenAIAgent`.
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
        self._serving: tuple[Any, Templates, AgentEndpoint, AppServer] | None = None

    async def play(
        self, task: Task, policy: Policy, context: EpisodeContext, act: Callable[[AgentTask], Awaitable[Any]]
    ) -> Sequence[Episode]:
        """Return the episodes of a task. The agent `act` plays it, and returns a value for `score_value`.

        Raises:
            UserError: the tokenizer has no chat template, or the agent returned an invalid value.
        """
        templates, endpoint, server = self._serve(policy.tokenizer)
        limits = self._limits
        if limits.row_tokens is None:
            limits = replace(limits, row_tokens=context.most_tokens)

        async def play(number: int, policy: Policy) -> Episode:
            recording = Recording(policy, templates, limits)
            with endpoint.record(recording) as key:
                messages = [dict(message) for message in task.messages or [{"role": "user", "content": task.prompt}]]
                agent_task = AgentTask(server.url, key, MODEL, messages, task.prompt, dict(task.columns))
                returned = await _await_agent(act(agent_task), recording)
            self._warn(recording.temperature, policy.sampling.temperature)
            return await _make_episode(returned, recording, task, context)

        return await context.each(play)

    def _warn(self, requested: float | None, configured: float) -> None:
        """Warn once if the agent requests another temperature than the run has, because such tokens are not trained on.

        There is no warning in a validation that samples greedily.
        """
        if requested is None or not configured or self._warned:
            return
        self._warned = True
        log.warning(
            "the agent asks for temperature %g, but the run samples at %g, so these tokens are not trained on. Set "
            "environment.arguments.ignored=[temperature], or remove the temperature from the agent's requests",
            requested, configured,
        )  # fmt: skip

    @property
    def endpoint(self) -> AgentEndpoint:
        assert self._serving is not None
        return self._serving[2]

    def _serve(self, tokenizer: Any) -> tuple[Templates, AgentEndpoint, AppServer]:
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving[0] is not loop:  # a run has one loop, tests have many
            templates = Templates(tokenizer, *self._template)
            templates.get((), {})
            endpoint = AgentEndpoint(tokenizer, self._ignored)
            self._serving = loop, templates, endpoint, AppServer(endpoint.app)
        return self._serving[1:]


async def _make_episode(returned: Any, recording: Recording, task: Task, context: EpisodeContext) -> Episode:
    """Return the episode of an agent. The value that the agent returned determines the score."""
    answers = [answer for answer in recording.answers if answer.trained]
    if not answers:
        did = f"returned {str(returned)[:60]!r} without a request to the policy at its base_url"
        if isinstance(returned, _Stopped):
            did = f"ended at a limit before anything was generated: {returned.limit}"
        raise EnginehouseError(f"the agent {did}: there is nothing to train on")
    if isinstance(returned, _Stopped):
        return recording.episode(Scored(0.0, failure=f"the agent ended at a limit: {returned.limit}"), LIMIT)
    return recording.episode(await score_value(returned, task, context, answers[-1]), answers[-1].finish_reason)


async def score_value(returned: Any, task: Task, context: EpisodeContext, last: RecordedAnswer) -> Score:
    """Return the score for an agent's returned value.

    Args:
        returned: an answer as text, which the configured reward scores; or a reward; or a dict of `reward`, further
            numbers, and the text `answer`.
        task: the task that was played.
        context: scores a text.
        last: the last answer, whose token count and finish reason the reward gets.

    Raises:
        UserError: the value is something else.
    """
    if isinstance(returned, str):
        row = {"prompt": task.prompt, "messages": task.messages, "response": returned}
        end = {"response_tokens": len(last.completion.token_ids), "finish_reason": last.finish_reason}
        (score,) = await context.score([{**task.columns, **row, **end}])
        return score
    values = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    answer = values.pop("answer", "")
    numbers = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            numbers[name] = float(value)
    if "reward" not in numbers or len(numbers) < len(values) or not isinstance(answer, str):
        raise UserError(
            f"the agent returned {str(returned)[:80]!r}: it must return an answer as text, which the reward of the "
            'config scores; or a reward as a number; or a dict such as {"reward": 1.0, "answer": "text", "figure": 2.0}'
        )
    return Scored(numbers.pop("reward"), numbers, "", answer)


@dataclass(frozen=True, slots=True)
class _Stopped:
    """Stands for the value of an agent that raised an error after the episode had reached a limit."""

    limit: str


async def _await_agent(acting: Awaitable[Any], recording: Recording) -> Any:
    """Return the agent's value. Raise an error of the policy as soon as it occurs."""

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            return await acting, None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # an error that is no `Exception` would end the event loop
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
