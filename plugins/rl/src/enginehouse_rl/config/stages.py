"""Which stages a step has, in order, and whether each finds the columns that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginehouse.data.columns import FOR_ADVANTAGES, OF_SAMPLES
from enginehouse.errors import nearest

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config.schema import Config

STEPS = "enginehouse_rl.steps"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage of each step of a run.

    Attributes:
        name: what messages call it.
        stage: `"module:Class"` of an `enginehouse_rl.steps.stage.Stage`.
        needs: the columns that it reads; None: all but texts.
        adds: the columns that it adds, or changes.
    """

    name: str
    stage: str
    needs: tuple[str, ...] | None
    adds: tuple[str, ...]


def plan_stages(
    findings: Findings, config: Config, needs: tuple[str, ...] | None, uses_reference: bool, old_logprobs: str
) -> tuple[StagePlan, ...]:
    """Plan the stages of a step, and refuse a column that none before it adds.

    Args:
        findings: collect what is wrong.
        config: of the run.
        needs: columns of the advantage; None: all but texts.
        uses_reference: whether a KL term or the advantage compares with a reference.
        old_logprobs: whose logprobs the ratio divides by.
    """
    stages = tuple(_stages(config, needs, uses_reference, old_logprobs))
    there = set(OF_SAMPLES)
    for stage in stages:
        for column in (name for name in stage.needs or () if name not in there):
            choices = nearest(column, there.union(FOR_ADVANTAGES))
            findings.refuse(f"the {stage.name} needs the column {column!r}: {choices}")
        there.update(stage.adds)
    return stages


def _stages(
    config: Config, needs: tuple[str, ...] | None, uses_reference: bool, old_logprobs: str
) -> Iterator[StagePlan]:
    tokens, kl = ("input_ids", "loss_mask"), config.algorithm.kl
    if config.reward_model.path:
        yield StagePlan("reward model", f"{STEPS}.reward_model:RewardModel", ("input_ids", "reward"), ("reward",))
    if old_logprobs == "actor":
        yield StagePlan("actor", f"{STEPS}.old_logprobs:OldLogprobs", tokens, ("old_logprobs",))
    if uses_reference:
        yield StagePlan("reference", f"{STEPS}.reference:Reference", tokens, ("reference_logprobs",))
    if kl.coefficient and kl.place == "reward":
        compared = ("loss_mask", "old_logprobs", "reference_logprobs")
        yield StagePlan("KL term", f"{STEPS}.kl_in_reward:KLInReward", compared, (_taken_off(needs or ()),))
    if "values" in (needs or ()):
        yield StagePlan("critic", f"{STEPS}.values:Values", tokens, ("values",))
    name = f"advantage {config.algorithm.advantage.name!r}"
    yield StagePlan(name, f"{STEPS}.advantage:AdvantageStage", needs, ("advantages",))


def _taken_off(needs: Sequence[str]) -> str:
    """The column that takes the KL term, of those that the advantage reads."""
    return next((name for name in ("kl_penalty", "token_rewards") if name in needs), "reward")
