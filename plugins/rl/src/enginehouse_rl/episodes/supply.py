"""What a step is given: the samples of its prompts, drawn and scored; and those of the next one, begun in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from enginehouse_rl.episodes.feed import Feed
from enginehouse_rl.episodes.runner import TaskKind
from enginehouse_rl.episodes.samples import left_over_metrics
from enginehouse_rl.episodes.sampling import make_sampling_params, row_seed, step_seed
from enginehouse_rl.episodes.scored_group import collect_rows
from enginehouse_rl.episodes.staleness import StalenessWindow
from enginehouse_rl.episodes.tasks import Tasks
from enginehouse_rl.rewards.weighted import with_rewards

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.engines.environment import Task
    from enginehouse_rl.episodes.tasks import PromptReader
    from enginehouse_rl.loop.trainer import Trainer

KIND = "training"
"""What the prompts of steps are played for."""
PROBE_SEQUENCES, PROBE_TOKENS = 4, 32
"""Prompts that trainer and rollout both score when the effect of a weight update is checked, and of how many of their
last tokens: rollout engines that cannot be read back are asked at every update."""


class Supply:
    """Hands out the samples of each step.

    Args:
        run: the run.
        reader: reads its prompts.

    Attributes:
        prompts: how many prompts there are.
        probe: token sequences for the effect check of weight updates.
        kinds: how the prompts are played, as `EpisodeRunners` takes it.
    """

    def __init__(self, run: Trainer, reader: PromptReader):
        self._run, config = run, run.plan.config
        prompts = reader.read(config.data.train, config.data.order_by)
        self.prompts = len(prompts)
        self.probe = [tokens[-PROBE_TOKENS:].tolist() for tokens in prompts.all(PROBE_SEQUENCES)["prompt_ids"]]
        self._groups, self._samples = config.train.prompts_per_step, config.rollout.samples_per_prompt
        sampling = make_sampling_params(config.rollout.sampling, self._samples)
        self.kinds = {KIND: TaskKind(sampling, self._groups, filtered=True)}
        self._tasks = Tasks(prompts.make_sampler(self._groups, config.train.seed))

    def open(self) -> None:
        """Have the run's rollout draw, from now on."""
        run, groups, seed = self._run, self._groups, self._run.plan.config.train.seed

        def named(task: Task) -> tuple[str, int]:
            step, row = divmod(task.serial, groups)  # in which it is drawn if nothing comes between
            return f"task-{task.serial}", row_seed(step_seed(seed, step + 1), row)

        runner = run.runners.make_runner(KIND, run.roles.rollout, named)
        schedule = StalenessWindow(groups, run.plan.config.train.staleness, run.plan.config.rollout.extra_groups)
        self._feed = Feed(run.runners.event_loop, self._tasks, runner, schedule)

    def take(self, step: int, version: int) -> DistributedBatch:
        """Return the samples of a step, scored; see `rows_of` for the columns. With `train.staleness` some were drawn
        before, and others are drawn on."""
        run = self._run
        with run.clock.phase("generate"):
            drawn = self._feed.draw(version, self._left(step))
            for _ in run.progress.count(drawn, "samples", self._groups * self._samples, int):
                pass
        with run.clock.phase("reward"):
            taken = self._feed.take()
            self._left_over = torch.tensor([group.left_over > 0 for group in taken])
            return with_rewards(collect_rows(taken), run.plan.rewards)

    def begin_next(self, step: int, version: int) -> None:
        """While a step's update runs, begin the next one, which is drawn from `version`, as far as its requests: they
        go out once those weights are served. Not before a validation, which the rollout answers first; with
        `train.staleness` all is begun anyway."""
        run = self._run
        if run.plan.config.train.staleness or step == run.steps or run.validates(step):
            return
        run.roles.rollout.hold()
        self._feed.begin(version, self._left(step + 1))

    def metrics(self, samples: DistributedBatch) -> dict[str, float]:
        """Return figures of how a step's samples were drawn, and of what happened to the replicas meanwhile."""
        rollout = self._run.roles.rollout.metrics()
        return {
            **left_over_metrics(samples, self._left_over),
            **self._feed.metrics(),
            **self._tasks.metrics(),
            **rollout,
            "busy/generate": rollout["rollout/busy_seconds"],
            "tokens": float(samples.lengths("input_ids").sum()),
        }

    def state(self) -> dict[str, Any]:
        """Return which tasks come next, as plain data."""
        return self._feed.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; see `Tasks.restore`."""
        self._tasks.restore(state)

    def _left(self, step: int) -> int:
        """Return how many groups are trained on until the run ends, a step's included."""
        return (self._run.steps - step + 1) * self._groups
