"""The reinforcement-learning loop: one step, readable from top to bottom.

This file contains only the order of a step. `enginehouse.roles.placement` decides what runs where, each algorithm is in
its own file (`steps/`, `advantages/`, `losses/`), and the controller splits calls between workers and gathers their
results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from enginehouse.roles.placement import place
from enginehouse_rl.episodes.runners import EpisodeRunners
from enginehouse_rl.episodes.supply import Supply
from enginehouse_rl.episodes.tasks import PromptReader
from enginehouse_rl.evaluation.held_out_prompts import HeldOutPrompts
from enginehouse_rl.loop.loop import Loop
from enginehouse_rl.loop.weight_publisher import WeightPublisher
from enginehouse_rl.steps.observe import observe, write_samples
from enginehouse_rl.steps.stage import make_stages
from enginehouse_rl.steps.updates import make_updates

if TYPE_CHECKING:
    from enginehouse_rl.plan.plan import Plan


class Trainer(Loop):
    """Trains the actor of a plan by reinforcement learning. Takes the arguments of `Loop`."""

    plan: Plan
    phases = ("old_logprobs", "reference")  # the metrics always contain these phases

    def prepare(self) -> None:
        with self.progress.task("reading data"):
            self.reader = PromptReader(self.plan, self.progress)
            self.supply, self.held_out = Supply(self, self.reader), HeldOutPrompts(self, self.reader)
        self.runners = EpisodeRunners(self.plan, {**self.supply.kinds, **self.held_out.kinds}, self.reader.tokenizer)
        self.stages, self.weights = make_stages(self.plan), WeightPublisher(self)

    @contextmanager
    def workers(self) -> Iterator[None]:
        placed = place(self.plan.roles, self.plan.launch, self.supply.probe, self.progress.report_arrival)
        with self.runners.start(placed) as self.roles, self.roles.sync.trainer_in_use():
            self.progress.state = lambda: str(self.runners.activity)
            self.progress.replicas = self.roles.rollout.describe_replicas
            self.supply.open()
            self.held_out.open()
            yield

    def run_step(self, step: int) -> Mapping[str, float]:
        """Run one step: sample, score, compute advantages, update, publish the weights."""
        with self.roles.sync.trainer_idle():
            samples = batch = self.supply.take(step, self.weights.version)
        self.roles.turns.train()
        for stage in self.stages:
            stage.begin(batch, self.roles)
        for stage in self.stages:
            with self.clock.phase(stage.phase):
                batch = stage(batch, self.roles)
            if stage.scores:
                samples = batch
        with self.weights.give_up_on_errors():
            with self.clock.phase("update"):
                updates = make_updates(self.plan, batch, step, self.weights.version)
                with self.updating(step, updates) as training:
                    self.weights.begin()
                    figures = observe(samples, batch, self.stages, self.weights.version)
                    training.metrics = {**figures, **self.supply.metrics(samples)}
                    self.supply.begin_next(step, self.weights.version + 1)
                    write_samples(self, step, samples, batch, self.reader.tokenizer)
                metrics = training.result()
            with self.clock.phase("sync"):
                return metrics | self.weights.publish(training)

    # Around the steps

    def describe(self) -> Mapping[str, Any]:
        described = {**super().describe(), **self.runners.describe()}
        self.run_directory.record.update(prompts={"used": self.supply.prompts, "too_long": self.reader.too_long})
        for replica in described["rollout"]:
            if endpoint := replica.get("endpoint"):
                self.progress.note(f"rollout replica {replica['rank']} answers OpenAI clients at {endpoint}")
        return described

    def before_first_step(self) -> None:
        self.weights.publish()
        self.held_out.before_first_step()

    def after_step(self, step: int) -> None:
        self.held_out.after_step(step)

    def finish_beside(self, before: int | None = None, seconds: float | None = None) -> None:
        self.held_out.finish(before, seconds)

    def state(self) -> dict[str, Any]:
        state = {**self.supply.state(), "weight_version": self.weights.version + 1}  # of the trained weights
        for stage in self.stages:
            state |= stage.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.supply.restore(state)
        self.weights.version = state["weight_version"] - 1  # the first sync brings those weights once more
        for stage in self.stages:
            stage.restore(state)
