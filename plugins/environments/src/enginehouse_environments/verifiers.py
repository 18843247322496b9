"""Plays environments of the package `verifiers`, with their own tasks, harnesses and rewards.

A harness is any program that sends requests to a model. Its requests carry the id of their trace as session id.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from enginehouse.errors import ConfigError, EnginehouseError, UserError, nearest
from enginehouse_environments.agents import RecordedAgents
from enginehouse_environments.dialogue import ChatTemplate
from enginehouse_environments.recording import Limits

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Task
    from enginehouse_environments.agents import AgentTask

NO_KEY = "ENGINEHOUSE_NO_KEY"
"""An environment variable that is not set, because requests are identified by their session id and not by a key."""


class Verifiers:
    """Tasks of a taskset of `verifiers`. The taskset's own harness plays them, and its own rewards score them.

    Args:
        taskset: id of the taskset.
        config: other keys of the `[env]` block, such as `{agent: {harness: {id: "null"}, runtime: {type:
            subprocess}}}`.
        column: column with the index of a row's task in the taskset, from 0.
        max_calls: maximum number of requests of an episode.
        max_tokens: maximum number of tokens that an episode may generate. Unset: no limit.
        max_row_tokens: maximum number of tokens of one conversation. Unset: the context length of the models.
        ignored: parameters of requests that are ignored, such as `temperature`.
    """

    def __init__(
        self,
        taskset: str,
        config: dict[str, Any] | None = None,
        column: str = "task",
        max_calls: Annotated[int, Field(gt=0)] = 100,
        max_tokens: Annotated[int, Field(gt=0)] | None = None,
        max_row_tokens: Annotated[int, Field(gt=0)] | None = None,
        ignored: Sequence[str] = (),
    ):
        self._v1, self._environment = load_taskset(taskset, config)
        self._tasks = list(self._environment.taskset)
        self._column = column
        self._agents = RecordedAgents(Limits(max_calls, max_tokens, max_row_tokens), ignored)
        self._serving: tuple[Any, asyncio.Future[None]] | None = None

    needs_reward = False

    @staticmethod
    def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
        """Raise `ConfigError` if the taskset cannot be loaded, or the data lacks the column."""
        load_taskset(arguments["taskset"], arguments.get("config"))
        if (column := arguments.get("column", "task")) not in (columns if columns is not None else [column]):
            raise ConfigError(
                f"column: the data has no column {column!r} with the index of each row's task. "
                f"{nearest(column, columns or ())}"
            )

    @staticmethod
    def check_tokenizer(arguments: Mapping[str, Any], tokenizer: Any) -> None:
        """Raise `UserError` if the tokenizer has no chat template."""
        ChatTemplate(tokenizer)

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        number = task.columns.get(self._column)
        if not isinstance(number, int) or not 0 <= number < len(self._tasks):
            raise UserError(
                f"the column {self._column!r} (environment.arguments.column) must hold the index of a task, 0 to "
                f"{len(self._tasks) - 1}, not {number!r}"
            )
        await self._ensure_serving()

        async def act(agent_task: AgentTask) -> Any:
            client = self._v1.EvalClientConfig(base_url=agent_task.base_url, api_key_var=NO_KEY)
            model = self._v1.ModelContext(model=agent_task.model, client=client)

            def add_trace(trace: Any) -> None:
                is_trained = trace.agent is None or trace.agent.trainable
                self._agents.endpoint.add_name(trace.id, agent_task.api_key, is_trained)

            return read_outcome(await self._environment.run_episode(self._tasks[number], model, on_trace=add_trace))

        return await self._agents.play(task, policy, context, act)

    async def _ensure_serving(self) -> None:
        """Start the services that episodes share, once per event loop."""
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving[0] is not loop:
            ready = loop.create_future()
            self._serving = loop, ready
            self._task = loop.create_task(self._serve(ready))
        await asyncio.shield(self._serving[1])

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._environment.serving():
                ready.set_result(None)
                await asyncio.Event().wait()  # until the loop ends
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)


def load_taskset(taskset: str, config: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Return the package and the environment of a taskset.

    Raises:
        ConfigError: the taskset cannot be loaded.
    """
    try:
        v1 = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
    except ImportError as error:
        raise ConfigError(f"verifiers is not installed. Try: pip install 'verifiers>=0.4,<0.5' ({error})") from error
    try:
        taskset_config = dict((config or {}).get("taskset", {}), id=taskset)
        return v1, loaders.load_environment(loaders.resolve_env_config({**(config or {}), "taskset": taskset_config}))
    except Exception as error:  # a taskset's module may raise anything
        raise ConfigError(f"taskset: {taskset!r} of verifiers cannot be loaded: {error}") from error


def read_outcome(episode: Any) -> dict[str, float]:
    """Return the metrics of an episode's trainable traces, and the mean of their rewards.

    Raises:
        EnginehouseError: the episode failed.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        problems = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise EnginehouseError(f"an episode of verifiers failed: {problems or 'it does not say why'}")
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if not traces:
        raise EnginehouseError("an episode of verifiers has no agent that is trained")
    figures = {name: float(value) for trace in traces for name, value in trace.metrics.items() if value is not None}
    return {**figures, "reward": sum(trace.reward for trace in traces) / len(traces)}
