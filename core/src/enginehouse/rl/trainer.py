"""The loop: one step of reinforcement learning, readable from top to bottom.

What runs where is decided elsewhere (`enginehouse.rl.placement`), what an algorithm computes lives in its own file
(`advantages/`, `losses/`), and how a call is split and gathered is the controller's. Here is only the order of things.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from enginehouse.data.prompts import PromptDataset, PromptSampler
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec, Mean, Outputs
from enginehouse.errors import EnginehouseError
from enginehouse.plugin import plugins
from enginehouse.plugin.records import resolve
from enginehouse.rl.kl import token_kl
from enginehouse.rl.placement import Roles, load_tokenizer, place
from enginehouse.rl.rewards.pool import RewardPool
from enginehouse.rl.samples import response_lengths, sample_metrics, with_rewards

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan
    from enginehouse.data import Batch
    from enginehouse.runs import Progress, RunDirectory

log = logging.getLogger(__name__)

PROBE_SEQUENCES = 4
"""Prompts that trainer and rollout both score when the effect of a weight update is checked."""

INTERRUPT_SAVE_SECONDS = 4.0
"""How long an interrupted run tries to save the model before it leaves."""


class Trainer:
    """Trains the actor of a plan by reinforcement learning.

    Args:
        plan: a config that was checked against plugins, data and model.
        run: the run directory everything is written to.
        progress: where progress is shown.
    """

    def __init__(self, plan: Plan, run: RunDirectory, progress: Progress):
        self.plan, self.run_directory, self.progress = plan, run, progress
        self.config = config = plan.config
        self.clock = run.clock
        self.tokenizer = load_tokenizer(config.model)
        prompts = self._dataset(config.data.train)
        self.prompts = PromptSampler(prompts, config.train.prompts_per_step, config.train.seed)
        self.probe = [tokens.tolist() for tokens in prompts.all(PROBE_SEQUENCES)["prompt_ids"]]
        self.validation = (
            self._dataset(config.data.validation).all(config.train.validation_prompts) if config.data.validation else None
        )
        self.advantage = resolve(plan.advantage)
        self.version = 0

    def run(self) -> None:
        """Run every step, then save the model.

        Raises:
            EnginehouseError: whatever ended the run; what was written until then is kept.
            KeyboardInterrupt: after the workers were ended in order and, if there was time, the model saved.
        """
        outcome = "failed"
        steps = self.config.train.steps
        self.rewards = RewardPool(
            self.plan.reward,
            self.config.reward.arguments,
            processes=self.config.reward.processes,
            timeout_seconds=self.config.reward.timeout_seconds,
            on_error=self.config.reward.on_error,
            python_path=self.plan.python_path,
        )
        try:
            with self.progress.task("starting workers"), place(self.plan, self.probe) as self.roles:
                try:
                    self.run_directory.describe(self.roles.describe())
                    self.sync_weights()
                    plugins().observe("run_started", run=self)
                    self.validate(0)
                    self.progress.start(steps)
                    for step in range(1, steps + 1):
                        metrics = self.timed_step(step)
                        self.run_directory.log(step, metrics)
                        self.progress.update(step, metrics)
                        plugins().observe("step_finished", run=self, step=step, metrics=metrics)
                        every = self.config.train.save_every
                        if every and step % every == 0 and step < steps:
                            self.save(step)
                    self.save(steps)
                    outcome = "finished"
                except KeyboardInterrupt:
                    outcome = "interrupted"
                    self._save_before_leaving()
                    raise
        finally:
            self.rewards.close()
            plugins().observe("run_finished", run=self, outcome=outcome)

    def timed_step(self, step: int) -> dict[str, float]:
        """Run one step, with its figures of time added."""
        with self.clock.step(step):
            metrics = dict(plugins().run_step(self, step))
            if (every := self.config.train.validate_every) and step % every == 0 or step == self.config.train.steps:
                metrics |= self.validate(step)
        metrics |= self.clock.metrics()
        metrics["tokens_per_second"] = metrics.pop("tokens") / metrics["time/step"]
        return metrics

    def run_step(self, step: int) -> Mapping[str, float]:
        """One step: sample, score, credit, update, sync. Returns its metrics. Called through `enginehouse_run_step`."""
        roles, clock, algorithm = self.roles, self.clock, self.config.algorithm
        with clock.phase("generate"):
            prompts = self.prompts.next()
            samples = self.generate(prompts, self.config.rollout.samples_per_prompt, step)
        with clock.phase("reward"):
            samples = with_rewards(samples, prompts, self.tokenizer, self.rewards)
        with clock.phase("old_logprobs"):
            samples = samples.with_columns(old_logprobs=self.old_logprobs(samples))
        with clock.phase("reference"):
            scored = self.with_reference(samples)
        with clock.phase("advantage"):
            batch = self.advantage(scored, **algorithm.advantage.arguments)
        with clock.phase("update"):
            updated = roles.actor.update(
                batch.select([name for name in TRAINED_ON if name in batch]),
                self.loss,
                minibatches=algorithm.minibatches,
                epochs=algorithm.epochs,
                seed=self.config.train.seed + step,
            )
        with clock.phase("sync"):
            synced = self.sync_weights()
        self.write_samples(step, samples)
        return {
            **sample_metrics(samples),
            **{name: value.value if isinstance(value, Mean) else value for name, value in updated.items()},
            **synced,
            "busy/generate": float(samples["seconds"].max()),
            "reward/failures": float(self.rewards.failures),
            "tokens": float(samples["input_ids"].values.numel()),
        }

    # The stages

    def generate(self, prompts: Batch, samples_per_prompt: int, step: int) -> Batch:
        """Draw responses from the rollout replicas; see `RolloutWorker.generate` for the columns."""
        sampling = self.config.rollout.sampling
        parameters = SamplingParams(
            n=samples_per_prompt,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=tuple(sampling.stop),
        )
        asked = prompts.select(["prompt_ids"]).with_columns(prompt_index=torch.arange(len(prompts)))
        return self.roles.rollout.generate(asked, parameters, seed=hash((self.config.train.seed, step)) & 0x7FFFFFFF)

    def old_logprobs(self, samples: Batch):
        """The logprobs the policy ratio divides by: as the rollout reported them, or computed anew by the actor."""
        if self.config.algorithm.old_logprobs == "rollout":
            return samples["rollout_logprobs"]
        return self.roles.actor.forward(samples.select(["input_ids"]), self._outputs())["logprobs"]

    def with_reference(self, samples: Batch) -> Batch:
        """Add `reference_logprobs`, if there is a KL term, and take the term from the rewards if that is its place."""
        kl = self.config.algorithm.kl
        if self.roles.reference is None:
            return samples
        reference = self.roles.reference.forward(samples.select(["input_ids"]), self._outputs())["logprobs"]
        samples = samples.with_columns(reference_logprobs=reference)
        if kl.place == "loss":
            return samples
        mask = samples["loss_mask"]
        divergence = token_kl(samples["old_logprobs"].values, reference.values, kl.estimator) * mask.values
        rows = torch.arange(len(samples)).repeat_interleave(mask.lengths)
        per_row = torch.zeros(len(samples)).index_add_(0, rows, divergence)
        return samples.with_columns(reward=samples["reward"] - kl.coefficient * per_row)

    @property
    def loss(self) -> LossSpec:
        """The configured loss, with the KL term if that is its place."""
        algorithm = self.config.algorithm
        arguments = dict(algorithm.loss.arguments)
        if algorithm.kl.coefficient and algorithm.kl.place == "loss":
            arguments |= {"kl_coefficient": algorithm.kl.coefficient, "kl_estimator": algorithm.kl.estimator}
        return LossSpec(algorithm.loss.name, arguments, self._outputs(entropy=bool(arguments.get("entropy_coefficient"))))

    def sync_weights(self) -> dict[str, float]:
        """Bring the actor's weights to every rollout replica, verified."""
        self.version += 1
        report = self.roles.sync.sync(self.version)
        plugins().observe("weights_updated", run=self, version=report.version, seconds=report.seconds)
        return {"weights/mib": report.nbytes / 2**20} | ({} if report.effect is None else {"weights/effect": report.effect})

    def validate(self, step: int) -> dict[str, float]:
        """Sample one response for each held-out prompt, as in training; returns `validation/*`."""
        if self.validation is None:
            return {}
        with self.clock.phase("validate"):
            samples = with_rewards(self.generate(self.validation, 1, -1 - step), self.validation, self.tokenizer, self.rewards)
        metrics = {"validation/reward": samples["reward"].mean().item()}
        self.run_directory.log_validation(step, metrics)
        self.progress.validated(step, metrics)
        return metrics

    # What is written

    def write_samples(self, step: int, samples: Batch) -> None:
        """Write what the model said, in chosen steps."""
        every = self.config.train.samples_every
        if every and (step == 1 or step % every == 0):
            tokens = response_lengths(samples).tolist()
            names = ("prompt", "response", "reward", "finish_reason")
            rows = zip(*(samples[name].tolist() if name == "reward" else samples[name] for name in names), tokens, strict=True)
            self.run_directory.write_samples(step, [dict(zip((*names, "tokens"), row, strict=True)) for row in rows])

    def save(self, step: int, timeout: float | None = None) -> None:
        """Export the actor's model as a Hugging Face directory; whole or not at all."""
        staged = self.run_directory.model_path(step)
        self.roles.actor.call("export_hf", str(staged), timeout=timeout)
        path = self.run_directory.model_saved(step, staged)
        plugins().observe("checkpoint_saved", run=self, step=step, path=str(path))

    def _save_before_leaving(self) -> None:
        step = self.run_directory.last_step
        if step:
            try:
                self.save(step, timeout=INTERRUPT_SAVE_SECONDS)
            except EnginehouseError as error:
                log.warning("the model was not saved: %s", error)

    def _outputs(self, entropy: bool = False) -> Outputs:
        return Outputs(entropy=entropy, temperature=self.config.rollout.sampling.temperature or 1.0)

    def _dataset(self, path: str) -> PromptDataset:
        data = self.config.data
        return PromptDataset.load(path, self.tokenizer, data.prompt, data.max_prompt_tokens, data.chat_template)

    roles: Roles
    rewards: RewardPool


TRAINED_ON = ("input_ids", "loss_mask", "old_logprobs", "advantages", "reference_logprobs", "rollout_logprobs", "reward")
"""The columns an update sends to the actor."""
