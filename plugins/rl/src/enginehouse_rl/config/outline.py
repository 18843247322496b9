"""What a checked run will do, in words: the facts of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse.runtimes import CURRENT
from enginehouse_rl.config.arithmetic import samples_per_step
from enginehouse_rl.config.rows import named
from enginehouse_rl.config.schema import DPOConfig

if TYPE_CHECKING:
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse_rl.config.rows import Rows
    from enginehouse_rl.config.schema import (
        AnyConfig,
        Beside,
        Config,
        DPOConfig,
        Engine,
        Model,
        PreferenceConfig,
        SFTConfig,
    )
    from enginehouse_rl.data.sources import Source

Facts = list[tuple[str, str]]


def outline_rl(
    config: Config,
    model: Mapping[str, Any],
    rows: Rows,
    roles: Mapping[str, RolePlan],
    apart: str,
    transport_reason: str,
    uses_reference: bool,
    is_single_turn: bool,
    old_logprobs: str,
    why_actor: str,
) -> Facts:
    """A reinforcement-learning run.

    Args:
        model: the model's `config.json`.
        rows: those of the training files.
        roles: by name.
        apart: why the rollout does not live in the actor's processes; empty where it does.
        transport_reason: why the rollout has the weight transport it has.
        uses_reference: whether something compares with a reference.
        is_single_turn: whether the environment is core's own.
        old_logprobs: whose logprobs the loss compares with.
        why_actor: why the actor's, where the config does not say so.
    """
    return [
        ("model", _model(config.model, model, roles["actor"])),
        ("actor", f"{_count(config.actor.processes, 'process')} of {_engine(config.actor.engine)}"),
        ("rollout", _rollout(config, roles["rollout"], apart)),
        *([("evaluation", _evaluation(config, roles["evaluation"]))] if "evaluation" in roles else []),
        ("reference", _reference(config, roles.get("reference"), uses_reference)),
        *([("critic", _critic(config, roles["critic"]))] if "critic" in roles else []),
        *([("reward model", _reward_model(config, roles["reward_model"]))] if "reward_model" in roles else []),
        ("runtimes", _runtimes(roles)),
        ("weights", _weights(roles["rollout"], transport_reason)),
        *([("reward", _reward(config))] if config.reward.named() else []),
        *([("environment", environment)] if (environment := _environment(config, is_single_turn)) else []),
        *([("stages", _own_stages(config, roles))] if config.stages else []),
        ("algorithm", _algorithm(config, old_logprobs, why_actor)),
        ("data", _prompts(config, rows)),
        ("a step", _step(config, is_single_turn)),
        *([("schedule", schedule)] if (schedule := _schedule(config)) else []),
        *([("validation", _validation(config, rows.held_out))] if rows.held_out else []),
        ("the run", _run(config)),
    ]


def outline_eval(
    config: Config,
    model: Mapping[str, Any],
    step: int,
    held_out: Sequence[tuple[str, int]],
    roles: Mapping[str, RolePlan],
    is_single_turn: bool,
    reads_back: bool,
) -> Facts:
    """An evaluation without a run.

    Args:
        model: the model's `config.json`.
        step: of the run that trained it; 0 where that is not known.
        held_out: of each file of prompts what messages call it, and how many of it are used.
        roles: by name.
        is_single_turn: whether the environment is core's own.
        reads_back: whether the engine says checksums of what it serves.
    """
    rollout = roles["rollout"]
    engine = _engine(config.evaluation.engine or config.rollout.engine)
    read = "what it serves is read back and compared with them" if reads_back else "what it serves is not read back"
    trained = f"; of step {step}" if step else ""
    return [
        ("model", _model(config.model, model, rollout) + trained),
        ("rollout", f"{_count(rollout.processes, 'replica')} of {engine}"),
        *([("reward model", _reward_model(config, roles["reward_model"]))] if "reward_model" in roles else []),
        ("runtimes", _runtimes(roles)),
        ("weights", f"each replica loads the model's files; {read}"),
        *([("reward", _reward(config))] if config.reward.named() else []),
        *([("environment", environment)] if (environment := _environment(config, is_single_turn, "")) else []),
        ("prompts", _answered(config, held_out)),
    ]


def outline_sft(
    config: SFTConfig, model: Mapping[str, Any], sources: Sequence[Source], held_out: int, roles: Mapping[str, RolePlan]
) -> Facts:
    """A supervised run.

    Args:
        model: the model's `config.json`.
        sources: what is drawn from.
        held_out: how many demonstrations are.
        roles: by name.
    """
    each, longest = config.train.rows_per_step, config.data.max_tokens
    return [
        ("model", _model(config.model, model, roles["actor"])),
        ("actor", f"{_count(config.actor.processes, 'process')} of {_engine(config.actor.engine)}"),
        ("runtimes", _runtimes(roles)),
        ("data", _drawn(sources, "demonstrations", config.data.train, config.train.steps * each)),
        *([("validation", _held_out(config, held_out, "demonstrations"))] if config.data.validation else []),
        ("a step", f"{each} rows, at most {each * longest:,} tokens"),
        ("the run", f"{config.train.steps} steps, an optimizer step each"),
    ]


def _held_out(config: SFTConfig | PreferenceConfig, number: int, noun: str) -> str:
    every = config.train.validate_every
    often = f"every {_count(every, 'step')} and " if every else ""
    return f"{number:,} {noun}, {often}after the last step"


def outline_preferences(
    config: PreferenceConfig, model: Mapping[str, Any], rows: int, held_out: int, roles: Mapping[str, RolePlan]
) -> Facts:
    """A run on preferences.

    Args:
        model: the model's `config.json`.
        rows: those of the training files.
        held_out: those of the files of held-out preferences.
        roles: by name.
    """
    train, data = config.train, config.data
    rated = isinstance(config, DPOConfig) and config.algorithm.loss == "kto"
    noun, each = ("rated responses", 1) if rated else ("pairs", 2)
    facts = [
        ("model", _model(config.model, model, roles["actor"])),
        ("actor", f"{_count(config.actor.processes, 'process')} of {_engine(config.actor.engine)}"),
    ]
    if isinstance(config, DPOConfig):
        facts.append(("reference", _reference_model(config, roles.get("reference"))))
        facts.append(("algorithm", f"{config.algorithm.loss} loss, beta {config.algorithm.beta:g}"))
    else:
        facts.append(("algorithm", "a reward model, by the Bradley-Terry loss"))
    longest = train.rows_per_step * each * data.max_tokens
    return [
        *facts,
        ("runtimes", _runtimes(roles)),
        ("data", _data(rows, noun, data.train, train.steps * train.rows_per_step)),
        ("a step", f"{train.rows_per_step} {noun}, at most {longest:,} tokens, read once more to find their gradient"),
        *([("validation", _held_out(config, held_out, noun))] if data.validation else []),
        ("the run", f"{train.steps} steps, an optimizer step each"),
    ]


def _model(section: Model, model: Mapping[str, Any], actor: RolePlan) -> str:
    names = model.get("architectures") or [model.get("model_type", "unknown architecture")]
    why = " (model.dtype is auto: as the device has it)" if section.dtype == "auto" else ""
    return f"{section.path}: {', '.join(names)} in {actor.model.dtype}{why}"


def _runtimes(roles: Mapping[str, RolePlan]) -> str:
    """What each role runs in; not said of a reference in the actor's processes, which has the actor's engine."""
    interpreters = {
        name: role.interpreter for name, role in roles.items() if not (role.kind == "train" and role.shares)
    }
    return "; ".join(
        f"{name} in {'this environment' if one.name == CURRENT else one.name} ({one.reason})"
        for name, one in interpreters.items()
    )


def _weights(rollout: RolePlan, reason: str) -> str:
    every = rollout.effect_check_every
    checked = f"their effect checked every {every} updates" if every else "their effect unchecked"
    return f"by {rollout.transport} ({reason}); {checked}"


def _engine(engine: Engine) -> str:
    """A backend, with the options that the config gives it."""
    given = ", ".join(f"{name}={value}" for name, value in engine.options.items())
    return f"{engine.backend} ({given})" if given else engine.backend


def _rollout(config: Config, role: RolePlan, apart: str) -> str:
    rollout = config.rollout
    where = f"in processes of their own ({apart})" if apart else "in the actor's processes"
    if role.devices_of:
        where = f"taking turns with the {role.devices_of} on its devices ({apart})"
    return f"{_count(rollout.replicas, 'replica')} of {_engine(rollout.engine)}, {where}"


def _evaluation(config: Config, evaluation: RolePlan) -> str:
    checked = "checked each time" if evaluation.effect_check_every else "unchecked"
    engine = _engine(config.evaluation.engine) if config.evaluation.engine else evaluation.backend
    return (
        f"1 replica of {engine}, in a process of its own; weights by {evaluation.transport} before each validation, "
        f"their effect {checked}; training goes on meanwhile"
    )


def _algorithm(config: Config, old_logprobs: str, why_actor: str) -> str:
    because = f" ({why_actor})" if why_actor else ""
    return (
        f"{config.algorithm.advantage.name} advantages, {config.algorithm.loss.name} loss; old logprobs are the "
        f"{old_logprobs}'s{because}"
    )


def _reference(config: Config, reference: RolePlan | None, used: bool) -> str:
    kl = config.algorithm.kl
    if not used:
        return "none (algorithm.kl.coefficient is 0)"
    what = _reference_model(config, reference)
    if not kl.coefficient:
        return f"{what}; for the {config.algorithm.advantage.name} advantages"
    adapted = f", adapted to a divergence of {kl.target:g}" if kl.target else ""
    return f"{what}; {kl.coefficient:g} times the {kl.chosen_estimator} divergence in the {kl.place}{adapted}"


def _reference_model(config: Config | DPOConfig, reference: RolePlan | None) -> str:
    if reference is None:
        return "the actor's base, without its adapters"
    return _beside(config.reference, reference, config)


def _critic(config: Config, critic: RolePlan) -> str:
    warmup = config.critic.warmup_steps
    alone = f"; trained alone in the first {_count(warmup, 'step')}" if warmup else ""
    return f"{_beside(config.critic, critic, config)}; {config.critic.loss.name} loss{alone}"


def _reward_model(config: Config, role: RolePlan) -> str:
    section = config.reward_model
    return f"{_beside(section, role, config)}; {section.weight:g} times its score is added to the reward"


def _own_stages(config: Config, roles: Mapping[str, RolePlan]) -> str:
    """The stages of plugins that a config names, and where their models run."""
    models = {name: roles.get(f"stages.{name}") for name in config.stages}
    return "; ".join(
        f"{name}, by {_beside(config.stages[name], role, config)}" if role else name for name, role in models.items()
    )


def _beside(section: Beside, role: RolePlan, config: AnyConfig) -> str:
    """Where a model beside the actor's runs."""
    path, own = section.path or config.model.path, section.engine
    engine = _engine(own) if own else f"{role.backend} with the {section.shares or 'actor'}'s options"
    if role.shares:
        return f"{path}{f': {engine}' if own else ''}, in the {role.shares}'s processes"
    return f"{path}: {_count(role.processes, 'process')} of {engine}, apart from the actor's"


def _environment(config: Config, is_single_turn: bool, validated: str = "; validation plays it too") -> str:
    """What makes the samples where that is not core's own, and where; empty where nothing is to be said."""
    name, arguments, processes = config.environment.name, config.environment.arguments, config.environment.processes
    said = []
    if not is_single_turn:
        given = ", ".join(f"{argument}={value}" for argument, value in arguments.items())
        said.append(f"{name}{f' ({given})' if given else ''}{validated if config.data.validation else ''}")
    if processes:
        said.append(
            f"in {_count(processes, 'process')}, each with reward processes of its own; tokens and texts do not pass "
            "the controller"
        )
    return "; ".join(said)


def _reward(config: Config) -> str:
    reward = config.reward
    failing = {
        "fail": "ends the run",
        "zero": "counts as 0, which is best where others are below 0",
        "leave_out": "is left out of its group",
    }[reward.on_error]
    functions = [
        one.function if not name else f"{one.weight:g} x {one.function} ({name})"
        for name, one in reward.named().items()
    ]
    where = f"in {_count(reward.processes, 'process')}{' each' if len(functions) > 1 else ''}"
    return (
        f"{' + '.join(functions)}, {where}; one that raises or takes more than {reward.timeout_seconds:g} s {failing}"
    )


def _prompts(config: Config, rows: Rows) -> str:
    said = _drawn(rows.sources, "prompts", config.data.train, config.train.steps * config.train.prompts_per_step)
    said += f"; by {config.data.order_by}, the lowest first" if config.data.order_by else ""
    left_out = f"{'at least ' if rows.sampled else ''}{rows.dropped:,} more are too long and left out"
    return f"{said}; {left_out}" if rows.dropped else said


def _drawn(sources: Sequence[Source], noun: str, files: str | Iterable[str], drawn: int) -> str:
    if len(sources) == 1:
        return _data(sources[0].rows, noun, files, drawn)
    weights = sum(source.weight for source in sources)
    return ", ".join(
        f"{source.weight / weights:.3g} of {source.path} ({source.rows:,} {noun}, "
        f"{drawn * source.weight / weights / source.rows:.2g} epochs)"
        for source in sources
    )


def _data(rows: int, noun: str, files: str | Iterable[str], drawn: int) -> str:
    return f"{rows:,} {noun} in {named(files)[0]}, each drawn {drawn / rows:.2g} times"


def _step(config: Config, is_single_turn: bool) -> str:
    samples, new = samples_per_step(config), config.rollout.sampling.max_tokens
    longest = samples * (config.data.max_prompt_tokens + new)
    most = (
        f"at most {samples * new:,} new tokens, {longest:,} with the longest prompts"
        if is_single_turn
        else f"at most {new:,} new tokens each time that {config.environment.name} asks for some"
    )
    return (
        f"{config.train.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples = {samples:,} samples, "
        f"{most}"
    )


_FAILING = {
    "fail": "ends the run",
    "retry": "is made again, twice at most",
    "drop": "is left out",
    "drop_group": "is left out with its group",
    "mask": "has reward 0 and is not trained on",
}
"""What `rollout.on_failure` says."""


def _schedule(config: Config) -> str:
    """What is drawn beside what a step needs; empty where nothing is."""
    groups, ahead, rollout = config.train.prompts_per_step, config.train.staleness, config.rollout
    said = []
    if ahead:
        under_way = ahead * groups + rollout.extra_groups
        said.append(
            f"the responses of up to {under_way} prompts are drawn while a step trains, no token more than "
            f"{_count(ahead, 'weight version')} behind; --resume draws those that were not trained on again"
        )
    if rollout.extra_groups:
        late = "used by later steps while they are fresh enough, else " if ahead else ""
        said.append(
            f"{_count(rollout.extra_groups, 'prompt')} more than needed begun: a step trains on those answered first, "
            f"which are the shorter ones; those answered last are {late}dropped, and their prompts drawn again"
        )
    if rollout.keep:
        said.append(f"others are drawn for prompts whose responses {rollout.keep.name} refuses")
    if rollout.on_failure != "fail" or rollout.episode_seconds is not None:
        late = f" or takes more than {rollout.episode_seconds:g} s" if rollout.episode_seconds is not None else ""
        said.append(f"an episode that raises{late} {_FAILING[rollout.on_failure]}")
    return "; ".join(said)


def _validation(config: Config, held_out: Sequence[tuple[str, int]]) -> str:
    every = config.train.validate_every
    often = f", every {_count(every, 'step')}" if every else ""
    return f"prompts: {_answered(config, held_out)} before the first step{often} and after the last"


def _answered(config: Config, held_out: Sequence[tuple[str, int]]) -> str:
    """Which held-out prompts are answered, and how."""
    files = ", ".join(f"{count:,} of {path}" for path, count in held_out)
    temperature, each = config.evaluation.sampling.temperature, config.evaluation.samples_per_prompt
    how = f"{_count(each, 'sample')} each at temperature {temperature:g}" if temperature else "greedily"
    return f"{files}, answered {how}: {each * sum(count for _, count in held_out):,} answers"


def _run(config: Config) -> str:
    steps, epochs, minibatches = config.train.steps, config.algorithm.epochs, config.algorithm.minibatches
    if epochs * minibatches == 1:
        return f"{steps} steps, an optimizer step each"
    factors = f"{_count(epochs, 'epoch')} x {_count(minibatches, 'minibatch')}"
    return f"{steps} steps x {factors} = {steps * epochs * minibatches:,} optimizer steps"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("s", "tch")) else "s")
    return f"{number} {noun if number == 1 else plural}"
