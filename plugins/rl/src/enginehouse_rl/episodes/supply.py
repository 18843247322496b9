"""The supply gives each step its scored samples, and begins generating the next step's samples early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from enginehouse_rl.episodes.feed import Feed
from enginehouse_rl.episodes.runner import TaskKind
from enginehouse_rl.episodes.samples import measure_left_over
from enginehouse_rl.episodes.sampling import make_row_seed, make_sampling_params, make_step_seed
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
"""The kind of the tasks that a step trains on."""
PROBE_SEQUENCES, PROBE_TOKENS = 4, 32
"""To check the effect of a weight update, trainer and rollout both compute logprobs of the last `PROBE_TOKENS` tokens
of `PROBE_SEQUENCES` prompts. If a rollout engine cannot read all its weights back, every update is checked in this
way."""


class Supply:
    """Hands out the samples of each step.

    Attributes:
        probe: Token sequences for the effect check of weight updates.
        kinds: The kind of training tasks by its name `KIND`, as `EpisodeRunners` takes it.
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
        """Make the feed, which generates with the run's rollout. The rollout's workers must be running."""
        run, groups, seed = self._run, self._groups, self._run.plan.config.train.seed

        def name_request(task: Task) -> tuple[str, int]:
            step, row = divmod(task.serial, groups)  # the step in which it is generated unless something comes between
            return f"task-{task.serial}", make_row_seed(make_step_seed(seed, step + 1), row)

        runner = run.runners.make_runner(KIND, run.roles.rollout, name_request)
        schedule = StalenessWindow(groups, run.plan.config.train.staleness, run.plan.config.rollout.extra_groups)
        self._feed = Feed(run.runners.event_loop, self._tasks, runner, schedule)

    def take(self, step: int, version: int) -> DistributedBatch:
        """Return a step's scored samples, with the columns of `with_rewards`.

        With `train.staleness`, some of these samples were generated during earlier steps, and the generation of other
        samples continues.
        """
        run = self._run
        with run.clock.phase("generate"):
            drawn = self._feed.draw(version, self._count_remaining(step))
            for _ in run.progress.count(drawn, "samples", self._groups * self._samples, int):
                pass
        with run.clock.phase("reward"):
            groups = self._feed.take()
            self._left_over = torch.tensor([group.left_over > 0 for group in groups])
            return with_rewards(collect_rows(groups), run.plan.rewards)

    def begin_next(self, step: int, version: int) -> None:
        """Begin to generate the next step's samples while this step's update runs. The fleet holds the requests until
        it serves `version`.

        This method does nothing before a validation, because the rollout must answer the validation's prompts first. It
        does nothing with `train.staleness` either, because the feed then begins tasks by itself.
        """
        run = self._run
        if run.plan.config.train.staleness or step == run.steps or run.validates(step):
            return
        run.roles.rollout.hold()
        self._feed.begin(version, self._count_remaining(step + 1))

    def metrics(self, samples: DistributedBatch) -> dict[str, float]:
        """Return metrics of how a step's samples were generated, and of what happened to the replicas meanwhile."""
        rollout = self._run.roles.rollout.metrics()
        return {
            **measure_left_over(samples, self._left_over),
            **self._feed.metrics(),
            **self._tasks.metrics(),
            **rollout,
            "busy/generate": rollout["rollout/busy_seconds"],
            "tokens": float(samples.lengths("input_ids").sum()),
        }

    def state(self) -> dict[str, Any]:
        """Return the next tasks as plain data."""
        return self._feed.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned; see `Tasks.restore`."""
        self._tasks.restore(state)

    def _count_remaining(self, step: int) -> int:
        """Return the number of groups to train on until the run ends, including the groups of this step."""
        return (self._run.steps - step + 1) * self._groups
