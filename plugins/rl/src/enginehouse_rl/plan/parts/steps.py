"""Checks the steps of a reinforcement-learning run: the number of samples, and what is generated during training."""

from __future__ import annotations

from collections.abc import Iterable

from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.parts.advantage import AdvantagePart
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.playing import EnvironmentPart
from enginehouse_rl.plan.roles import list_auxiliaries

ON_FAILURE = {
    "fail": "ends the run",
    "retry": "is made again, twice at most",
    "drop": "is left out",
    "drop_group": "is left out with its group",
    "mask": "has reward 0 and is not trained on",
}
"""The consequence of an episode that fails, by `rollout.on_failure`."""


def count_samples(config: Config) -> int:
    """Return the number of samples of a step."""
    return config.train.prompts_per_step * config.rollout.samples_per_prompt


class StepsPart(Part[Config]):
    """Checks that the numbers of samples, processes and mini-batches fit each other. Splits need not be even."""

    def settle(self) -> None:
        config = self.config
        processes, minibatches = config.actor.processes, config.algorithm.minibatches
        prompts, samples = config.train.prompts_per_step, count_samples(config)
        step = (
            f"a step has {samples} samples ({prompts} prompts, train.prompts_per_step, times "
            f"{config.rollout.samples_per_prompt}, rollout.samples_per_prompt)"
        )
        if minibatches > samples:
            self.refuse(f"{step}, which cannot be divided into {minibatches} minibatches (algorithm.minibatches)")
        for role, section in list_auxiliaries(config).items():
            if role in self.run.roles and (section.processes or 0) > samples:
                owner = f"{role.replace('_', ' ')} ({role}.processes)"
                self.refuse(f"{step}, fewer than the {section.processes} processes of the {owner}")
        if processes > samples:
            self.refuse(f"{step}, fewer than the {processes} processes of the actor (actor.processes)")
        elif processes * minibatches > samples >= minibatches:
            self.note(
                f"{step}, about {samples / minibatches:.3g} a minibatch: fewer than actor.processes ({processes}), so "
                "some processes have nothing to do in some optimizer steps"
            )
        if config.train.staleness and config.cluster.launcher == "inline":
            self.refuse(
                f"train.staleness is {config.train.staleness}: responses are generated while the actor trains, but an "
                "inline run has one process for both; set train.staleness=0, or cluster.launcher=ray"
            )
        if config.rollout.replicas > prompts:
            self.note(
                f"{config.rollout.replicas} rollout replicas share {prompts} prompts a step: some have nothing to do"
            )
        if self.run[AdvantagePart].compares:
            self._check_comparison()

    def facts(self) -> Iterable[Fact]:
        config, single = self.config, self.run[EnvironmentPart].is_single_turn
        samples, new = count_samples(config), config.rollout.sampling.max_tokens
        longest = samples * (config.data.max_prompt_tokens + new)
        yield (
            "a step",
            f"{config.train.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples = {samples:,} "
            "samples, "
            + (
                f"at most {samples * new:,} new tokens, {longest:,} with the longest prompts"
                if single
                else f"at most {new:,} new tokens each time that {config.environment.name} asks for some"
            ),
        )
        if schedule := "; ".join(self._describe_schedule()):
            yield "schedule", schedule
        steps, epochs, minibatches = config.train.steps, config.algorithm.epochs, config.algorithm.minibatches
        if epochs * minibatches == 1:
            yield "the run", f"{steps} steps, an optimizer step each"
        else:
            factors = f"{count(epochs, 'epoch')} x {count(minibatches, 'minibatch')}"
            yield "the run", f"{steps} steps x {factors} = {steps * epochs * minibatches:,} optimizer steps"

    def _check_comparison(self) -> None:
        """Check that the samples of a prompt can differ, because the advantage compares them."""
        name, rollout = self.config.algorithm.advantage.name, self.config.rollout
        if rollout.samples_per_prompt < 2:
            self.refuse(
                f"rollout.samples_per_prompt must be at least 2, not {rollout.samples_per_prompt}: the advantage "
                f"{name!r} compares the samples of one prompt with each other"
            )
        if rollout.sampling.temperature == 0:
            self.refuse(
                "rollout.sampling.temperature is 0: the samples of a prompt are all the same, so the advantage "
                f"{name!r} is zero everywhere and nothing is learned"
            )

    def _describe_schedule(self) -> Iterable[str]:
        """Describe what is generated beyond the needs of a step, and what happens to an episode that fails."""
        config, rollout = self.config, self.config.rollout
        if ahead := config.train.staleness:
            prompts = ahead * config.train.prompts_per_step + rollout.extra_groups
            yield (
                f"the responses of up to {prompts:,} prompts are generated while a step trains, and no token is more "
                f"than {count(ahead, 'weight version')} behind; --resume generates again the responses that were not "
                "trained on"
            )
        if rollout.extra_groups:
            late = "used by later steps while they are fresh enough, else " if ahead else ""
            yield (
                f"{count(rollout.extra_groups, 'prompt')} more than needed are started: a step trains on the prompts "
                f"answered first, which have the shorter responses; the prompts answered last are {late}dropped and "
                "answered again"
            )
        if rollout.keep:
            yield f"other prompts replace those whose responses {rollout.keep.name} rejects"
        if rollout.on_failure != "fail" or rollout.episode_seconds is not None:
            late = f" or takes more than {rollout.episode_seconds:g} s" if rollout.episode_seconds is not None else ""
            yield f"an episode that raises{late} {ON_FAILURE[rollout.on_failure]}"
