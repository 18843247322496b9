"""The loops that train on preferences: a policy by DPO or KTO, or a reward model."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.controller import Balanced
from enginehouse.data import Batch
from enginehouse.engines.train import LossSpec, Outputs
from enginehouse.roles.sequence_scores import VALUES, append_end, row_sums
from enginehouse_rl.config.schema import DPOConfig, RMConfig
from enginehouse_rl.data.preferences import PreferenceDataset
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.data.sampler import Sampler
from enginehouse_rl.loop.loop import Loop
from enginehouse_rl.loop.running_updates import Update
from enginehouse_rl.preferences.bradley_terry import bradley_terry
from enginehouse_rl.preferences.dpo import dpo
from enginehouse_rl.preferences.kto import kto
from enginehouse_rl.preferences.slopes import Judgement, with_weights

if TYPE_CHECKING:
    from enginehouse_rl.plan.plan import PreferencePlan
    from enginehouse_rl.runs import Progress, RunDirectory

LN_2 = math.log(2)
BY_ROW = {"aggregation": "sequence_mean_token_sum"}
"""Arguments of the linear losses. They select the mean over rows of each row's sum, which `with_weights` requires."""


class PreferenceTrainer(Loop):
    """Trains the actor of a plan on preferences. In each step, a forward pass gives the losses of the rows, from which
    the weights of the update are computed (`slopes`)."""

    plan: PreferencePlan
    loss: LossSpec
    _loss = 0.0

    def prepare(self) -> None:
        plan, progress = self.plan, self.progress
        data, train, model = plan.config.data, plan.config.train, plan.config.model
        with progress.task("reading data"):
            tokenizer = load_tokenizer(model.path, model.trust_remote_code, data.template_arguments)
            trained, held_out = (
                PreferenceDataset.load(
                    paths, tokenizer, plan.columns, plan.row_limit, data.chat_template, progress.count, data.system
                )
                if paths
                else None
                for paths in (data.train, data.validation)
            )
        assert trained is not None
        self.held_out = held_out
        self.items = Sampler(trained, train.rows_per_step, train.seed)

    @abstractmethod
    def judge(self, items: Batch) -> tuple[Batch, Judgement]:
        """Return the rows of `items` for the update, with `input_ids` and `loss_mask`, and the current losses."""

    def run_step(self, step: int) -> Mapping[str, float]:
        with self.clock.phase("data"):
            items = self.items.next()
        with self.clock.phase("score"):
            rows, judgement = self.judge(items)
        figures = means([judgement])
        self._loss = figures["loss"]
        with self.clock.phase("update"):
            tokens = {"tokens": float(rows["input_ids"].tokens)}
            update = Update(with_weights(rows, judgement.slopes), self.loss)
            metrics = self.update(step, update, {**tokens, **figures})
        if self.held_out is not None and self.validates(step):
            with self.clock.phase("validation"):
                metrics |= {f"validation/{name}": value for name, value in self.validate(self.held_out).items()}
        return metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {**metrics, "loss": self._loss})  # the update reports its linear loss

    def validate(self, held_out: PreferenceDataset) -> dict[str, float]:
        """Return the current metrics of all held-out items."""
        parts = split_items(len(held_out), self.items.rows_per_step)
        return means([self.judge(held_out.rows(part))[1] for part in parts])

    def state(self) -> dict[str, Any]:
        return {"items": self.items.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.items.load_state_dict(state["items"])


def split_items(items: int, each: int) -> list[range]:
    """Split the indices of `items` items into ranges of `each` items.

    If the last range would have a single item, this item joins the range before it, because KTO needs the responses of
    at least two items.
    """
    starts = [*range(0, items, each)]
    if len(starts) > 1 and items - starts[-1] == 1:
        starts.pop()
    return [range(begin, end) for begin, end in zip(starts, [*starts[1:], items], strict=True)]


def below_chance(losses: Sequence[float]) -> bool:
    """True if the mean loss is below ln 2, the loss of uninformative scores, by more than twice the standard error of
    the mean."""
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.inf
    return statistics.fmean(losses) < LN_2 - 2 * error


def means(judgements: list[Judgement]) -> dict[str, float]:
    values = {"loss": torch.cat([judgement.losses for judgement in judgements])}
    for name in judgements[0].metrics:
        values[name] = torch.cat([judgement.metrics[name] for judgement in judgements])
    measured = {name: tensor.mean().item() for name, tensor in values.items() if name == "loss" or len(tensor)}
    if "margin" not in measured and {"rewards/chosen", "rewards/rejected"} <= measured.keys():
        measured["margin"] = measured["rewards/chosen"] - measured["rewards/rejected"]
    return measured


class DPOTrainer(PreferenceTrainer):
    """Trains a policy against a reference, by DPO or KTO."""

    loss = LossSpec("weighted_logprob", BY_ROW)

    def judge(self, items: Batch) -> tuple[Batch, Judgement]:
        assert isinstance(self.plan.config, DPOConfig)
        algorithm = self.plan.config.algorithm
        rows = items.select(["input_ids", "loss_mask"])
        if algorithm.loss != "kto":
            policy, reference = self._compute_logprobs(rows)
            tokens = row_sums(rows["loss_mask"])
            smoothing = algorithm.label_smoothing
            return rows, dpo(
                policy, reference, tokens, loss=algorithm.loss, beta=algorithm.beta, label_smoothing=smoothing
            )
        mismatched = self.items.dataset.mismatch(rows)
        policy, reference = self._compute_logprobs(Batch.concat([rows, mismatched]))
        number = len(rows)
        return rows, kto(
            policy[:number],
            reference[:number],
            items["label"],
            policy[number:] - reference[number:],
            beta=algorithm.beta,
            desirable_weight=algorithm.desirable_weight,
            undesirable_weight=algorithm.undesirable_weight,
        )

    def _compute_logprobs(self, rows: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of each response's logprobs under the policy, and the sum under the reference."""
        policy = self.roles.actor.forward(Balanced(rows, by="input_ids"), Outputs())
        reference = self.roles.score_by_reference(rows, Outputs())
        return row_sums(policy["logprobs"]), row_sums(reference["reference_logprobs"])


class RewardModelTrainer(PreferenceTrainer):
    """Trains a model with a value head to score the better response of a pair higher."""

    loss = LossSpec("weighted_value", BY_ROW, VALUES)
    _has_margins = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        losses = [row["loss"] for row in self.progress.history.recent()]
        if step == self.steps and not self._has_margins and not below_chance(losses):
            self.progress.note(
                f"nothing learned yet: the loss of the last {len(losses)} steps is {statistics.fmean(losses):.3f}, not "
                f"clearly below the loss of uninformative scores (ln 2 = {LN_2:.3f}). Try more steps or a larger "
                "actor.engine.options.lr"
            )

    def judge(self, items: Batch) -> tuple[Batch, Judgement]:
        rows = append_end(items)
        scored = self.roles.actor.forward(Balanced(rows, by="input_ids"), VALUES)
        margin = items["margin"][::2] if "margin" in items else None
        self._has_margins = margin is not None
        return rows, bradley_terry(row_sums(scored["values"]), margin)


def trainer(plan: PreferencePlan, run: RunDirectory, progress: Progress) -> PreferenceTrainer:
    kind = RewardModelTrainer if isinstance(plan.config, RMConfig) else DPOTrainer
    return kind(plan, run, progress)
