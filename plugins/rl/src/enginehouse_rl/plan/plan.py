"""Checks everything that can be checked before a process starts.

`plan` turns a config into a `Plan`: it resolves names, checks the types of options, fills in defaults that depend on
other sections, and describes the run as text. The parts in the tuples below do this, in the order of the tuples. They
import neither Ray nor an engine. They import torch only if they import a function of the config that needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from enginehouse.roles.launch import Launch
from enginehouse.roles.role_plan import default_tolerance
from enginehouse_rl.benchmarks.names import BENCHMARKS
from enginehouse_rl.config.schema import AnyConfig, Config, DPOConfig, PreferenceConfig, SFTConfig
from enginehouse_rl.plan.benchmarks import BenchmarkPlan
from enginehouse_rl.plan.evaluated import EvaluatedModel, pick_directory
from enginehouse_rl.plan.functions import FunctionCall
from enginehouse_rl.plan.parts.actor import ActorPart
from enginehouse_rl.plan.parts.advantage import AdvantagePart, FilterPart
from enginehouse_rl.plan.parts.auxiliary import CriticPart, EvalRewardModelPart, ReferencePart, RewardModelPart
from enginehouse_rl.plan.parts.benchmarks import BenchmarksPart
from enginehouse_rl.plan.parts.data import DataPart, DemonstrationsPart, PreferenceLossPart, PreferencesPart
from enginehouse_rl.plan.parts.directory import CheckpointsPart, DirectoryPart, EvalDirectoryPart, TrackersPart
from enginehouse_rl.plan.parts.draft import Draft
from enginehouse_rl.plan.parts.gguf import GgufPart
from enginehouse_rl.plan.parts.hub import HubPart
from enginehouse_rl.plan.parts.loss import LossPart
from enginehouse_rl.plan.parts.memory import MemoryPart
from enginehouse_rl.plan.parts.model import ModelPart
from enginehouse_rl.plan.parts.placement import EvalPlacementPart, PlacementPart, SupervisedPlacementPart
from enginehouse_rl.plan.parts.playing import EnvironmentPart, RewardsPart
from enginehouse_rl.plan.parts.prompts import HeldOutPart, PromptsPart
from enginehouse_rl.plan.parts.rollout import EvalRolloutPart, EvaluationPart, RolloutPart
from enginehouse_rl.plan.parts.stages import StageModelsPart, StagesPart
from enginehouse_rl.plan.parts.steps import StepsPart
from enginehouse_rl.plan.parts.weights import WeightsPart
from enginehouse_rl.plan.rows import preference_columns

if TYPE_CHECKING:
    from enginehouse.engines.model import Device
    from enginehouse.plugin import PluginManager
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse_rl.checkpoints import Checkpoint
    from enginehouse_rl.data.preference_files import PreferenceColumns
    from enginehouse_rl.data.rendering import TokenLimit
    from enginehouse_rl.plan.rewards import RewardPlan
    from enginehouse_rl.plan.stages import StagePlan
    from enginehouse_rl.plan.trackers import TrackerPlan

END = (DirectoryPart, MemoryPart, TrackersPart, CheckpointsPart)
"""The last parts of every run that trains."""
MODELS = (ActorPart, CriticPart, ReferencePart, RewardModelPart, StageModelsPart, RolloutPart, EvaluationPart)
PLAYING = (StepsPart, PromptsPart, EnvironmentPart, RewardsPart, FilterPart, LossPart, StagesPart)
PLACED = (HubPart, GgufPart, AdvantagePart, ModelPart, *MODELS, PlacementPart, WeightsPart)
TRAIN = (*PLACED, *PLAYING, BenchmarksPart, *END)
"""The parts of a reinforcement-learning run. Each part comes after the parts that it reads."""
EVAL_MODELS = (EvalRolloutPart, EvalRewardModelPart, EvalPlacementPart)
EVAL_END = (EvalDirectoryPart, MemoryPart, TrackersPart)
EVAL_PROMPTS = (HeldOutPart, EnvironmentPart, RewardsPart, BenchmarksPart)
EVAL = (HubPart, GgufPart, ModelPart, *EVAL_MODELS, *EVAL_PROMPTS, *EVAL_END)
"""The parts of an evaluation outside a run."""
SFT = (HubPart, GgufPart, ModelPart, ActorPart, SupervisedPlacementPart, DemonstrationsPart, *END)
"""The parts of a supervised run."""
PAIRS = (PreferenceLossPart, SupervisedPlacementPart, PreferencesPart, *END)
DPO = (HubPart, GgufPart, ModelPart, ActorPart, ReferencePart, *PAIRS)
"""The parts of a DPO or KTO run."""
RM = (HubPart, GgufPart, ModelPart, ActorPart, *PAIRS)
"""The parts of a run that trains a reward model."""
PAGE = (
    *("model", "actor", "rollout", "evaluation", "reference", "critic", "reward model", "runtimes", "weights"),
    *("reward", "environment", "stages", "algorithm", "data", "prompts", "a step", "schedule", "validation"),
    *(*BENCHMARKS, "the run"),
)
"""The order of the facts in a plan that generates responses. Other plans list them in the order of their parts."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A checked run of any kind.

    Attributes:
        config: the config, with local paths in place of names on the hub.
        written: the config as the run records it, with names on the hub and the commit of each.
        hub: the entry of each name on the hub, for `run.json`.
        gguf: the entry of each model that was converted from a GGUF file, for `run.json`.
        roles: the plan of each role by name. Roles that share processes are built in this order.
        device: torch device type of every engine, `"cpu"` or `"cuda"`.
        run_directory: absolute path.
        python_path: directories from which workers import the user's own functions.
        distributions: distributions of the backends in use, for the record of versions.
        facts: the description of the run, as `(label, sentence)`.
        notes: notes on what the user may not expect.
        obstacle: the reason that the run cannot start although its config is valid; empty if it can.
        memory: the memory that the run needs, in a few words; empty if unknown.
        resumed: the checkpoint that the run resumes from; None for a new run.
        spare_unfinished: true if `run.overwrite` must not delete a run that can be resumed.
        trackers: the trackers that get the metrics, besides the run directory.
    """

    config: AnyConfig
    written: AnyConfig
    hub: tuple[Mapping[str, Any], ...]
    gguf: tuple[Mapping[str, Any], ...]
    roles: Mapping[str, RolePlan]
    device: Device
    run_directory: Path
    python_path: tuple[str, ...]
    distributions: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    obstacle: str
    memory: str
    resumed: Checkpoint | None
    spare_unfinished: bool
    trackers: tuple[TrackerPlan, ...]

    @property
    def launch(self) -> Launch:
        """The settings with which the run starts the processes of its roles."""
        cluster = self.config.cluster
        return Launch(
            launcher=cluster.launcher,
            address=cluster.address,
            device=self.device,
            device_is_asked=cluster.device != "auto",
            seed=self.config.train.seed,
            call_seconds=cluster.call_timeout_seconds,
            threads=cluster.threads_per_process,
        )

    def render(self) -> str:
        """Return the plan as text: a line that says whether the run can start, then a line for each fact and note."""
        lines = [*self.facts, *(("note", note) for note in self.notes)]
        width = max(len(label) for label, _ in lines)
        return "\n".join([self._answer(), *(f"{label:<{width}}  {words}" for label, words in lines)])

    def _answer(self) -> str:
        if self.obstacle:
            return f"Cannot start: {self.obstacle}"
        return f"OK: {', '.join(filter(None, (self._extent(), self.memory)))}"

    def _extent(self) -> str:
        return f"{self.config.train.steps:,} steps"


@dataclass(frozen=True, kw_only=True)
class PlayPlan(RunPlan):
    """A checked run that generates responses: a reinforcement-learning run, or an evaluation outside a run.

    Attributes:
        environment: the class of the environment that generates the samples.
        is_single_turn: true if this is the built-in environment `single_turn`.
        vocabulary: the number of tokens that every model of the run knows; None if unknown.
        most_tokens: the maximum length in tokens of a sample that every model can read; None if unknown.
        advantage_needs: the columns that the advantage reads; None: all columns except texts.
        keep: the filter of groups; None: the run trains on all groups.
        prompt_limit: the maximum number of tokens of a prompt.
        benchmarks: the benchmarks that the model answers beside the files of held-out prompts.
    """

    config: Config
    rewards: tuple[RewardPlan, ...]
    environment: FunctionCall
    is_single_turn: bool
    vocabulary: int | None
    most_tokens: int | None
    advantage_needs: tuple[str, ...] | None = None
    keep: FunctionCall | None = None
    prompt_limit: TokenLimit
    benchmarks: tuple[BenchmarkPlan, ...] = ()

    @property
    def launch(self) -> Launch:
        return replace(super().launch, tokens_stay=self.config.environment.processes > 0)


@dataclass(frozen=True, kw_only=True)
class Plan(PlayPlan):
    """A checked reinforcement-learning run.

    It always has the roles `"actor"` and `"rollout"`. It has `"critic"` if the advantage needs values, `"reference"`
    and `"reward_model"` if the run uses such models, and `"evaluation"` if a separate engine answers validation
    prompts.

    Attributes:
        old_logprobs: role whose logprobs are the denominator of the policy ratio, `"rollout"` or `"actor"`.
        loss: the actor's loss with its arguments, including arguments from other sections of the config, but without
            the arguments of the KL term.
        critic_loss: the critic's loss; None without a critic.
    """

    advantage: FunctionCall
    stages: tuple[StagePlan, ...]
    old_logprobs: Literal["rollout", "actor"]
    loss: FunctionCall
    critic_loss: FunctionCall | None

    @property
    def effect_tolerance(self) -> float:
        """Tolerance of effect checks in nats: `weights.effect_tolerance` or, if unset, the default."""
        tolerance = self.config.weights.effect_tolerance
        return default_tolerance(self.roles) if tolerance is None else tolerance

    @property
    def launch(self) -> Launch:
        return replace(super().launch, effect_tolerance=self.effect_tolerance)


@dataclass(frozen=True, kw_only=True)
class EvalPlan(PlayPlan):
    """A checked evaluation outside a run. Its roles are `"rollout"`, and `"reward_model"` if the config names one.

    Attributes:
        step: the step of the run that saved the model; 0 if unknown.
        reads_back: true if replicas report checksums of the weights that they serve.
    """

    step: int
    reads_back: bool

    def _extent(self) -> str:
        return "an evaluation"


@dataclass(frozen=True, kw_only=True)
class SFTPlan(RunPlan):
    """A checked supervised run. Its only role is `"actor"`.

    Attributes:
        row_limit: the maximum number of tokens of a demonstration.
    """

    config: SFTConfig
    row_limit: TokenLimit


@dataclass(frozen=True, kw_only=True)
class PreferencePlan(RunPlan):
    """A checked run on preferences. Its role `"actor"` is a policy or a reward model; a policy also has a
    `"reference"`.

    Attributes:
        row_limit: the maximum number of tokens of a prompt with a response.
    """

    config: PreferenceConfig
    columns: PreferenceColumns
    row_limit: TokenLimit


def plan(
    config: Config,
    plugins: PluginManager | None = None,
    config_path: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    starts: bool = True,
) -> Plan:
    """Check a reinforcement-learning run.

    The current directory and the config file's directory become importable, both here and in the workers.

    Args:
        plugins: the installed plugins; None: the plugins of this process, filtered by `plugins` in the config.
        config_path: the file of the config, for messages and imports.
        resume: resume the run in `run.directory` from its newest complete checkpoint, and ignore `run.overwrite`.
        overrides: the overrides of the command line. `run.overwrite` deletes an unfinished run with checkpoints only if
            one of these overrides sets it.
        starts: true if the run is to start. If false, an earlier run in `run.directory` becomes the plan's `obstacle`.

    Raises:
        UserError: `ConfigError`, `DataError`, `ModelError` or `PluginLookupError`. Several problems are one
            `ConfigError` that lists them.
    """
    run = Draft(config, plugins, config_path, resume, overrides, starts)
    run.settle(TRAIN)
    return Plan(
        advantage=run[AdvantagePart].call,
        advantage_needs=run[AdvantagePart].needs,
        stages=run[StagesPart].stages,
        keep=run[FilterPart].call,
        old_logprobs=run[LossPart].old_logprobs,
        loss=run[LossPart].call,
        critic_loss=run[LossPart].critic,
        **_play_fields(run),
        **_make_common_fields(run, PAGE),
    )


def plan_eval(
    config: Config,
    plugins: PluginManager | None = None,
    config_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    model: str | None = None,
) -> EvalPlan:
    """Check an evaluation outside a run.

    Args:
        config: the config of a reinforcement-learning run. Only the parts that an evaluation needs are checked.
        plugins: as for `plan`.
        config_path: as for `plan`.
        overrides: the overrides of the command line. `run.directory` names the evaluation's directory only if one of
            these overrides sets it.
        model: the directory of a model or of a run; None: `model.path`.
    """
    named_by = "--model" if model else "model.path"
    evaluated = EvaluatedModel.find(model or config.model.path, named_by)
    directory = pick_directory(config.run.directory, evaluated.name, overrides)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": evaluated.path}),
            "run": config.run.model_copy(update={"directory": directory}),
            "stages": {},
        }
    )
    run = Draft(config, plugins, config_path, overrides=overrides)
    run.model_key, run.model_step = named_by, evaluated.step
    run.settle(EVAL)
    return EvalPlan(
        step=evaluated.step,
        reads_back=run[EvalRolloutPart].reads_back,
        **_play_fields(run),
        **_make_common_fields(run, PAGE),
    )


def plan_sft(
    config: SFTConfig,
    plugins: PluginManager | None = None,
    config_path: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    starts: bool = True,
) -> SFTPlan:
    """Check a supervised run; the arguments are as for `plan`."""
    run = Draft(config, plugins, config_path, resume, overrides, starts)
    run.settle(SFT)
    return SFTPlan(row_limit=run[DataPart].limit, **_make_common_fields(run))


def plan_preferences(
    config: PreferenceConfig,
    plugins: PluginManager | None = None,
    config_path: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    starts: bool = True,
) -> PreferencePlan:
    """Check a run of DPO, KTO or a reward model; the arguments are as for `plan`."""
    run = Draft(config, plugins, config_path, resume, overrides, starts)
    run.settle(DPO if isinstance(config, DPOConfig) else RM)
    return PreferencePlan(columns=preference_columns(config), row_limit=run[DataPart].limit, **_make_common_fields(run))


def _make_common_fields(run: Draft[AnyConfig], page: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that every plan has, with the facts in the order of `page`."""
    used = {id(engine.record) for engine in run.engines.values()}  # records of two distributions may be equal
    owners = [provided.plugin.distribution for provided in run.plugins.providers() if id(provided.record) in used]
    directory, trackers = run[DirectoryPart], run[TrackersPart].plans
    packages = [text for tracker in trackers for text in tracker.packages]
    return {
        "config": run.config,
        "written": run[HubPart].written,
        "hub": run[HubPart].entries,
        "gguf": run[GgufPart].entries,
        "roles": run.roles,
        "device": run.device,
        "run_directory": directory.path,
        "python_path": run.python_path,
        "distributions": tuple(dict.fromkeys([*owners, *packages])),
        "facts": run.facts(page),
        "notes": tuple(run.shorten(note) for note in run.findings.notes),
        "obstacle": directory.obstacle,
        "memory": run[MemoryPart].total,
        "resumed": directory.resumed,
        "spare_unfinished": directory.spare_unfinished,
        "trackers": trackers,
    }


def _play_fields(run: Draft[Config]) -> dict[str, Any]:
    """Return the fields that every `PlayPlan` has."""
    environment = run[EnvironmentPart]
    return {
        "rewards": run[RewardsPart].rewards,
        "environment": environment.call,
        "is_single_turn": environment.is_single_turn,
        "vocabulary": environment.vocabulary,
        "most_tokens": environment.most_tokens,
        "prompt_limit": run[DataPart].limit,
        "benchmarks": run[BenchmarksPart].benchmarks,
    }


PLANS: dict[str, Callable[..., RunPlan]] = {
    "train": plan,
    "sft": plan_sft,
    "dpo": plan_preferences,
    "rm": plan_preferences,
}
"""The functions that check a config, by the command that runs it."""
