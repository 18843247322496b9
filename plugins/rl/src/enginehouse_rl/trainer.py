"""The loop: one step of reinforcement learning, readable from top to bottom.

What runs where is decided elsewhere (`enginehouse.roles.placement`), what an algorithm computes lives in its own file
(`advantages/`, `losses/`), and how a call is split and gathered is the controller's. Here is only the order of things.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.controller import Balanced
from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import LossSpec, Mean, Outputs, metric_values
from enginehouse.errors import ConfigError, nearest
from enginehouse.plugin import Advantage, plugins
from enginehouse.plugin.records import resolve
from enginehouse.roles.placement import place
from enginehouse.roles.sequence_scores import VALUES
from enginehouse.roles.workers import TRAINED, with_defaults
from enginehouse_rl.alarms import Watched
from enginehouse_rl.config.rows import named
from enginehouse_rl.data.prompts import PromptDataset, PromptSampler
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.episode_rows import EpisodeRows
from enginehouse_rl.episodes import FOR_PEOPLE, TEXTS, rows_of
from enginehouse_rl.evaluation import KIND, Evaluator, kind_of
from enginehouse_rl.feed import Feed
from enginehouse_rl.kl import KL_PENALTY, adapted, resumed_coefficient, with_kl_in_reward
from enginehouse_rl.loop import Loop, Update
from enginehouse_rl.minibatches import assign_minibatches
from enginehouse_rl.mismatch import measuring, mismatch
from enginehouse_rl.player import Kind
from enginehouse_rl.players import Players
from enginehouse_rl.rewards.model import with_model_scores
from enginehouse_rl.rewards.weighted import with_rewards
from enginehouse_rl.samples import left_over_metrics, sample_metrics, sample_rows
from enginehouse_rl.sampling import outputs_as_sampled, row_seed, sampling_params, step_seed
from enginehouse_rl.schedule import Schedule
from enginehouse_rl.tasks import Tasks, load_prompts
from enginehouse_rl.traces import draw_on, trace_metrics
from enginehouse_rl.validation import Validation

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.controller.future import Future
    from enginehouse.engines.environment import Task
    from enginehouse_rl.config.plan import Plan
    from enginehouse_rl.config.schema import Config
    from enginehouse_rl.runs import Progress, RunDirectory

log = logging.getLogger(__name__)

PROBE_SEQUENCES, PROBE_TOKENS = 4, 32
"""Prompts that trainer and rollout both score when the effect of a weight update is checked, and of how many of their
last tokens: rollout engines that cannot be read back are asked at every update."""


SHORT_UPDATE_SECONDS = 1.0
"""After an update that took less, the weights of the next one are asked for before it has ended."""


def columns_for(batch: DistributedBatch, needs: Sequence[str] | None) -> Batch:
    """Bring the columns that an advantage needs here, a row of the result for each of the batch.

    Args:
        batch: a step's samples. Without `token_rewards` these are 0; without `old_logprobs` they are the rollout's; and
            `KL_PENALTY` is left out where no KL term made it.
        needs: their names; None: all but texts.
    """
    if needs is None:
        return with_defaults(batch.drop(list(TEXTS)).fetch())
    if "token_rewards" in needs and "token_rewards" not in batch:
        lengths = batch.lengths("input_ids")
        batch = batch.with_columns(token_rewards=Ragged.from_lengths(torch.zeros(int(lengths.sum())), lengths))
    own = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
    names = (own if name == "old_logprobs" else name for name in needs if name in batch or name != KL_PENALTY)
    return with_defaults(batch.fetch(tuple(dict.fromkeys(names))))


class Trainer(Loop):
    """Trains the actor of a plan by reinforcement learning. Arguments as of `Loop`."""

    config: Config
    sends_at_once = False

    def __init__(self, plan: Plan, run: RunDirectory, progress: Progress):
        super().__init__(plan, run, progress)
        self.plan = plan
        config = plan.config
        self.dropped: dict[str, int] = {}
        with progress.task("reading data"):
            self.tokenizer = load_tokenizer(
                config.model.path, config.model.trust_remote_code, config.data.template_arguments
            )
            prompts = self._dataset(config.data.train, config.data.order_by)
            self.validation = Validation.of(config, self._dataset)
        self.players = Players(plan, self._kinds(), self.tokenizer)
        self.evaluator = self._evaluator()
        self.prompts = prompts
        self.tasks = Tasks(PromptSampler(prompts, config.train.prompts_per_step, config.train.seed))
        self.probe = [tokens[-PROBE_TOKENS:].tolist() for tokens in prompts.all(PROBE_SEQUENCES)["prompt_ids"]]
        self.advantage = resolve(plan.advantage)
        self.kl_coefficient = config.algorithm.kl.coefficient
        self.version = 0
        if plan.resumed:
            self.restore(plan.resumed.loop)

    @contextmanager
    def workers(self) -> Iterator[None]:
        with (
            self.players.beside(place(self.plan.roles, self.plan.launch, self.probe, self.progress.came)) as self.roles,
            self.roles.sync.trainer_in_use(),
        ):
            self.progress.state = lambda: str(self.players.under_way)
            self.progress.replicas = self.roles.rollout.seen
            self.feed = self._feed()
            yield

    def describe(self) -> Mapping[str, Any]:
        described = {**super().describe(), **self.players.describe()}
        self.run_directory.record.update(prompts={"used": len(self.prompts), "too_long": self.dropped})
        for replica in described["rollout"]:
            if endpoint := replica.get("endpoint"):
                self.progress.note(f"rollout replica {replica['rank']} answers OpenAI clients at {endpoint}")
        return described

    def watched(self) -> Watched:
        plan, grouped, needs = self.plan, self.config.rollout.samples_per_prompt > 1, self.plan.advantage_needs
        known = [one.record for one in plugins().providers(Advantage, self.config.algorithm.advantage.name)]
        compares = all(isinstance(one, Advantage) and one.compares_samples for one in known)  # of one's own: maybe
        kl = self.config.algorithm.kl
        return Watched(
            beside=[name for name, role in plan.roles.items() if role.trained and name != "actor"],
            grouped=grouped,
            compares=grouped and compares and "critic" not in plan.roles,
            kl_in_reward=kl.place == "reward" and kl.coefficient > 0,
            tolerance=plan.effect_tolerance,
            stale=bool(self.config.train.staleness),
            rewarded=needs is None or not {"reward", "rewards", "token_rewards"}.isdisjoint(needs),
            scored=bool(plan.rewards),
        )

    def before_first_step(self) -> None:
        self.sync_weights()
        step = self.trained_step
        missed = step > self.run_directory.validated_step  # it was interrupted before it got to it
        if self.validation is not None and (not step or (missed and self.validates(step))):
            with self.progress.task("validating"):
                self.validate(step)

    def after_step(self, step: int) -> None:
        due, evaluator = self.validates(step), self.evaluator
        if evaluator is not None and (evaluator.ended or (due and evaluator.step is not None)):
            if not evaluator.ended:
                log.warning(
                    "the validation at step %d is still under way, and waited for, as that of step %d is due: raise "
                    "train.validate_every, or lower evaluation.max_prompts", evaluator.step, step,
                )  # fmt: skip
            self.finish_beside()
        if due:
            self.validate(step)

    def state(self) -> dict[str, Any]:
        # the version is what the update's weights will be called
        return {**self.feed.state(), "weight_version": self.version + 1, "kl_coefficient": self.kl_coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.tasks.restore(state)
        earlier = self.resumed.config["algorithm"]["kl"] if self.resumed else {}
        self.kl_coefficient = resumed_coefficient(self.config.algorithm.kl, earlier, state.get("kl_coefficient"))
        self.version = state["weight_version"] - 1  # the first sync brings those weights once more

    def run_step(self, step: int) -> Mapping[str, float]:
        """One step: sample, score, credit, update, sync."""
        phase = self.clock.phase
        with self.roles.sync.trainer_idle():
            samples = self.take(step)
        self.roles.turns.train()
        with phase("reward"):  # not before: who catches a replica up calls the same workers from another thread
            samples = self.with_model_scores(samples)
        values = self.begin_values(samples)
        with phase("old_logprobs"):
            batch, measured = self.with_old_logprobs(samples)
        with phase("reference"):
            batch, divergence = self.with_reference(batch)
        if values is not None:
            with phase("values"):
                batch = batch.joined(values.result())
        with phase("advantage"):
            batch = self.with_advantages(batch)

        def meanwhile() -> Mapping[str, float]:
            if self.sends_at_once:
                self.roles.sync.begin(self.version + 1)
            traces = samples["trace"]
            metrics = {
                **sample_metrics(samples, self.version),
                **left_over_metrics(samples, self.left_over),
                **trace_metrics(traces),
                **measured,
                **divergence,
                **self.feed.metrics(),
                **self.tasks.metrics(),
                **self.rollout_metrics(),
                "tokens": float(samples.lengths("input_ids").sum()),
            }
            if self.plan.old_logprobs == "actor":
                metrics |= metric_values(mismatch(batch, self.version))
            return metrics

        def then() -> None:
            self.begin_next(step)
            self.write_samples(step, samples, batch)
            draw_on(self.run_directory.timeline, samples["trace"])

        try:
            with phase("update"):
                begun = time.perf_counter()
                metrics = self.update(step, self.updates(self.training_batch(batch, step), step), meanwhile, then)
                self.sends_at_once = self._may_send_at_once(time.perf_counter() - begun)
            with phase("sync"):
                return metrics | self.sync_weights()
        except BaseException:
            self.roles.sync.give_up()
            raise

    # The stages

    def take(self, step: int) -> DistributedBatch:
        """The samples of a step, scored; see `rows_of` for the columns. With `train.staleness` some were drawn before,
        and others are drawn on."""
        groups, samples = self.config.train.prompts_per_step, self.config.rollout.samples_per_prompt
        with self.clock.phase("generate"):
            drawn = self.feed.draw(self.version, self._left(step))
            for _ in self.progress.counted(drawn, "samples", groups * samples, int):
                pass
        with self.clock.phase("reward"):
            taken = self.feed.take()
            self.left_over = torch.tensor([group.left_over > 0 for group in taken])
            return with_rewards(rows_of(taken), self.plan.rewards)

    def begin_next(self, step: int) -> None:
        """While a step's update runs, begin the next one as far as its requests, which go out once the new weights are
        served. Not before a validation, which the rollout answers first; with `train.staleness` all is begun anyway."""
        if self.config.train.staleness or step == self.steps or self.validates(step):
            return
        self.roles.rollout.hold()
        self.feed.begin(self.version + 1, self._left(step + 1))

    def _may_send_at_once(self, update_seconds: float) -> bool:
        """Whether the next update's weights are asked for before it has ended. With `train.staleness` replicas draw
        meanwhile. Where it takes long nothing is gained, and who asks a replica by itself would wait for it."""
        return not self.config.train.staleness and update_seconds < SHORT_UPDATE_SECONDS

    def _left(self, step: int) -> int:
        """Groups to be trained on until the run ends, a step's included."""
        return (self.steps - step + 1) * self.config.train.prompts_per_step

    def with_model_scores(self, samples: DistributedBatch) -> DistributedBatch:
        """Add the reward model's scores, if there is one."""
        return with_model_scores(samples, self.roles, self.config.reward_model.weight)

    def begin_values(self, samples: DistributedBatch) -> Future | None:
        """Have the critic, if there is one, estimate `values`, a batch that is to be: of a counted token the value of
        the state that it was drawn from, 0 for the others."""
        if "critic" not in self.roles.groups:
            return None
        dealt = Balanced(samples.select(["input_ids", "loss_mask"]), by="input_ids")
        return self.roles.groups["critic"].call("forward", dealt, VALUES, blocking=False)

    def with_old_logprobs(self, samples: DistributedBatch) -> tuple[DistributedBatch, dict[str, float]]:
        """Add `old_logprobs`, what the policy ratio divides by, if the actor is to compute them anew; else they are the
        rollout's (`with_defaults`).

        Returns:
            The batch; and the mean `entropy` where it was computed too: otherwise the update measures it (`measuring`).
        """
        if self.plan.old_logprobs == "rollout":
            return samples, {}
        outputs = replace(self._outputs(entropy=True), entropy_gradient=False)
        dealt = Balanced(samples.select(["input_ids", "loss_mask"]), by="input_ids")
        batch = samples.joined(self.roles.actor.forward(dealt, outputs, "old_"))
        entropy = Mean(0.0, 0.0)
        for part in batch.select(["old_entropy", "loss_mask"]).shards():
            of_part = part["old_entropy"].values[part["loss_mask"].values]
            entropy += Mean(of_part.sum().item(), float(len(of_part)))
        return batch.drop(["old_entropy"]), {"entropy": entropy.value}

    def with_reference(self, batch: DistributedBatch) -> tuple[DistributedBatch, dict[str, float]]:
        """Add `reference_logprobs`, if something compares with a reference, and take the KL term, if there is one, from
        the rewards if that is its place, or beside them for an advantage that needs `KL_PENALTY`.

        Returns:
            The batch; and `kl`, the mean of the term's tokens, where the loss does not measure it.
        """
        kl = self.config.algorithm.kl
        if not self.plan.uses_reference:
            return batch, {}
        batch = batch.joined(self.roles.score_by_reference(batch.select(["input_ids", "loss_mask"]), self._outputs()))
        if kl.place == "loss" or not kl.coefficient:
            return batch, {}
        needs = self.plan.advantage_needs or ()
        into = next((name for name in (KL_PENALTY, "token_rewards") if name in needs), "reward")
        batch, mean = with_kl_in_reward(batch, self.kl_coefficient, kl.chosen_estimator, into)
        if kl.target is None:
            return batch, {"kl": mean}
        used, self.kl_coefficient = self.kl_coefficient, adapted(self.kl_coefficient, mean, kl.target)
        return batch, {"kl": mean, "kl_coefficient": used}

    def with_advantages(self, batch: DistributedBatch) -> DistributedBatch:
        """Add what the advantage estimator makes of the columns it needs; no other is read here. It is given a row an
        episode."""
        given = columns_for(batch, self.plan.advantage_needs)
        estimate = partial(self.advantage, **self.plan.advantage_arguments)
        made = EpisodeRows(batch["episode"]).made(estimate, given, batch.lengths("input_ids"))
        return batch.with_columns(**made)

    def training_batch(self, batch: DistributedBatch, step: int) -> DistributedBatch:
        """What updates send to the roles: every column of numbers, and which mini-batch each row belongs to."""
        algorithm = self.config.algorithm
        if algorithm.mask_truncated:
            cut = torch.tensor([reason == "length" for reason in batch["finish_reason"]])
            batch = batch.with_columns(**{TRAINED: ~cut})
        batch = batch.drop([name for name in batch.columns if name in FOR_PEOPLE or batch.is_objects(name)])
        if algorithm.minibatches == 1:
            return batch
        seed = step_seed(self.config.train.seed, step)
        minibatch = assign_minibatches(len(batch), algorithm.minibatches, algorithm.epochs, seed)
        return batch.with_columns(minibatch=minibatch)

    def updates(self, batch: DistributedBatch, step: int) -> dict[str, Update]:
        """What each trained role is trained on, in one step."""
        algorithm, critic = self.config.algorithm, self.config.critic
        each = Update(batch, self.loss(), algorithm.minibatches, algorithm.epochs)
        updates = {}
        if "critic" not in self.roles.groups or step > critic.warmup_steps:
            measured = measuring(each.loss, self.version) if self.plan.old_logprobs == "rollout" else None
            updates["actor"] = replace(each, first_loss=measured)
        if "critic" in self.roles.groups:
            updates["critic"] = replace(each, loss=LossSpec(critic.loss.name, self.plan.critic_loss_arguments, VALUES))
        return updates

    def loss(self) -> LossSpec:
        """The configured loss, with the KL term if that is its place."""
        algorithm = self.config.algorithm
        arguments = dict(self.plan.loss_arguments)
        if algorithm.kl.coefficient and algorithm.kl.place == "loss":
            arguments |= {"kl_coefficient": algorithm.kl.coefficient, "kl_estimator": algorithm.kl.chosen_estimator}
        outputs = self._outputs(entropy=bool(arguments.get("entropy_coefficient")))
        return LossSpec(algorithm.loss.name, arguments, outputs)

    def sync_weights(self) -> dict[str, float]:
        """Bring the actor's weights to every rollout replica, verified."""
        self.version += 1
        report = self.roles.sync.sync(self.version, "keep" if self.config.train.staleness else "wait")
        plugins().observe("weights_updated", run=self, version=report.version, seconds=report.seconds)
        mib = {"": report.nbytes, "_moved": report.bytes_moved, "_minimum": report.bytes_minimum}
        metrics = {f"weights/mib{name}": None if nbytes is None else nbytes / 2**20 for name, nbytes in mib.items()}
        metrics |= {"weights/effect": report.effect, "weights/taken": report.taken}
        metrics |= {"weights/least_taken": report.least_taken, **self.roles.turns.metrics()}
        return {name: value for name, value in metrics.items() if value is not None}

    # Validations

    def _evaluator(self) -> Evaluator | None:
        if self.validation is None:
            return None
        train = self.config.train
        return Evaluator(
            self.validation,
            self.players,
            lambda samples: self.with_model_scores(samples),
            self.run_directory,
            self.progress,
            train.seed,
            self.tokenizer,
            train.samples_tokens,
            writes_samples=bool(train.samples_every),
        )

    @property
    def validates_beside(self) -> bool:
        """Whether an engine of its own answers the held-out prompts, while the next steps train."""
        return "evaluation" in self.plan.roles

    def validate(self, step: int) -> None:
        """Have the held-out prompts answered by the weights of a step that has just ended: here and now by the rollout,
        or from now on by an engine of their own (`finish_beside`)."""
        if (evaluator := self.evaluator) is None:
            return
        with self.clock.phase("validate"):
            evaluator.begin(step, self.roles.evaluating())
            if self.validates_beside:
                if self.config.train.save_best is not None and step:
                    self.keep_best_candidate(step)
                return
            try:
                with self.roles.sync.trainer_idle():
                    evaluator.wait()
            except BaseException:
                evaluator.cancel()
                raise
        self._report()

    def finish_beside(self, before: int | None = None, seconds: float | None = None) -> None:
        evaluator, step = self.evaluator, self.evaluator.step if self.evaluator else None
        if evaluator is None or step is None or (before is not None and step >= before):
            return
        if seconds is not None and not evaluator.wait_for(seconds):
            evaluator.cancel()
            log.warning(
                "the validation at step %d was under way and is not in validation.jsonl: there was no time for it. "
                "`enginehouse eval` has the figures of any model that was saved", step,
            )  # fmt: skip
            return
        with self.clock.phase("validate"):
            try:
                evaluator.wait()
            except Exception:
                evaluator.cancel()
                raise
        self._report()

    def _report(self) -> None:
        """Write and tell what came of a validation, and keep the model if it is the best."""
        assert self.evaluator is not None
        step, metrics = self.evaluator.report()
        plugins().observe("validated", run=self, step=step, metrics=metrics)
        if (best := self.config.train.save_best) is None:
            return
        if best not in metrics:
            said = f"the validation at step {step} measured no {best!r} (train.save_best); {nearest(best, metrics)}"
            if not step and "/majority@" not in best:  # a model may learn to give answers
                raise ConfigError(said)
            log.warning("%s", said)
        elif step:
            self.save_best(step, best, metrics[best])

    def rollout_metrics(self) -> dict[str, float]:
        """What happened to the rollout replicas since this was asked for last."""
        metrics = self.roles.rollout.metrics()
        return metrics | {"busy/generate": metrics["rollout/busy_seconds"]}

    def _feed(self) -> Feed:
        """The feed of this run's samples."""
        config = self.config
        groups, seed = config.train.prompts_per_step, config.train.seed

        def named(task: Task) -> tuple[str, int]:
            step, row = divmod(task.serial, groups)  # in which it is drawn if nothing comes between
            return f"task-{task.serial}", row_seed(step_seed(seed, step + 1), row)

        return Feed(
            self.players.event_loop,
            self.tasks,
            self.players.player("training", self.roles.rollout, named),
            Schedule(groups, config.train.staleness, config.rollout.extra_groups),
        )

    def _kinds(self) -> dict[str, Kind]:
        """What tasks are played for."""
        config, validation = self.config, self.validation
        sampling = sampling_params(config.rollout.sampling, config.rollout.samples_per_prompt)
        kinds = {"training": Kind(sampling, config.train.prompts_per_step, filtered=True)}
        if validation is not None:
            kinds[KIND] = kind_of(validation)
        return kinds

    # What is written

    def write_samples(self, step: int, samples: DistributedBatch, batch: DistributedBatch) -> None:
        """Write what the model said, in chosen steps, with the advantages of the batch made of it."""
        every, tokens = self.config.train.samples_every, self.config.train.samples_tokens
        if every and (step == 1 or step % every == 0):
            if "advantages" in batch:
                samples = samples.with_columns(advantages=batch["advantages"])
            self.run_directory.write_samples(step, sample_rows(samples, self.tokenizer, tokens))

    def _outputs(self, entropy: bool = False) -> Outputs:
        return outputs_as_sampled(self.config.rollout.sampling, entropy)

    def _dataset(self, path: str | list[str] | dict[str, float], order_by: str | None = None) -> PromptDataset:
        dataset = load_prompts(self.plan, path, self.tokenizer, self.progress, order_by)
        if dataset.dropped:
            self.dropped[named(path)[0]] = dataset.dropped
        return dataset
