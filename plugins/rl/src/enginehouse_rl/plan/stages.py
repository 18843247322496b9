"""Orders the stages of a step, and checks that each stage gets the columns that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginehouse.data.columns import FOR_ADVANTAGES, OF_SAMPLES
from enginehouse.errors import UserError, nearest
from enginehouse.plugin import Stage

if TYPE_CHECKING:
    from enginehouse.plugin import PluginManager
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config.schema import Config

STEPS = "enginehouse_rl.steps"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage in each step of a run.

    Attributes:
        name: the name of the stage in messages.
        stage: `"module:Class"` of an `enginehouse_rl.steps.stage.BatchStage`.
        needs: the columns that it reads; None: all columns except texts.
        adds: the columns that it adds or changes.
        record: the record of a plugin's stage; None for a built-in stage.
        role: the role of the model that a plugin's stage has; empty if the stage has no model.
        arguments: the arguments of the record's function.
    """

    name: str
    stage: str
    needs: tuple[str, ...] | None
    adds: tuple[str, ...]
    record: Stage | None = None
    role: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


def find_own_stages(
    findings: Findings, plugins: PluginManager, config: Config, needs: Sequence[str] | None
) -> dict[str, Stage]:
    """Return the plugins' stages that a step needs, by name. The config names a stage, or the stage adds a column of
    `needs`, the columns that the advantage reads."""
    records: dict[str, Stage] = {}
    for name, section in config.stages.items():
        try:
            records[name] = record = plugins.get(Stage, name)
        except UserError as error:
            findings.refuse(f"stages.{name}: {error}")
            continue
        if record.model and not section.path:
            findings.refuse(f"the stage {name!r} has a model: set stages.{name}.path to its directory")
        elif not record.model and section != type(section)(arguments=section.arguments):
            findings.refuse(f"the stage {name!r} has no model: stages.{name} may set only arguments")
    added = {column for record in records.values() for column in record.columns}
    for column in (name for name in needs or () if name not in added and name not in FOR_ADVANTAGES):
        for record in (record for record in plugins.all(Stage) if column in record.columns):
            if record.model:
                findings.refuse(
                    f"the advantage {config.algorithm.advantage.name!r} needs the column {column!r} of the stage "
                    f"{record.name!r}, which has a model: set stages.{record.name}.path to its directory"
                )
            with findings.collecting():
                records[record.name] = plugins.get(Stage, record.name)
    return records


def plan_stages(
    findings: Findings,
    config: Config,
    needs: tuple[str, ...] | None,
    uses_reference: bool,
    old_logprobs: str,
    own: Sequence[StagePlan] = (),
) -> tuple[StagePlan, ...]:
    """Plan the stages of a step, and reject a stage that needs a column which no earlier stage adds.

    Args:
        needs: the columns that the advantage reads; None: all columns except texts.
        uses_reference: true if a KL term or the advantage compares the policy with a reference.
        old_logprobs: role whose logprobs are the denominator of the policy ratio.
    """
    stages = tuple(_order_stages(config, needs, uses_reference, old_logprobs, own))
    columns = set(OF_SAMPLES)
    for stage in stages:
        for column in (name for name in stage.needs or () if name not in columns):
            choices = nearest(column, columns.union(FOR_ADVANTAGES))
            findings.refuse(f"the {stage.name} needs the column {column!r}, which no earlier stage adds. {choices}")
        columns.update(stage.adds)
    return stages


def plan_own_stage(name: str, record: Stage, arguments: Mapping[str, Any]) -> StagePlan:
    """Plan a plugin's stage that the config calls `name`."""
    role = f"stages.{name}" if record.model else ""
    return StagePlan(
        f"stage {name!r}", f"{STEPS}.package_stage:PackageStage", record.needs, record.columns, record, role, arguments
    )


def _order_stages(
    config: Config, needs: tuple[str, ...] | None, uses_reference: bool, old_logprobs: str, own: Sequence[StagePlan]
) -> Iterator[StagePlan]:
    tokens, kl = ("input_ids", "loss_mask"), config.algorithm.kl
    if config.reward_model.path:
        yield StagePlan("reward model", f"{STEPS}.reward_model:RewardModelStage", ("input_ids", "reward"), ("reward",))
    scoring = [stage for stage in own if "reward" in stage.adds]  # the KL term is subtracted from their result
    yield from scoring
    if old_logprobs == "actor":
        yield StagePlan("actor", f"{STEPS}.old_logprobs:OldLogprobsStage", tokens, ("old_logprobs",))
    if uses_reference:
        yield StagePlan("reference", f"{STEPS}.reference:ReferenceStage", tokens, ("reference_logprobs",))
    if kl.coefficient and kl.place == "reward":
        compared = ("loss_mask", "old_logprobs", "reference_logprobs")
        yield StagePlan("KL term", f"{STEPS}.kl_in_reward:KLInRewardStage", compared, (_pick_penalized(needs or ()),))
    if "values" in (needs or ()) or any("values" in (stage.needs or ()) for stage in own):
        yield StagePlan("critic", f"{STEPS}.values:ValuesStage", tokens, ("values",))
    yield from (stage for stage in own if stage not in scoring)
    name = f"advantage {config.algorithm.advantage.name!r}"
    yield StagePlan(name, f"{STEPS}.advantage:AdvantageStage", needs, ("advantages",))


def _pick_penalized(needs: Sequence[str]) -> str:
    """Return the column for the KL term in the reward, chosen by the columns that the advantage reads."""
    return next((name for name in ("kl_penalty", "token_rewards") if name in needs), "reward")
