"""The loop: one step of reinforcement learning, readable from top to bottom.

What runs where is decided elsewhere (`enginehouse.rl.placement`), what an algorithm computes lives in its own file
(`advantages/`, `losses/`), and how a call is split and gathered is the controller's. Here is only the order of things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.data.prompts import PromptDataset, PromptSampler
from enginehouse.engines.train import LossSpec
from enginehouse.plugin import plugins
from enginehouse.plugin.records import resolve
from enginehouse.rl.drawing import in_order
from enginehouse.rl.generation import outputs_as_sampled, sampling_params
from enginehouse.rl.kl import token_kl
from enginehouse.rl.loop import Loop
from enginehouse.rl.minibatches import assign_minibatches
from enginehouse.rl.mismatch import MismatchWarnings, measuring, mismatch
from enginehouse.rl.placement import Roles, load_tokenizer, place
from enginehouse.rl.rewards.pool import RewardPool
from enginehouse.rl.samples import plain, sample_metrics, sample_rows, with_rewards

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan
    from enginehouse.config.schema import Config
    from enginehouse.data import Batch, Ragged
    from enginehouse.engines.rollout import SamplingParams
    from enginehouse.engines.train import Outputs
    from enginehouse.runs import Progress, RunDirectory

Draw = Callable[["Batch", "SamplingParams", int], Iterator[tuple[range, "Batch"]]]
"""Draws samples by somebody; `Roles.generate_each` is one."""

PROBE_SEQUENCES, PROBE_TOKENS = 4, 32
"""Prompts that trainer and rollout both score when the effect of a weight update is checked, and of how many of their
last tokens: rollout engines that cannot be read back are asked at every update."""
VALIDATION_PROMPTS = 256
"""Most held-out prompts a validation uses, the first of the file."""


class Trainer(Loop):
    """Trains the actor of a plan by reinforcement learning. Arguments as of `Loop`."""

    config: Config
    roles: Roles
    rewards: RewardPool

    def __init__(self, plan: Plan, run: RunDirectory, progress: Progress):
        super().__init__(plan, run, progress)
        self.plan = plan
        config = plan.config
        self.save_every = config.train.save_every
        self.tokenizer = load_tokenizer(config.model)
        prompts = self._dataset(config.data.train)
        self.prompts = PromptSampler(prompts, config.train.prompts_per_step, config.train.seed)
        self.probe = [tokens[-PROBE_TOKENS:].tolist() for tokens in prompts.all(PROBE_SEQUENCES)["prompt_ids"]]
        self.validation: Batch | None = None
        if config.data.validation:
            self.validation = self._dataset(config.data.validation).all(VALIDATION_PROMPTS)
        self.advantage = resolve(plan.advantage)
        self.version = 0
        self.former_failures = 0
        self.warnings = MismatchWarnings(config.weights.effect_tolerance)
        if plan.resumed:
            self.restore(plan.resumed.loop)

    @contextmanager
    def workers(self) -> Iterator[None]:
        with closing(RewardPool.of(self.plan)) as self.rewards, place(self.plan, self.probe) as self.roles:
            self.actor = self.roles.actor
            self.rewards.failures = self.former_failures
            yield

    def describe(self) -> Mapping[str, Any]:
        described = self.roles.describe()
        for replica in described["rollout"]:
            if endpoint := replica.get("endpoint"):
                self.progress.note(f"rollout replica {replica['rank']} answers OpenAI clients at {endpoint}")
        return described

    def before_first_step(self) -> None:
        self.sync_weights()
        if not self.trained_step:
            self.validate(0)
        elif self.trained_step > self.run_directory.validated_step:  # it was interrupted before it got to it
            self.after_step(self.trained_step)

    def after_step(self, step: int) -> None:
        every = self.config.train.validate_every
        if step == self.steps or (every and step % every == 0):
            self.validate(step)

    def state(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts.state_dict(),
            "weight_version": self.version + 1,  # what the update's weights will be called
            "reward_failures": self.rewards.failures,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.version = state["weight_version"] - 1  # the first sync brings those weights once more
        self.former_failures = state["reward_failures"]

    def run_step(self, step: int) -> Mapping[str, float]:
        """One step: sample, score, credit, update, sync."""
        phase, algorithm = self.clock.phase, self.config.algorithm
        with phase("generate"):
            prompts = self.prompts.next()
            samples = self.generate(prompts, self.config.rollout.samples_per_prompt, step)
        with phase("reward"):
            samples = with_rewards(samples, prompts, self.tokenizer, self.rewards)
        with phase("old_logprobs"):
            batch = samples.with_columns(old_logprobs=self.old_logprobs(samples))
        with phase("reference"):
            batch = self.with_reference(batch)
        with phase("advantage"):
            batch = self.advantage(batch, **algorithm.advantage.arguments)
        self.write_samples(step, samples)
        with phase("update"):
            known = {
                **sample_metrics(samples),
                **self.roles.rollout_metrics(),
                "reward/failures": float(self.rewards.failures),
                "tokens": float(samples["input_ids"].tokens),
            }
            loss, first = self.loss(), None
            if algorithm.old_logprobs == "actor":
                known |= plain(mismatch(samples, batch["old_logprobs"], self.version))
            else:
                first = measuring(loss, self.version)
            sent = self.training_batch(batch, step)
            metrics = self.update(step, known, sent, loss, algorithm.minibatches, algorithm.epochs, first)
            self.warnings.look(step, metrics)
        with phase("sync"):
            synced = self.sync_weights()
        return {**metrics, **synced}

    # The stages

    def generate(self, prompts: Batch, samples_per_prompt: int, step: int) -> Batch:
        """Draw responses from the rollout replicas; see `RolloutWorker.generate` for the columns."""
        return self._drawn(self.roles.generate_each, prompts, samples_per_prompt, step)

    def _drawn(self, draw: Draw, prompts: Batch, samples_per_prompt: int, step: int) -> Batch:
        parameters = sampling_params(self.config.rollout.sampling, samples_per_prompt)
        asked = prompts.select(["prompt_ids"]).with_columns(prompt_index=torch.arange(len(prompts)))
        pieces = draw(asked, parameters, (self.config.train.seed << 32) + step)
        wanted = len(asked) * parameters.n
        return in_order(self.progress.counted(pieces, "samples", wanted, lambda piece: len(piece[1])))

    def old_logprobs(self, samples: Batch) -> Ragged:
        """The logprobs the policy ratio divides by: as the rollout reported them, or computed anew by the actor."""
        if self.config.algorithm.old_logprobs == "rollout":
            return samples["rollout_logprobs"]
        return self.roles.actor.forward(samples.select(["input_ids", "loss_mask"]), self._outputs())["logprobs"]

    def with_reference(self, batch: Batch) -> Batch:
        """Add `reference_logprobs`, if there is a KL term, and take the term from the rewards if that is its place."""
        kl = self.config.algorithm.kl
        if self.roles.reference is None:
            return batch
        scored = self.roles.reference.forward(batch.select(["input_ids", "loss_mask"]), self._outputs())
        batch = batch.with_columns(reference_logprobs=scored["logprobs"])
        if kl.place == "loss":
            return batch
        mask = batch["loss_mask"]
        divergence = token_kl(batch["old_logprobs"].values, scored["logprobs"].values, kl.estimator) * mask.values
        per_row = torch.zeros(len(batch)).index_add_(0, mask.row, divergence)
        return batch.with_columns(reward=batch["reward"] - kl.coefficient * per_row)

    def training_batch(self, batch: Batch, step: int) -> Batch:
        """What an update sends to the actor: every column of numbers, and which mini-batch each row belongs to."""
        batch = batch.drop([name for name in batch.columns if isinstance(batch[name], tuple)])
        algorithm = self.config.algorithm
        if algorithm.minibatches == 1:
            return batch
        seed = (self.config.train.seed << 32) + step
        dealt = assign_minibatches(len(batch), algorithm.minibatches, algorithm.epochs, seed)
        return batch.with_columns(minibatch=dealt)

    def loss(self) -> LossSpec:
        """The configured loss, with the KL term if that is its place."""
        algorithm = self.config.algorithm
        arguments = dict(algorithm.loss.arguments)
        if self.roles.reference is not None and algorithm.kl.place == "loss":
            arguments |= {"kl_coefficient": algorithm.kl.coefficient, "kl_estimator": algorithm.kl.estimator}
        outputs = self._outputs(entropy=bool(arguments.get("entropy_coefficient")))
        return LossSpec(algorithm.loss.name, arguments, outputs)

    def sync_weights(self) -> dict[str, float]:
        """Bring the actor's weights to every rollout replica, verified."""
        self.version += 1
        report = self.roles.sync.sync(self.version)
        plugins().observe("weights_updated", run=self, version=report.version, seconds=report.seconds)
        figures = {"weights/mib": report.nbytes / 2**20}
        for name, nbytes in (("moved", report.bytes_moved), ("minimum", report.bytes_minimum)):
            if nbytes is not None:
                figures[f"weights/mib_{name}"] = nbytes / 2**20
        found = {"weights/effect": report.effect, "weights/taken": report.taken}
        return figures | {name: figure for name, figure in found.items() if figure is not None}

    def validate(self, step: int) -> None:
        """Sample one response for each held-out prompt, as in training, and log the mean reward."""
        if self.validation is None:
            return
        with self.clock.phase("validate"):
            samples = self._drawn(self.roles.validate_each, self.validation, 1, (1 << 31) + step)
            samples = with_rewards(samples, self.validation, self.tokenizer, self.rewards)
        metrics = {"validation/reward": samples["reward"].mean().item()}
        self.run_directory.log_validation(step, metrics)
        self.progress.validated(step, metrics)

    # What is written

    def write_samples(self, step: int, samples: Batch) -> None:
        """Write what the model said, in chosen steps."""
        every = self.config.train.samples_every
        if every and (step == 1 or step % every == 0):
            self.run_directory.write_samples(step, sample_rows(samples))

    def _outputs(self, entropy: bool = False) -> Outputs:
        return outputs_as_sampled(self.config.rollout.sampling, entropy)

    def _dataset(self, path: str) -> PromptDataset:
        data = self.config.data
        return PromptDataset.load(path, self.tokenizer, data.prompt, data.max_prompt_tokens, data.chat_template)
