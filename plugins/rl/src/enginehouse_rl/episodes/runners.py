"""Plays the tasks of a plan, in this process or in environment workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from enginehouse.controller.launchers.event_loop import EventLoop, event_loop
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import TaskKind, make_environment, make_runner
from enginehouse_rl.episodes.traces import EpisodeActivity
from enginehouse_rl.episodes.watchdog import LoopWatchdog
from enginehouse_rl.episodes.worker_pool import start_environment_workers
from enginehouse_rl.rewards.weighted import WeightedRewards

if TYPE_CHECKING:
    from enginehouse.engines.environment import Environment, Task
    from enginehouse.fleet.fleet import RolloutFleet
    from enginehouse.roles.placement import Roles
    from enginehouse_rl.episodes.runner import TaskRunner
    from enginehouse_rl.episodes.worker_pool import EnvironmentWorkerPool
    from enginehouse_rl.plan.plan import PlayPlan


class EpisodeRunners:
    """Plays tasks according to a plan. Before `start`, only the environment exists.

    Raises:
        ConfigError: The environment raised an error when it was created.
    """

    event_loop: EventLoop
    _environment: Environment
    _rewards: WeightedRewards
    _workers: EnvironmentWorkerPool

    def __init__(self, plan: PlayPlan, kinds: Mapping[str, TaskKind], tokenizer: Any):
        self._plan, self._kinds, self._tokenizer = plan, kinds, tokenizer
        self._apart = plan.config.environment.processes > 0
        self._activity = EpisodeActivity()
        if not self._apart:
            self._environment = make_environment(plan)

    @contextmanager
    def start(self, roles: AbstractContextManager[Roles]) -> Iterator[Roles]:
        """Enter `roles`, which connects to Ray. Then start the event loop, and the environment workers if the plan has
        any. Everything stops when the context ends."""
        with ExitStack() as stack:
            if not self._apart:
                self._rewards = stack.enter_context(closing(WeightedRewards(self._plan)))
            entered = stack.enter_context(roles)
            self.event_loop = stack.enter_context(event_loop())
            if self._apart:
                self._workers = stack.enter_context(start_environment_workers(self._plan, self._kinds))
            elif not self._plan.is_single_turn:
                stack.callback(self.event_loop.call(self._start_watchdog).close)
            yield entered

    @property
    def activity(self) -> EpisodeActivity:
        """Number of episodes in progress and what they wait for; available after `start`."""
        return self._workers.activity if self._apart else self._activity

    def describe(self) -> dict[str, Any]:
        """Describe the environment workers, for reports; empty if there are none."""
        return {"environment": self._workers.describe()} if self._apart else {}

    def make_runner(
        self, kind: str, fleet: RolloutFleet, name_request: Callable[[Task], tuple[str, int]]
    ) -> TaskRunner:
        """Return the runner that plays tasks of a kind.

        Args:
            name_request: Returns the prefix of the request ids of a task, and the seed of its first request.
        """
        if self._apart:
            return self._workers.make_runner(kind, fleet, name_request)
        task_kind = self._kinds[kind]

        def make_policy(task: Task) -> FleetPolicy:
            return FleetPolicy(fleet, self._tokenizer, task_kind.sampling, *name_request(task))

        return make_runner(self._plan, self._environment, make_policy, self._rewards, task_kind, self._activity)

    def _start_watchdog(self) -> LoopWatchdog:
        return LoopWatchdog(asyncio.get_running_loop(), self._plan.config.environment.name)
