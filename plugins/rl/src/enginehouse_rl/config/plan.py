"""Everything that can be checked before a process starts is checked here, before a process starts.

`plan` takes a config to a `Plan`: the same config with every name resolved, every option typed, every default that
depends on something else filled in, and what the run will do in words. Neither ray nor an engine is imported; torch
only if a function that has to be looked at imports it. What is checked lies beside this file: `backends`, `arithmetic`,
`functions`, `paths`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from enginehouse.engines.memory import MemoryDemand, MemoryUse, ModelShape
from enginehouse.engines.model import Device, ModelSpec, end_ids, served_positions
from enginehouse.errors import ConfigError, ModelError, nearest
from enginehouse.plugin import (
    Advantage,
    Environment,
    Filter,
    Function,
    Loss,
    Reward,
    RolloutBackend,
    Stage,
    TrainBackend,
    capabilities,
    configure_plugins,
    resolve,
)
from enginehouse.plugin.arguments import KL_ARGUMENTS
from enginehouse.plugin.findings import Findings
from enginehouse.plugin.secrets import check_secrets
from enginehouse.roles.launch import Launch
from enginehouse.roles.role_plan import RolePlan, own_processes
from enginehouse.weights.effect import TOLERANCES
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config.arguments import check_call, take_values
from enginehouse_rl.config.arithmetic import (
    check_batches,
    check_cluster,
    check_cores,
    check_dpo,
    check_environments,
    check_evaluation,
    check_inline,
    check_lengths,
    check_placement,
    check_positions,
    check_rows,
    row_limit,
    samples_per_step,
)
from enginehouse_rl.config.backends import (
    RunsOn,
    check_capabilities,
    check_export,
    check_model,
    check_native_names,
    check_processes,
    check_sampling,
    check_servers,
    check_stops,
    check_targets,
    check_value_head,
    choose_interpreter,
    choose_transport,
    find_backend,
    gpus_of,
    memory_of,
    scheduled_options,
    stored_names,
    typed_options,
)
from enginehouse_rl.config.device import cpu_has_bfloat16, gpu_here, pick_device, pick_dtype
from enginehouse_rl.config.evaluated import Evaluated, free_directory, holds_training
from enginehouse_rl.config.functions import check_environment, extend_path, find_function
from enginehouse_rl.config.memory import check_memory, table
from enginehouse_rl.config.outline import Facts, outline_eval, outline_preferences, outline_rl, outline_sft
from enginehouse_rl.config.paths import EarlierRun, check_run_directory, has_chat_template, read_model
from enginehouse_rl.config.placement import check_turns, choose_placement, gpus_needed
from enginehouse_rl.config.resume import check_resume, kind_of
from enginehouse_rl.config.rewards import RewardPlan, is_reserved, key_of
from enginehouse_rl.config.roles import beside
from enginehouse_rl.config.rows import (
    Tokenizer,
    check_by_its_own,
    check_by_tokenizer,
    check_reward_columns,
    look_at_demonstrations,
    look_at_held_out,
    look_at_preferences,
    look_at_prompts,
    named,
    preference_columns,
)
from enginehouse_rl.config.schema import AnyConfig, Config, DPOConfig, PreferenceConfig, RMConfig, SFTConfig
from enginehouse_rl.config.stages import StagePlan, find_own_stages, plan_own_stage, plan_stages
from enginehouse_rl.config.tokenizers import check_tokens, vocabulary
from enginehouse_rl.config.trackers import TrackerPlan, check_trackers
from enginehouse_rl.config.variables import check_agreement, check_variables

if TYPE_CHECKING:
    from enginehouse.plugin import Backend, PluginManager
    from enginehouse.runtimes import Interpreter
    from enginehouse_rl.config.rows import Columns, Rows
    from enginehouse_rl.config.schema import Beside, Engine, NamedReward
    from enginehouse_rl.data.preference_files import PreferenceColumns
    from enginehouse_rl.data.rendering import TokenLimit

REWARD_GETS = ("prompt", "messages", "response", "response_tokens", "finish_reason")
"""What a reward may take by name, besides the data set's columns; `reward.arguments` it has to take."""
IMPORTANCE_CAP, STALE_IMPORTANCE_CAP = "importance_cap", 2.0
"""An argument of losses, the largest importance weight of a token, and its value for samples of older weights where the
config says none (`null` takes the weights away)."""
NARROW = 0.05
"""A clip range of less is within what engines that compute in bfloat16 are apart in single tokens, in nats."""
LEAST_ADAPTER_RATE = 1e-5
"""Where bfloat16 shows a third of an adapter's change after ten steps; at 1e-6 it shows a hundredth after the first."""
SINGLE_TURN = "enginehouse_rl.environments.single_turn:SingleTurn"
"""The environment that is core's own."""
_OVERWRITE = ("run.overwrite", "run")
"""Overrides that set `run.overwrite`."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What plans of every kind of run hold.

    Attributes:
        config: the config it was made from, unchanged.
        roles: what plays each role, by its name. Those that share processes are built in this order.
        device: torch device type of every engine, `"cpu"` or `"cuda"`.
        run_directory: absolute path.
        python_path: directories that workers import the user's own functions from.
        distributions: distributions of the backends used, for the record of versions.
        facts: what the run will do, as `(label, sentence)`.
        notes: what the user may not have expected.
        resumed: the checkpoint the run goes on from; None for a run that starts.
        spare_unfinished: `run.overwrite` is not to delete a run that can be gone on with.
        trackers: what metrics are sent to, besides the run directory.
    """

    config: AnyConfig
    roles: Mapping[str, RolePlan]
    device: Device
    run_directory: Path
    python_path: tuple[str, ...]
    distributions: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    resumed: Checkpoint | None
    spare_unfinished: bool
    trackers: tuple[TrackerPlan, ...]

    @property
    def launch(self) -> Launch:
        """How the processes of its roles are started."""
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
        """The plan as text, a line a fact."""
        lines = [*self.facts, *(("note", note) for note in self.notes)]
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {said}" for label, said in lines)


@dataclass(frozen=True, kw_only=True)
class PlayPlan(RunPlan):
    """What plays prompts, checked: those of a reinforcement-learning run, or of an evaluation without one.

    Attributes:
        rewards: what the samples are scored by.
        environment: `"module:Class"` of what makes the samples.
        environment_arguments: as it takes them.
        vocabulary: how many tokens all models of the run know; None where that is not known.
        most_tokens: how long a sample may be, for every model that reads it; None where that is not known.
        advantage_needs: the columns that the advantage is given; None: all but texts.
        keep: `"module:function"` of the filter of groups; None: all are trained on.
        keep_arguments: as it takes them.
        prompt_limit: how long prompts may be.
    """

    config: Config
    rewards: tuple[RewardPlan, ...]
    environment: str
    environment_arguments: dict[str, Any]
    vocabulary: int | None
    most_tokens: int | None
    advantage_needs: tuple[str, ...] | None = None
    keep: str | None = None
    keep_arguments: dict[str, Any] = field(default_factory=dict)
    prompt_limit: TokenLimit

    @property
    def is_single_turn(self) -> bool:
        """Whether the environment is core's own."""
        return self.environment == SINGLE_TURN

    @property
    def launch(self) -> Launch:
        return replace(super().launch, tokens_stay=self.config.environment.processes > 0)


@dataclass(frozen=True, kw_only=True)
class Plan(PlayPlan):
    """A reinforcement-learning run, checked. Its roles are `"actor"`, `"rollout"`, for an advantage that needs values
    `"critic"`, where a model of its own is the reference `"reference"`, where one scores samples `"reward_model"`, and
    where an engine of its own answers validation prompts `"evaluation"`.

    Attributes:
        advantage: `"module:function"`.
        advantage_arguments: as the advantage takes them.
        stages: what adds columns to the samples of a step before they are trained on, in order.
        old_logprobs: whose logprobs the ratio divides by, `"rollout"` or `"actor"`.
        loss_arguments: as the loss takes them, with those that are taken from elsewhere in the config; without the KL
            term's.
        critic_loss_arguments: as the critic's loss takes them, alike.
    """

    advantage: str
    advantage_arguments: dict[str, Any]
    stages: tuple[StagePlan, ...]
    old_logprobs: Literal["rollout", "actor"]
    loss_arguments: dict[str, Any]
    critic_loss_arguments: dict[str, Any]

    @property
    def effect_tolerance(self) -> float:
        """`weights.effect_tolerance`, in nats."""
        given = self.config.weights.effect_tolerance
        return TOLERANCES[self.roles["actor"].model.dtype] if given is None else given

    @property
    def launch(self) -> Launch:
        return replace(super().launch, effect_tolerance=self.effect_tolerance)


@dataclass(frozen=True, kw_only=True)
class EvalPlan(PlayPlan):
    """An evaluation without a run, checked. Its roles are `"rollout"`, and where one scores samples `"reward_model"`.

    Attributes:
        step: of the run that trained the model; 0 where that is not known.
        reads_back: whether replicas say checksums of what they serve.
    """

    step: int
    reads_back: bool


@dataclass(frozen=True, kw_only=True)
class SFTPlan(RunPlan):
    """A supervised run, checked. Its one role is `"actor"`.

    Attributes:
        row_limit: how long a demonstration may be.
    """

    config: SFTConfig
    row_limit: TokenLimit


@dataclass(frozen=True, kw_only=True)
class PreferencePlan(RunPlan):
    """A run on preferences, checked. Its roles are `"actor"`, which is a reward model or a policy, and of a policy,
    where a model of its own is the reference, `"reference"`.

    Attributes:
        columns: of the data.
        row_limit: how long a prompt with a response may be.
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

    The current directory and that of the config file become importable, here and in the workers.

    Args:
        config: a loaded config.
        plugins: what is installed; None: this process's plugins, by the config's switches.
        config_path: where it was loaded from, for messages and imports.
        resume: go on with the run in `run.directory`, from its newest whole checkpoint; `run.overwrite` then says
            nothing.
        overrides: what of the config was given on the command line; only there can `run.overwrite` delete a run that
            did not finish and left checkpoints.
        starts: whether the run is to start; otherwise an earlier run in `run.directory` is a note.

    Raises:
        UserError: `ConfigError`, `DataError`, `ModelError` or `PluginLookupError`; where several things are wrong, one
            `ConfigError` that lists them.
    """
    setting = _Setting(config, plugins, config_path, resume, overrides, starts)
    findings, algorithm = setting.findings, config.algorithm
    needs = _needs_of(setting.plugins, config)
    own = find_own_stages(findings, setting.plugins, config, needs)
    needed = {*(needs or ()), *(column for record in own.values() for column in record.needs)}
    uses_reference = algorithm.kl.coefficient > 0 or "reference_logprobs" in needed
    alone = config.critic.warmup_steps if "values" in needed else 0
    each = algorithm.epochs * algorithm.minibatches
    critic_steps, optimizer_steps = config.train.steps * each, max(config.train.steps - alone, 1) * each

    train = find_backend(findings, setting.plugins, TrainBackend, config.actor.engine, "actor", setting.device)
    rollout = find_backend(findings, setting.plugins, RolloutBackend, config.rollout.engine, "rollout", setting.device)
    actor_options = scheduled_options(
        findings,
        setting.plugins,
        train,
        config.actor.engine,
        config.actor.processes,
        setting.runs_on,
        optimizer_steps,
    )
    rollout_options = typed_options(
        findings, setting.plugins, rollout, config.rollout.engine, "rollout", config.rollout.replicas, setting.runs_on
    )
    effect_check_every = check_capabilities(findings, config, rollout)
    actor_runs_in = setting.interpreter(train, config.actor.engine, actor_options, "actor")
    rollout_runs_in = setting.interpreter(rollout, config.rollout.engine, rollout_options, "rollout")
    actor = setting.trained_role(config, actor_options, actor_runs_in)
    placed = {"actor": _Placed(train, actor)}
    setting.critic(config, placed, needed, critic_steps)
    setting.reference(config, placed, optimizer_steps, uses_reference)
    setting.reward_model(config, placed, optimizer_steps)
    setting.models_of_stages(config, placed, optimizer_steps, own)
    roles = {name: one.role for name, one in placed.items()}
    evaluator, evaluation = setting.evaluation(config, train)
    others = roles if evaluation is None else {**roles, "evaluation": evaluation}
    gpus = gpus_of(rollout, rollout_options)
    placement, apart, not_shared = choose_placement(
        findings, config, train, rollout, others, rollout_runs_in, setting.device, gpus
    )
    transport, reason = choose_transport(
        findings, setting.plugins, config, train, rollout, setting.device, placement == "colocated"
    )
    roles["rollout"] = RolePlan(
        kind="rollout",
        backend=config.rollout.engine.backend,
        options=rollout_options,
        model=actor.model,
        processes=config.rollout.replicas,
        shares="actor" if placement == "colocated" else None,
        devices_of="actor" if placement == "shared" else None,
        gpus=gpus,
        interpreter=rollout_runs_in,
        env=config.rollout.engine.env,
        transport=transport,
        effect_check_every=effect_check_every,
    )
    if evaluation:
        roles["evaluation"] = evaluation

    model = setting.model(config)
    check_model(findings, train, actor_options, model, "actor", actor.model)
    _check_trainable(findings, "model.path", config.model.path, model)
    if "critic" in placed:
        _check_trainable(findings, "critic.path", config.critic.path or "", setting.models.get("critic", {}))
    check_targets(findings, actor_options, config.model.path)
    check_export(findings, config, train, actor_options)
    _check_adapter_rate(findings, actor_options, setting.runs_on.dtype)
    check_model(findings, rollout, rollout_options, model, "rollout", actor.model)
    check_sampling(findings, config, rollout, roles["rollout"], setting.device)
    if evaluation:
        check_sampling(findings, config, evaluator, evaluation, setting.device, "evaluation")
        check_model(findings, evaluator, evaluation.options, model, "evaluation", evaluation.model)
        if evaluator is rollout:
            check_servers(findings, rollout, rollout_options, evaluation.options)
    setting.check_models(config, placed, model)
    check_batches(findings, config, setting.plugins, roles)
    check_placement(findings, config, setting.device, roles, not_shared)
    check_agreement(findings, roles)
    backends = {name: one.backend for name, one in placed.items()}
    check_turns(findings, config.rollout.placement, roles, backends, setting.device)
    limit = check_lengths(findings, config, roles, model)
    check_evaluation(findings, config)
    check_positions(findings, config, roles, setting.models, limit)
    rows = look_at_prompts(findings, config, limit, setting.tokenizer_of(model))
    _check_validated(findings, config)
    _check_save_best(findings, config)
    environment, environment_arguments, rewards = setting.playing(config, rows.columns, setting.tokenizer_of(model))
    is_single_turn = environment == SINGLE_TURN
    advantage, advantage_arguments = setting.function(
        Advantage, algorithm.advantage.name, "algorithm.advantage", algorithm.advantage.arguments
    )
    keep: str | None = None
    keep_arguments: dict[str, Any] = {}
    if (filtered := config.rollout.keep) is not None:
        keep, keep_arguments = setting.function(Filter, filtered.name, "rollout.keep", filtered.arguments)
    old_logprobs, why_actor = _old_logprobs(findings, setting.plugins, config, actor.model.dtype)
    taken = _taken(findings, setting.plugins, config, old_logprobs)
    _, loss_arguments = setting.function(
        Loss, algorithm.loss.name, "algorithm.loss", algorithm.loss.arguments, _kl_arguments(config), list(taken)
    )
    _, critic_loss_arguments = (
        setting.function(Loss, config.critic.loss.name, "critic.loss", config.critic.loss.arguments)
        if "critic" in roles
        else ("", {})
    )
    own_stages = [
        plan_own_stage(name, record, setting.stage_arguments(config, name, record)) for name, record in own.items()
    ]
    stages = plan_stages(findings, config, needs, uses_reference, old_logprobs, own_stages)
    _check_kl(findings, config, loss_arguments | taken)
    _check_rewards_are_read(findings, config, needs)
    _check_outputs(findings, setting.plugins, config, "critic" in roles)
    directory = setting.run_directory(
        {
            "model.path": config.model.path,
            **{f"{name}.path": section.path for name, section in beside(config).items()},
            **_by_key("data.train", config.data.train),
            **{f"data.validation.{name}".rstrip("."): path for name, path in config.data.validation_files().items()},
        },
        roles,
    )
    backends = {name: one.backend for name, one in placed.items()}
    samples = samples_per_step(config)
    setting.memory(
        roles,
        {**backends, "rollout": rollout, "evaluation": evaluator},
        model,
        {name: -(-samples // algorithm.minibatches) if role.trained else samples for name, role in roles.items()},
        *_longest(rows, limit, "rollout.sampling.max_tokens", config.rollout.sampling.max_tokens, is_single_turn),
    )
    findings.raise_problems(setting.source)
    return Plan(
        config=config,
        roles=roles,
        rewards=rewards,
        environment=environment,
        environment_arguments=environment_arguments,
        vocabulary=_fewest_tokens([model, *setting.models.values()]),
        most_tokens=_most_tokens(config, roles, [model, *setting.models.values()]),
        advantage=advantage,
        advantage_arguments=advantage_arguments,
        advantage_needs=needs,
        stages=stages,
        keep=keep,
        keep_arguments=keep_arguments,
        old_logprobs=old_logprobs,
        loss_arguments=loss_arguments | taken,
        critic_loss_arguments=critic_loss_arguments,
        prompt_limit=limit,
        **setting.common(
            outline_rl(
                config, model, rows, roles, apart, reason, uses_reference, is_single_turn, old_logprobs, why_actor
            ),
            directory,
            (*(one.backend for one in placed.values()), rollout, evaluator),
        ),
    )


def plan_eval(
    config: Config,
    plugins: PluginManager | None = None,
    config_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    model: str | None = None,
) -> EvalPlan:
    """Check an evaluation without a run; as `plan`.

    Args:
        config: of a reinforcement-learning run, of which what trains is not looked at.
        plugins: as of `plan`.
        config_path: as of `plan`.
        overrides: what of the config was given on the command line; only there `run.directory` is that of the
            evaluation.
        model: the directory of a model, or of a run; None: `model.path`.
    """
    named_by = "--model" if model else "model.path"
    evaluated = Evaluated.at(model or config.model.path, named_by)
    place = free_directory(config.run.directory, evaluated.name, overrides)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": evaluated.path}),
            "run": config.run.model_copy(update={"directory": place}),
            "stages": {},
        }
    )
    setting = _Setting(config, plugins, config_path, False, overrides)
    findings = setting.findings
    key = "evaluation" if config.evaluation.engine else "rollout"
    engine, replicas = config.evaluation.engine or config.rollout.engine, config.rollout.replicas
    rollout = find_backend(findings, setting.plugins, RolloutBackend, engine, key, setting.device)
    options = typed_options(findings, setting.plugins, rollout, engine, key, replicas, setting.runs_on)
    check_stops(findings, config, rollout, "evaluation")
    roles = {
        "rollout": RolePlan(
            kind="rollout",
            backend=engine.backend,
            options=options,
            model=setting.model_spec(config.model.path),
            processes=replicas,
            gpus=gpus_of(rollout, options),
            interpreter=setting.interpreter(rollout, engine, options, key),
            env=engine.env,
        )
    }
    scoring = setting.reward_model_alone(config)
    if scoring:
        roles["reward_model"] = scoring.role
    unread = {name: type(section)() for name, section in beside(config).items() if name not in roles}
    read = setting.model(config.model_copy(update=unread), named_by)
    check_model(findings, rollout, options, read, key, roles["rollout"].model)
    check_sampling(findings, config, rollout, roles["rollout"], setting.device, "evaluation")
    if scoring:
        setting.check_models(config, {"reward_model": scoring}, read)
    check_environments(findings, config)
    check_agreement(findings, roles)
    processes = [role.processes for role in roles.values()]
    check_cluster(findings, config.cluster, max(processes), gpus_needed(roles), setting.device)
    check_cores(findings, config.cluster, sum(processes), setting.device)
    check_evaluation(findings, config)
    limit = check_lengths(findings, config, roles, read)
    if not config.data.validation_files():
        findings.refuse(
            "there are no held-out prompts to evaluate on (data.validation): name a file, as in "
            "data.validation=held_out.jsonl, or several by name, data.validation='{aime: a.jsonl, gsm: b.jsonl}'"
        )
    rows = look_at_held_out(findings, config, limit, setting.tokenizer_of(read))
    environment, environment_arguments, rewards = setting.playing(config, rows.columns, setting.tokenizer_of(read))
    is_single_turn = environment == SINGLE_TURN
    directory = Path(place).absolute()
    if holds_training(directory):
        findings.refuse(
            f"run.directory: {directory} holds a run that trained, with its models or checkpoints, and an evaluation "
            "never writes there: name another, or leave run.directory unset"
        )
    else:
        files = config.data.validation_files()
        needed = {f"data.validation.{name}".rstrip("."): path for name, path in files.items()}
        setting.run_directory({"model.path": config.model.path, **needed}, roles)
    answers = config.evaluation.samples_per_prompt * sum(count for _, count in rows.held_out)
    backends = {"rollout": rollout, "reward_model": scoring.backend if scoring else None}
    new = config.evaluation.sampling.beside(config.rollout.sampling).max_tokens
    longest = _longest(rows, limit, "evaluation.sampling.max_tokens", new, is_single_turn)
    setting.memory(roles, backends, read, dict.fromkeys(roles, answers), *longest)
    findings.raise_problems(setting.source)
    reads_back = rollout is not None and capabilities.WEIGHT_CHECKSUMS in rollout.capabilities
    return EvalPlan(
        config=config,
        roles=roles,
        rewards=rewards,
        environment=environment,
        environment_arguments=environment_arguments,
        vocabulary=_fewest_tokens([read, *setting.models.values()]),
        most_tokens=_most_tokens(config, roles, [read, *setting.models.values()]),
        prompt_limit=limit,
        step=evaluated.step,
        reads_back=reads_back,
        **setting.common(
            outline_eval(config, read, evaluated.step, rows.held_out, roles, is_single_turn, reads_back),
            directory,
            list(backends.values()),
            resumable=False,
        ),
    )


def plan_sft(
    config: SFTConfig,
    plugins: PluginManager | None = None,
    config_path: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    starts: bool = True,
) -> SFTPlan:
    """Check a supervised run; as `plan`."""
    setting = _Setting(config, plugins, config_path, resume, overrides, starts)
    findings = setting.findings
    actor, model = setting.only_actor(config)
    roles = {"actor": actor.role}
    setting.check_room(config, roles)
    limit = row_limit(config, model)
    sources, held_out = look_at_demonstrations(findings, config, limit, setting.tokenizer_of(model))
    _check_validated(findings, config)
    needed = {
        "model.path": config.model.path,
        **_by_key("data.train", config.data.train),
        **_by_key("data.validation", config.data.validation or []),
    }
    directory = setting.run_directory(needed, roles)
    setting.memory(roles, {"actor": actor.backend}, model, {"actor": config.train.rows_per_step}, limit.tokens)
    findings.raise_problems(setting.source)
    return SFTPlan(
        config=config,
        roles=roles,
        row_limit=limit,
        **setting.common(outline_sft(config, model, sources, held_out, roles), directory, (actor.backend,)),
    )


def plan_preferences(
    config: PreferenceConfig,
    plugins: PluginManager | None = None,
    config_path: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    starts: bool = True,
) -> PreferencePlan:
    """Check a run of DPO or KTO, or one that trains a reward model; as `plan`."""
    setting = _Setting(config, plugins, config_path, resume, overrides, starts)
    findings = setting.findings
    actor, model = setting.only_actor(config)
    placed = {"actor": actor}
    if isinstance(config, DPOConfig):
        setting.reference(config, placed, config.train.steps, True)
        setting.check_models(config, placed, model)
        check_dpo(findings, config)
    else:
        check_value_head(findings, actor.backend, "actor")
        placed["actor"] = actor._replace(role=replace(actor.role, model=replace(actor.role.model, head="value")))
    roles = {name: one.role for name, one in placed.items()}
    setting.check_room(config, roles)
    # A score takes a token more (`enginehouse.roles.sequence_scores`).
    limit = row_limit(config, model, further=int(isinstance(config, RMConfig)))
    rows, held_out = look_at_preferences(findings, config, limit, setting.tokenizer_of(model))
    _check_validated(findings, config)
    if isinstance(config, DPOConfig) and config.algorithm.loss == "kto" and held_out == 1:
        findings.refuse("data.validation has one row: kto compares the responses of several, and needs at least 2")
    directory = setting.run_directory(
        {
            "model.path": config.model.path,
            **{f"{name}.path": section.path for name, section in beside(config).items()},
            **_by_key("data.train", config.data.train),
            **_by_key("data.validation", config.data.validation or []),
        },
        roles,
    )
    setting.memory(
        roles,
        {name: one.backend for name, one in placed.items()},
        model,
        dict.fromkeys(roles, 2 * config.train.rows_per_step),
        limit.tokens,
    )
    findings.raise_problems(setting.source)
    return PreferencePlan(
        config=config,
        roles=roles,
        columns=preference_columns(config),
        row_limit=limit,
        **setting.common(
            outline_preferences(config, model, rows, held_out, roles),
            directory,
            [one.backend for one in placed.values()],
        ),
    )


class _Placed(NamedTuple):
    """A role of a training engine, and the engine's record; None after a problem."""

    backend: TrainBackend | None
    role: RolePlan


class _Setting:
    """What the checks of one config share: plugins, device, where to import from, what was found."""

    def __init__(
        self,
        config: AnyConfig,
        plugins: PluginManager | None,
        config_path: str | Path | None,
        resume: bool,
        overrides: Sequence[str],
        starts: bool = True,
    ):
        switches = config.plugins
        self.resume = resume
        self.starts = starts
        self.resumed: Checkpoint | None = None
        self.deletes: str | None = None
        self.memory_lines: list[str] = []
        self.spare_unfinished = not any(given.partition("=")[0].strip() in _OVERWRITE for given in overrides)
        self.config = config
        self.plugins = plugins or configure_plugins(switches.enabled, switches.blocked, switches.strict)
        self.source = f"the config {config_path}" if config_path else "the config"
        beside = [str(Path(config_path).absolute().parent)] if config_path else []
        self.python_path = tuple(dict.fromkeys([os.getcwd(), *beside]))
        extend_path(self.python_path)
        self.device, self.device_reason = pick_device(config.cluster.device)
        self.runs_on = RunsOn(self.device, pick_dtype(config.model.dtype, self.device))
        self.findings = Findings()
        if config.cluster.address and config.cluster.device == "auto":
            self.findings.note(
                "cluster.address is set and cluster.device is auto: what the cluster has shows only at the start; the "
                f"run is planned for {self.device}, as this machine has it, and refused at the start if the cluster "
                f"has {'GPUs' if self.device == 'cpu' else 'none'} (set cluster.device)"
            )
        if self.runs_on == ("cpu", "bfloat16") and not config.cluster.address and not cpu_has_bfloat16():
            self.findings.note(
                "model.dtype is bfloat16, and this CPU has no instructions for it: it multiplies 5 to 8 times slower "
                "than in float32 (model.dtype=float32, which takes twice the memory)"
            )
        self.models: dict[str, Mapping[str, Any]] = {}
        self._tokenizer = Tokenizer(self.findings, config, shows=not starts)
        self.trackers = check_trackers(self.findings, self.plugins, config.run.trackers, self.python_path)

    def tokenizer_of(self, model: Mapping[str, Any]) -> Tokenizer | None:
        """Return the tokenizer of the actor's model, given its `config.json`; None where there is no model."""
        self._tokenizer.embeddings = vocabulary(model)
        return self._tokenizer if model else None

    def common(
        self, facts: Facts, directory: Path, backends: Sequence[Backend | None], resumable: bool = True
    ) -> dict[str, Any]:
        """Fields that every plan has."""
        used = {id(backend) for backend in backends}  # records of two distributions may be equal
        owners = [one.plugin.distribution for one in self.plugins.providers() if id(one.record) in used]
        if self.resumed:
            facts = [*facts, ("resumes", f"after step {self.resumed.step}, from {self.resumed.path}")]
        if self.deletes:
            facts = [*facts, ("deletes", self.deletes)]
        facts = [
            *facts,
            *self.findings.seen,
            ("device", f"{self.device} ({self.device_reason})"),
            ("results", str(directory)),
        ]
        facts = [*facts, *zip(("memory", *[""] * len(self.memory_lines)), self.memory_lines, strict=False)]
        if self.trackers:
            facts = [*facts, ("trackers", ", ".join(one.name for one in self.trackers))]
        if resumable and not (self.config.train.checkpoint_every or self.config.train.checkpoint_minutes):
            self.findings.note(
                "train.checkpoint_every and checkpoint_minutes are 0: state to --resume from is saved when the run is "
                "interrupted or fails, but not if it is killed outright"
            )
        return {
            "device": self.device,
            "run_directory": directory,
            "python_path": self.python_path,
            "distributions": tuple(dict.fromkeys([*owners, *(text for one in self.trackers for text in one.packages)])),
            "facts": tuple(facts),
            "notes": tuple(self.findings.notes),
            "resumed": self.resumed,
            "spare_unfinished": self.spare_unfinished,
            "trackers": self.trackers,
        }

    def interpreter(self, record: Backend | None, engine: Engine, options: Mapping[str, Any], key: str) -> Interpreter:
        """What the workers of a role run under; `key` is the role's in the config."""
        check_secrets(self.findings, f"{key}.engine.options", engine.options, read=False)
        check_variables(self.findings, f"{key}.engine.env", engine.env, self.config.cluster.launcher)
        chosen = choose_interpreter(
            self.findings, self.plugins, record, engine, options, key, self.config.cluster.launcher, self.device
        )
        check_native_names(self.findings, record, options, chosen, key)
        return chosen

    def model_spec(self, path: str) -> ModelSpec:
        """What a role that loads the model in `path` is told of it."""
        model, seed = self.config.model, self.config.train.seed
        return ModelSpec(
            os.path.abspath(path), dtype=self.runs_on.dtype, trust_remote_code=model.trust_remote_code, seed=seed
        )

    def trained_role(self, config: AnyConfig, options: dict[str, Any], interpreter: Interpreter) -> RolePlan:
        """The actor."""
        return RolePlan(
            kind="train",
            backend=config.actor.engine.backend,
            options=options,
            model=self.model_spec(config.model.path),
            processes=config.actor.processes,
            interpreter=interpreter,
            env=config.actor.engine.env,
            trained=True,
        )

    def only_actor(self, config: SFTConfig | PreferenceConfig) -> tuple[_Placed, Mapping[str, Any]]:
        """The role that a loop over rows of a file trains, an optimizer step each; and the model's `config.json`."""
        findings, engine = self.findings, config.actor.engine
        train = find_backend(findings, self.plugins, TrainBackend, engine, "actor", self.device)
        options = scheduled_options(
            findings, self.plugins, train, engine, config.actor.processes, self.runs_on, config.train.steps
        )
        actor = self.trained_role(config, options, self.interpreter(train, engine, options, "actor"))
        model = self.model(config)
        check_model(findings, train, options, model, "actor", actor.model)
        _check_trainable(findings, "model.path", config.model.path, model)
        check_targets(findings, options, config.model.path)
        check_export(findings, config, train, options)
        _check_adapter_rate(findings, options, self.runs_on.dtype)
        return _Placed(train, actor), model

    def check_room(self, config: SFTConfig | PreferenceConfig, roles: Mapping[str, RolePlan]) -> None:
        """Check that such a loop's rows, roles and machine fit each other."""
        findings, cluster, apart = self.findings, config.cluster, own_processes(roles)
        check_rows(findings, config)
        check_agreement(findings, roles)
        check_inline(findings, config, apart)
        check_cluster(findings, cluster, config.actor.processes, gpus_needed(roles), self.device)
        check_cores(findings, cluster, sum(role.processes for role in apart.values()), self.device)

    def critic(self, config: Config, placed: dict[str, _Placed], needed: Collection[str], optimizer_steps: int) -> None:
        """Place the critic, if the advantage, or a stage of a plugin, needs its values.

        Args:
            placed: the roles of training engines so far; it is added.
            needed: the columns that are needed.
            optimizer_steps: of the critic, in the run.
        """
        critic, name = config.critic, config.algorithm.advantage.name
        if "values" not in needed:
            if critic != type(critic)():
                self.findings.note(f"critic is set, but the advantage {name!r} needs no values: no critic runs")
            return
        if critic.warmup_steps >= config.train.steps:
            self.findings.refuse(
                f"critic.warmup_steps is {critic.warmup_steps} and train.steps {config.train.steps}: the actor would "
                "never be trained"
            )
        self.place("critic", critic, config, placed, optimizer_steps, trained=True, head="value")

    def reference(
        self, config: Config | DPOConfig, placed: dict[str, _Placed], optimizer_steps: int, used: bool
    ) -> None:
        """Place the reference model of DPO, a KL term or an advantage, unless it is the actor's own base.

        Args:
            placed: the roles of training engines so far; it is added.
            optimizer_steps: of the actor, in the run.
            used: whether one is compared with.
        """
        reference, (train, actor) = config.reference, placed["actor"]
        given = {name for name, value in reference if value}
        if not used:
            for name in sorted(given):
                self.findings.note(
                    f"reference.{name} is set, but algorithm.kl.coefficient is 0: no reference model runs"
                )
            return
        adapted = train is not None and capabilities.LORA in train.capabilities and bool(actor.options.get("lora"))
        if given or not adapted:
            self.place("reference", reference, config, placed, optimizer_steps)

    def reward_model(self, config: Config, placed: dict[str, _Placed], optimizer_steps: int) -> None:
        """Place the reward model, if there is one; arguments as of `reference`."""
        section = config.reward_model
        if section.path:
            self.place("reward_model", section, config, placed, optimizer_steps, head="value")
            _check_scores(self.findings, "reward_model.path", section.path)
            if config.rollout.keep:
                self.findings.refuse(
                    f"rollout.keep: {config.rollout.keep.name} looks at rewards as samples end, and the reward model "
                    "scores the whole step's: leave one of rollout.keep and reward_model.path unset"
                )
        elif section != type(section)():
            self.findings.refuse(
                "reward_model is set, but has no path: set reward_model.path to a directory with a sequence classifier"
            )

    def models_of_stages(
        self, config: Config, placed: dict[str, _Placed], optimizer_steps: int, own: Mapping[str, Stage]
    ) -> None:
        """Place the models of stages of plugins, `own`, by name; other arguments as of `reference`."""
        for name, section in config.stages.items():
            if name in own and section.path and (computes := own[name].model):
                head: Literal["causal_lm", "value"] = "value" if computes == "score" else "causal_lm"
                self.place(f"stages.{name}", section, config, placed, optimizer_steps, head=head)
                if head == "value":
                    _check_scores(self.findings, f"stages.{name}.path", section.path)

    def stage_arguments(self, config: Config, name: str, record: Stage) -> dict[str, Any]:
        """Check what a config gives to a stage of a plugin; return it as it takes it."""
        arguments = config.stages[name].arguments if name in config.stages else {}
        if record.function:
            return self.function(Stage, name, f"stages.{name}", arguments)[1]
        if arguments:
            self.findings.refuse(f"stages.{name}.arguments: the stage has no function that takes any")
        return {}

    def reward_model_alone(self, config: Config) -> _Placed | None:
        """The reward model where there is no actor, in processes of its own; None if there is none."""
        findings, section = self.findings, config.reward_model
        if not section.path:
            return None
        if section.shares:  # whatever else would be there: it is as the actor
            section = section.model_copy(update={"shares": None if section.engine else "actor"})
        engine, number = config.actor.engine, config.actor.processes
        train = find_backend(findings, self.plugins, TrainBackend, engine, "actor", self.device)
        options = typed_options(findings, self.plugins, train, engine, "actor", number, self.runs_on)
        like = self.trained_role(config, options, self.interpreter(train, engine, options, "actor"))
        placed = {"actor": _Placed(train, like)}
        self.place("reward_model", section, config, placed, config.train.steps, head="value")
        found = placed["reward_model"]
        return found._replace(role=replace(found.role, shares=None))

    def place(
        self,
        name: str,
        section: Beside,
        config: AnyConfig,
        placed: dict[str, _Placed],
        optimizer_steps: int,
        *,
        trained: bool = False,
        head: Literal["causal_lm", "value"] = "causal_lm",
    ) -> None:
        """Say where a model beside the actor's runs, and by what.

        Args:
            name: the role, which is the section's key.
            section: of the config.
            config: the whole of it.
            placed: the roles of training engines so far; it is added.
            optimizer_steps: for a learning-rate schedule, which is built also where no step of it is taken.
            trained: whether the loop updates it.
            head: what its model has on top.
        """
        findings, engine, own = self.findings, section.engine, section.processes
        shares = section.shares or ("actor" if engine is None and own is None else None)
        if shares and shares not in placed:
            findings.refuse(
                f"{name}.shares is {shares}, which is no role of this run that is placed before {name}; "
                f"{nearest(shares, placed)}"
            )
            shares = "actor"
        if shares and own is not None:
            findings.refuse(
                f"{name}.processes is {own}, and {name}.shares is {shares}: a role has processes of its own or shares "
                "those of another; leave one of the two unset"
            )
        record, like = placed[shares or "actor"]
        processes = like.processes if shares else own or like.processes
        options, interpreter, key = like.options, like.interpreter, f"{name}.processes"
        if engine is not None:
            record = find_backend(findings, self.plugins, TrainBackend, engine, name, self.device)
            options = typed_options(findings, self.plugins, record, engine, name, processes, self.runs_on)
            interpreter, key = self.interpreter(record, engine, options, name), f"{name}.engine.options"
            if "backend" not in engine.model_fields_set and engine.backend != like.backend:
                findings.note(
                    f"{name}.engine names no backend, so the default, {engine.backend!r}, runs it: it does not follow "
                    f"the {shares or 'actor'}, which {like.backend!r} runs. For that too, set "
                    f"{name}.engine.backend={like.backend}"
                )
        elif processes != like.processes:
            check_processes(findings, record, options, processes, key)
        if shares and interpreter != like.interpreter:
            findings.refuse(
                f"{name}.shares is {shares}, which runs in {like.interpreter.name}, and {name} in {interpreter.name}: "
                f"processes have one environment; leave {name}.shares unset"
            )
        if head == "value":
            check_value_head(findings, record, name)
        if "total_steps" in options:
            of = engine or config.actor.engine
            options = {**options, "total_steps": of.options.get("total_steps") or optimizer_steps}
        placed[name] = _Placed(
            record,
            RolePlan(
                kind="train",
                backend=engine.backend if engine else like.backend,
                options=options,
                model=replace(self.model_spec(section.path or config.model.path), head=head),
                processes=processes,
                shares=shares and (like.shares or shares),
                interpreter=interpreter,
                env=engine.env if engine else like.env,
                trained=trained,
            ),
        )

    def check_models(self, config: AnyConfig, placed: Mapping[str, _Placed], model: Mapping[str, Any]) -> None:
        """Check the models beside the actor's, whose own is `model`, by the engines that run them."""
        for name, section in beside(config).items():
            if name in placed and (section.path or section.engine):
                read, path_key = (self.models[name], f"{name}.path") if section.path else (model, "model.path")
                key = name if section.engine else "actor"
                role = placed[name].role
                check_model(self.findings, placed[name].backend, role.options, read, key, role.model, path_key)

    def evaluation(self, config: Config, train: TrainBackend | None) -> tuple[RolloutBackend | None, RolePlan | None]:
        """Check the engine for validations; None twice where it is the rollout. `train` is the actor's backend."""
        findings, engine = self.findings, config.evaluation.engine
        if engine is None:
            return None, None
        record = find_backend(findings, self.plugins, RolloutBackend, engine, "evaluation", self.device)
        options = typed_options(findings, self.plugins, record, engine, "evaluation", 1, self.runs_on)
        interpreter = self.interpreter(record, engine, options, "evaluation")
        transport, _ = choose_transport(findings, self.plugins, config, train, record, self.device, False, "evaluation")
        return record, RolePlan(
            kind="rollout",
            backend=engine.backend,
            options=options,
            model=self.model_spec(config.model.path),
            processes=1,
            gpus=gpus_of(record, options),
            interpreter=interpreter,
            env=engine.env,
            transport=transport,
            effect_check_every=int(check_capabilities(findings, config, record, "evaluation") > 0),
        )

    def model(self, config: AnyConfig, key: str = "model.path") -> Mapping[str, Any]:
        """Check the model and what goes with it; returns its `config.json`, empty after a problem.

        `models` holds those of roles with a model of their own from then on. `key` is what names the model, for
        messages.
        """
        model: Mapping[str, Any] = {}
        path = config.model.path
        with self.findings.collecting():
            model = read_model(path, key)
            if not isinstance(config, RMConfig):
                _check_writes(key, path, model)
            if config.data.chat_template and not has_chat_template(path):
                raise ConfigError(f"data.chat_template is true, but the tokenizer in {path} has no chat template")
        for name, section in beside(config).items():
            self.models[name] = {}
            if section.path:
                with self.findings.collecting():
                    self.models[name] = read_model(section.path, f"{name}.path")
                    if name == "reference":
                        _check_writes("reference.path", section.path, self.models[name])
                    if name == "reward_model" and _pads_with_an_end(self.models[name]):
                        self.findings.note(
                            f"reward_model.path: {section.path} pads with its end of sequence: transformers reads the "
                            "score of such a model at the token before the end, and here the last token is scored, as "
                            "`enginehouse rm` trains it; one that was trained otherwise scores otherwise"
                        )
                    paths, models = (path, section.path), (model, self.models[name])
                    check_tokens(self.findings, name, paths, models, config.model.trust_remote_code)
        return model

    def memory(
        self,
        roles: Mapping[str, RolePlan],
        backends: Mapping[str, Backend | None],
        model: Mapping[str, Any],
        rows: Mapping[str, int],
        longest: int,
        of: str = "",
    ) -> None:
        """Add up what the engines will hold of each device, and check that it has room.

        Args:
            roles: by name.
            backends: of each role; None after a problem.
            model: `config.json` of the actor's model.
            rows: most rows of one call of each role.
            longest: tokens of the longest row.
            of: what that is made of, in words.
        """
        gpu = gpu_here() if self.device == "cuda" else None
        uses: dict[str, MemoryUse | None] = {}
        exact = True
        for name, role in roles.items():
            config = self.models.get(name) or model
            shape = ModelShape.of(config.get("text_config") or config)
            if shape is None:
                uses[name] = None
                continue
            exact = exact and shape.exact and "text_config" not in config
            demand = MemoryDemand(
                shape=shape if role.model.head == "causal_lm" else replace(shape, tied=True),  # its own head is gone
                head=role.model.head,
                itemsize=4 if role.model.dtype == "float32" else 2,
                processes=role.processes,
                rows=rows.get(name) or rows.get("rollout", 1),
                longest=longest,
                trained=role.trained,
                device=self.device,
                card=gpu and gpu.size,
                takes_turns=role.devices_of is not None,
            )
            uses[name] = memory_of(backends.get(name), role.options, demand)
        self.memory_lines = table(roles, uses, self.device, gpu)
        if self.memory_lines and of:
            self.memory_lines.append(f"rows of at most {longest:,} tokens: {of}")
        check_memory(self.findings, roles, uses, self.device, gpu, exact)

    def run_directory(self, needed: Mapping[str, str | None], roles: Mapping[str, RolePlan]) -> Path:
        """Check the run directory, and what is to be resumed.

        Args:
            needed: paths the run reads, by config key.
            roles: by name.
        """
        run = self.config.run
        if self.resume:
            trained = [name for name in roles if roles[name].trained]
            self.resumed = check_resume(self.findings, self.config, trained, self.runs_on.dtype)
        kept = {key: path for key, path in needed.items() if path}
        with self.findings.collecting():
            try:
                self.deletes = check_run_directory(
                    run.directory,
                    overwrite=run.overwrite,
                    spare_unfinished=self.spare_unfinished,
                    needed=kept,
                    resuming=self.resume,
                )
            except EarlierRun as error:
                if self.starts:
                    raise
                self.findings.note(f"`enginehouse {kind_of(self.config)}` refuses that: {error}")
        return Path(run.directory).absolute()

    def reward(self, name: str, given: NamedReward, columns: Sequence[Columns] | None) -> RewardPlan:
        """Check a reward against what it will be called with; `columns` is None where a file is unknown."""
        key, arguments, reference = key_of(name), given.arguments, ""
        if is_reserved(name):
            self.findings.refuse(f"{key}: a metric of the run's own is called {name!r}; name the reward differently")
        check_secrets(self.findings, f"{key}.arguments", arguments)
        with self.findings.collecting():
            reference, function = find_function(
                self.plugins, Reward, given.function, f"{key}.function", self.python_path, always=True
            )
            check_reward_columns(function, key, arguments, columns or (), REWARD_GETS)
            if function is not None:
                arguments = take_values(self.findings, function, given.function, f"{key}.arguments", arguments)
                check_by_its_own(function, f"{key}.function", arguments, columns)
        return RewardPlan(name, reference, arguments, given)

    def playing(
        self, config: Config, columns: Sequence[Columns] | None, tokenizer: Tokenizer | None
    ) -> tuple[str, dict[str, Any], tuple[RewardPlan, ...]]:
        """Check what plays tasks: the environment, its arguments, the rewards.

        Args:
            columns: of rows; None where they are not known.
            tokenizer: of the model; None: it is not there.
        """
        environment, arguments = self.environment(config, columns, tokenizer)
        _check_that_there_is_a_reward(self.findings, config, environment)
        given = columns if environment == SINGLE_TURN else None  # another one may give rewards what it likes
        rewards = tuple(self.reward(name, one, given) for name, one in config.reward.named().items())
        return environment, arguments, rewards

    def environment(
        self, config: Config, columns: Sequence[Columns] | None, tokenizer: Tokenizer | None
    ) -> tuple[str, dict[str, Any]]:
        """Check the environment and what it is made with; arguments as of `playing`, return as of `function`."""
        name, arguments = config.environment.name, config.environment.arguments
        key = "environment.arguments"
        check_secrets(self.findings, key, arguments)
        with self.findings.collecting():
            reference, found = find_function(
                self.plugins, Environment, name, "environment.name", self.python_path, always=bool(arguments)
            )
            if found is not None:
                check_environment(found, name)
                cure = f"arguments meant for another environment are taken away by {key}={{}}" if arguments else ""
                check_call(found, key, arguments, key, cure=cure, values=arguments)
                before = len(self.findings.problems)
                arguments = take_values(self.findings, found, name, key, arguments)
                if len(self.findings.problems) == before:
                    check_by_its_own(found, key, arguments, columns)
                    if tokenizer is not None:
                        check_by_tokenizer(found, "environment", arguments, tokenizer)
            return reference, dict(arguments)
        return "", {}

    def function(
        self,
        kind: type[Function],
        name: str,
        key: str,
        arguments: Mapping[str, Any],
        others: Sequence[str] = (),
        taken: Sequence[str] = (),
    ) -> tuple[str, dict[str, Any]]:
        """Check an advantage or a loss against its arguments, and the names of others that it gets.

        Args:
            others: names of those that do not stand in its record.
            taken: names of those that its record asks for (`Loss.taken_from`): they alone are no reason to import it.

        Returns:
            `"module:function"`, and the arguments as it takes them.
        """
        key, given = f"{key}.arguments", [*arguments, *others]
        check_secrets(self.findings, key, arguments, read=False)
        with self.findings.collecting():
            reference, function = find_function(
                self.plugins,
                kind,
                name,
                key.replace("arguments", "name"),
                self.python_path,
                always=bool(others),
                given=arguments,
            )
            if function is not None:
                named = key + (" and the KL term's" if kind is Loss else "")
                cure = f"arguments meant for another {kind.kind} are taken away by {key}={{}}" if arguments else ""
                check_call(function, key, [*given, *taken], named, positional=1, cure=cure, values=arguments)
                arguments = take_values(self.findings, function, name, key, arguments)
            return reference, dict(arguments)
        return "", {}


def _needs_of(plugins: PluginManager, config: Config) -> tuple[str, ...] | None:
    """The columns that the advantage is given, by its record; None: all but texts."""
    records = [provided.record for provided in plugins.providers(Advantage, config.algorithm.advantage.name)]
    return next((record.needs for record in records if isinstance(record, Advantage)), None)


def _fewest_tokens(models: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of tokens that all models, given their `config.json`, have a row for."""
    return min((number for model in models if (number := vocabulary(model)) is not None), default=None)


def _longest(rows: Rows, limit: TokenLimit, key: str, new: int, is_single_turn: bool) -> tuple[int, str]:
    """Tokens of the longest row, and what they are: a prompt, the longest that was read if all were, and a response.

    Args:
        rows: of the data.
        limit: of a prompt.
        key: the config key that says how long a response may be.
        new: its value.
        is_single_turn: whether a response to the prompt is all of a row.
    """
    prompt, said = limit.tokens, f"a prompt of {limit.option}"
    if rows.longest is not None and is_single_turn:
        prompt, said = rows.longest, f"the longest prompt of the data, {rows.longest:,}"
    return prompt + new, f"{said}, and {key}={new}"


def _most_tokens(config: Config, roles: Mapping[str, RolePlan], models: Sequence[Mapping[str, Any]]) -> int | None:
    """How long a sample may be for the models that read it, given their `config.json`."""
    limits = [served_positions(model) for model in models if model]
    limits.append(roles["rollout"].options.get("max_model_tokens"))
    known = [limit for limit in limits if isinstance(limit, int)]
    return min(known) - ("reward_model" in roles) if known else None  # that reads a token more


def _pads_with_an_end(model: Mapping[str, Any]) -> bool:
    """True if a model, given its `config.json`, has an end of sequence for padding."""
    text = model.get("text_config") or model
    return text.get("pad_token_id") is not None and text["pad_token_id"] in end_ids(text.get("eos_token_id"))


def _check_writes(key: str, path: str, model: Mapping[str, Any]) -> None:
    """Refuse a classifier, given its `config.json`, where a language model is wanted."""
    (architecture, *_) = model.get("architectures") or [""]
    if architecture.endswith("ForSequenceClassification"):
        raise ModelError(
            f"{key}: {path} is a {architecture}, a reward model as `enginehouse rm` trains: it scores texts and writes "
            "none; name a causal language model"
        )


def _by_key(key: str, paths: str | Iterable[str]) -> dict[str, str]:
    """Paths by the key that names each."""
    paths = named(paths)[1]
    return {key if len(paths) == 1 else f"{key}[{number}]": path for number, path in enumerate(paths)}


def _old_logprobs(
    findings: Findings, plugins: PluginManager, config: Config, dtype: str
) -> tuple[Literal["rollout", "actor"], str]:
    """Choose whose logprobs the ratio divides by, and check that a loss that needs the actor's gets them.

    Returns:
        Whose, and why the actor's where the config does not say so.
    """
    loss, configured = config.algorithm.loss, config.algorithm.old_logprobs
    records = [provided.record for provided in plugins.providers(Loss, loss.name)]
    always, narrow, wanting = False, list[str](), set[str]()
    for record in (record for record in records if isinstance(record, Loss)):
        always |= record.always_needs_actor_logprobs
        bounds = {name: loss.arguments.get(name) for name in record.ratio_bounds} if dtype != "float32" else {}
        narrow += [name for name, bound in bounds.items() if isinstance(bound, float) and bound < NARROW]
        wanting |= {name for name in record.needs_actor_logprobs if loss.arguments.get(name) is not None}
    reason = "its ratio is clipped nearer to 1 than the rounding of two engines leaves it" if always or narrow else ""
    if config.train.staleness:
        reason = "samples are of older weights"
    chosen = configured or ("actor" if reason else "rollout")
    if chosen == "actor":
        return chosen, "" if configured else reason
    cure = "set algorithm.old_logprobs=actor"
    if always:
        findings.refuse(f"algorithm.loss.name: {loss.name!r} needs the actor's own logprobs, as {reason}: {cure}")
    elif narrow:
        findings.note(
            f"algorithm.loss.arguments.{narrow[0]} is less than {NARROW:g}, and in {dtype} the engines' rounding alone "
            f"makes ratios that are clipped: {cure}"
        )
    for name in sorted(wanting):
        findings.refuse(
            f"algorithm.loss.arguments.{name} compares the actor's logprobs with the rollout's, and "
            f"algorithm.old_logprobs=rollout has only the rollout's: {cure}"
        )
    return chosen, ""


def _check_that_there_is_a_reward(findings: Findings, config: Config, environment: str) -> None:
    """Check that what asks for a reward has one, and note a reward that nothing may ask for.

    Core's own environment asks, and one that says so (`Environment.needs_reward`).
    """
    if not environment:
        return
    name, given = config.environment.name, config.reward.named()
    key = "reward" if "" in given else "reward.functions"
    asks = environment == SINGLE_TURN or getattr(resolve(environment), "needs_reward", NotImplemented)
    if given and asks is False:
        findings.note(f"the environment {name!r} scores its episodes itself and never asks for {key}: that is unused")
    elif given and asks is NotImplemented:
        findings.note(
            f"the environment {name!r} does not say whether it asks for {key}, which is unused if it does not "
            "(context.score); its class says so by needs_reward"
        )
    elif asks is True and not given and not config.reward_model.path:
        wanted = "reward.function is wanted, several under reward.functions, or reward_model.path"
        of = "" if environment == SINGLE_TURN else f": the environment {name!r} has it score what was answered"
        findings.refuse(wanted + of)


def _check_validated(findings: Findings, config: AnyConfig) -> None:
    """Note validations without anything to validate on: to take the file away is enough to have none."""
    if config.train.validate_every and not config.data.validation:
        findings.note(
            "train.validate_every is set, but there is no file to validate on (data.validation): none is done"
        )


def _check_scores(findings: Findings, key: str, path: str) -> None:
    """Refuse a model without a value head where one is to score."""
    names = stored_names(Path(path))
    if names and not {"score.weight", "value_head.weight"} & set(names):
        findings.refuse(
            f"{key}: {path} has no score.weight, so it would score nothing; a reward model is a sequence classifier "
            "with one label, as `enginehouse rm` trains"
        )


def _check_trainable(findings: Findings, key: str, path: str, model: Mapping[str, Any]) -> None:
    """Refuse a model, given its `config.json`, that is called quantized: what is trained of it cannot be exported."""
    quantized = model.get("quantization_config") or (model.get("text_config") or {}).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        findings.refuse(
            f"{key}: config.json in {path} has a quantization_config ({method}), and a quantized model is not trained "
            "or exported here: dequantize it by transformers and save it anew; where its safetensors hold whole "
            "weights already, as of a converted GGUF file, take the key out of config.json"
        )


def _check_adapter_rate(findings: Findings, options: Mapping[str, Any], dtype: str) -> None:
    """Note a learning rate of adapters, given the actor's options, whose first changes bfloat16 rounds away."""
    rate = options.get("lr")
    if options.get("lora") and dtype == "bfloat16" and isinstance(rate, float) and rate < LEAST_ADAPTER_RATE:
        findings.note(
            f"actor.engine.options.lr is {rate:g}, for adapters in bfloat16: served weights round such changes away, "
            "and the first tens of steps draw from the base model; adapters want 1e-5 to 1e-4"
        )


def _check_save_best(findings: Findings, config: Config) -> None:
    """Check that validations measure what the best model is known by, as far as it is no figure of a reward's."""
    metric, files = config.train.save_best, config.data.validation_files()
    if metric is None:
        return
    if not files:
        findings.refuse("train.save_best is set, but there is no file to validate on (data.validation)")
        return
    if not config.train.validate_every:
        findings.note("train.save_best is set, and train.validate_every is 0: the last step's model is the best")
    each = config.evaluation.samples_per_prompt
    names = ["reward"]
    if each > 1:
        passes = sorted({each, *(1 << power for power in range(each.bit_length()))})
        names += [f"mean@{each}", *(f"pass@{k}" for k in passes), f"majority@{each}"]
    places = [f"validation/{name}".rstrip("/") for name in files]
    place, _, name = metric.rpartition("/")
    if place not in places and (config.evaluation.by is None or place.rpartition("/")[0] not in places):
        known = [f"{place}/{name}" for place in places for name in names]
        findings.refuse(f"train.save_best is {metric!r}, and no validation measures that; {nearest(metric, known)}")
    elif name not in names and (is_reserved(name) or difflib.get_close_matches(name, names, n=1, cutoff=0.8)):
        known = [f"{place}/{one}" for one in names]
        findings.refuse(f"train.save_best is {metric!r}: {nearest(metric, known)}, or a figure of the reward")


def _check_kl(findings: Findings, config: Config, loss_arguments: Mapping[str, Any]) -> None:
    """Check that the KL term does something, and that the loss gets its arguments from there alone."""
    kl = config.algorithm.kl
    if kl.target is not None and not (kl.coefficient and kl.place == "reward"):
        findings.refuse(
            "algorithm.kl.target adapts the coefficient of a term in the reward: set algorithm.kl.place=reward and "
            "algorithm.kl.coefficient to what it begins with"
        )
    if kl.coefficient and kl.place == "loss" and kl.estimator == "k1":
        findings.refuse(
            "algorithm.kl: k1 in the loss regularises nothing, since its gradient is zero in expectation; set "
            "algorithm.kl.estimator to k3 (the gradient of the forward KL), k2 or k3_unbiased (of the reverse KL), or "
            "algorithm.kl.place=reward"
        )
    if kl.coefficient and kl.place == "reward" and kl.chosen_estimator != "k1":
        findings.refuse(
            f"algorithm.kl: {kl.estimator} in the reward does not hold the policy near its reference, and may drive it "
            "away, since near the reference its policy gradient is zero in expectation; set algorithm.kl.estimator=k1, "
            "or algorithm.kl.place=loss"
        )
    weighted = loss_arguments.get(IMPORTANCE_CAP) is not None
    if kl.coefficient and kl.place == "loss" and config.train.staleness and not weighted:
        findings.note(
            "algorithm.kl: the term in the loss takes samples of older weights as if the policy had drawn them, since "
            "algorithm.loss.arguments.importance_cap is unset"
        )
    for name, cure in KL_ARGUMENTS.items():
        if name in config.algorithm.loss.arguments:
            findings.refuse(f"algorithm.loss.arguments.{name}: a loss gets it from the KL term; set {cure} instead")


def _check_outputs(findings: Findings, plugins: PluginManager, config: Config, has_critic: bool) -> None:
    """Check that the losses are of what actor and critic compute."""
    said = {"algorithm.loss": (config.algorithm.loss.name, "logprobs")}
    if has_critic:
        said["critic.loss"] = (config.critic.loss.name, "values")
    for key, (name, output) in said.items():
        records = [one.record for one in plugins.providers(Loss) if isinstance(one.record, Loss)]
        found = next((record for record in records if record.name == name), None)
        if found is not None and found.output != output:
            fitting = [record.name for record in records if record.output == output]
            findings.refuse(f"{key}.name: {name!r} is a loss of {found.output}; of {output} are {', '.join(fitting)}")


def _check_rewards_are_read(findings: Findings, config: Config, needs: Sequence[str] | None) -> None:
    """Check that what the config does to the reward reaches an advantage that needs these columns."""
    if needs is None:
        return
    name, kl, model = config.algorithm.advantage.name, config.algorithm.kl, config.reward_model
    several = list(config.reward.named().values())
    if "reward" not in needs and "token_rewards" not in needs and kl.coefficient and kl.place == "reward":
        findings.refuse(f"algorithm.kl.place is reward, which the advantage {name!r} does not read; set it to loss")
    weighed = any(one.weight != 1.0 or one.normalize != "none" for one in several) or model.weight != 1.0
    if "rewards" in needs and "reward" not in needs and weighed:
        findings.refuse(
            f"the advantage {name!r} reads each reward by itself, and no weight or normalize of theirs: take them away "
            "and set algorithm.advantage.arguments.weights"
        )
    weights, count = config.algorithm.advantage.arguments.get("weights"), len(several) + bool(model.path)
    if "rewards" in needs and isinstance(weights, list | tuple) and len(weights) != count:
        findings.refuse(
            f"algorithm.advantage.arguments.weights: {len(weights)} numbers, one for each reward; there are {count}"
        )
    if "baseline" in needs and (model.path or any(one.normalize != "none" for one in several)):
        findings.refuse(
            f"the advantage {name!r} compares with the reward of one more response to each prompt, which has no "
            "normalized reward and no score of a reward model: take reward_model and normalize away"
        )


def _taken(findings: Findings, plugins: PluginManager, config: Config, old_logprobs: str) -> dict[str, Any]:
    """The loss's arguments that are not given, and taken from elsewhere in the config (`Loss.taken_from`).

    With `train.staleness` also the cap of importance weights, where the loss has one and gets the actor's logprobs.
    """
    loss = config.algorithm.loss
    arguments: dict[str, Any] = {}
    for record, plugin in plugins.providers(Loss, loss.name):
        capped = isinstance(record, Loss) and IMPORTANCE_CAP in record.needs_actor_logprobs
        if config.train.staleness and old_logprobs == "actor" and capped and IMPORTANCE_CAP not in loss.arguments:
            arguments[IMPORTANCE_CAP] = STALE_IMPORTANCE_CAP
        for name, key in record.taken_from.items() if isinstance(record, Loss) else ():
            try:
                if loss.arguments.get(name) is None:
                    arguments[name] = reduce(getattr, key.split("."), config)
            except AttributeError:
                findings.refuse(
                    f"algorithm.loss.name: {loss.name!r} ({plugin}) takes {name!r} from {key}, which is no key"
                )
    return arguments


def _kl_arguments(config: Config) -> tuple[str, ...]:
    """Names of the arguments the loss gets if the KL term is its business."""
    kl = config.algorithm.kl
    return tuple(KL_ARGUMENTS) if kl.coefficient and kl.place == "loss" else ()


PLANS: dict[str, Callable[..., RunPlan]] = {
    "train": plan,
    "sft": plan_sft,
    "dpo": plan_preferences,
    "rm": plan_preferences,
}
"""By the command that runs what they check."""
