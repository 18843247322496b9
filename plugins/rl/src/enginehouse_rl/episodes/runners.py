"""What plays the tasks of a plan, whatever for: its environment, its rewards and an event loop, here or in processes of
their own."""

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
    """Plays tasks as a plan says; nothing but the environment is there before `start`.

    Args:
        plan: of the run.
        kinds: what tasks are played for, by name.
        tokenizer: the model's.

    Attributes:
        event_loop: where tasks are played.

    Raises:
        ConfigError: making the environment raises.
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
        """Start what plays, and the roles, which bring Ray; end all on the way out."""
        with ExitStack() as stack:
            if not self._apart:
                self._rewards = stack.enter_context(closing(WeightedRewards(self._plan)))
            started = stack.enter_context(roles)
            self.event_loop = stack.enter_context(event_loop())
            if self._apart:
                self._workers = stack.enter_context(start_environment_workers(self._plan, self._kinds))
            elif not self._plan.is_single_turn:
                stack.callback(self.event_loop.call(self._watchdog).close)
            yield started

    @property
    def activity(self) -> EpisodeActivity:
        """What episodes are at, after `start`."""
        return self._workers.activity if self._apart else self._activity

    def describe(self) -> dict[str, Any]:
        """The processes of environments, where they have some, for reports."""
        return {"environment": self._workers.describe()} if self._apart else {}

    def make_runner(self, kind: str, fleet: RolloutFleet, named: Callable[[Task], tuple[str, int]]) -> TaskRunner:
        """What plays tasks of a kind.

        Args:
            kind: what for.
            fleet: draws their tokens.
            named: of each task, what begins its requests' ids, and the seed of the first.
        """
        if self._apart:
            return self._workers.make_runner(kind, fleet, named)
        asked = self._kinds[kind]

        def make_policy(task: Task) -> FleetPolicy:
            return FleetPolicy(fleet, self._tokenizer, asked.sampling, *named(task))

        return make_runner(self._plan, self._environment, make_policy, self._rewards, asked, self._activity)

    def _watchdog(self) -> LoopWatchdog:
        return LoopWatchdog(asyncio.get_running_loop(), self._plan.config.environment.name)
