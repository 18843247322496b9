"""Checks of a config's numbers against each other: samples, processes, GPUs, tokens. Uneven splits are legal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from enginehouse.engines.model import positions, served_positions
from enginehouse.plugin import Advantage
from enginehouse.roles.role_plan import own_processes
from enginehouse_rl.config.device import gpus_are_assumed, gpus_are_known, visible_gpus
from enginehouse_rl.config.placement import gpus_needed
from enginehouse_rl.config.roles import beside
from enginehouse_rl.data.rendering import TokenLimit

if TYPE_CHECKING:
    from enginehouse.plugin import PluginManager
    from enginehouse.plugin.findings import Findings
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse_rl.config.schema import AnyConfig, Cluster, Config, DPOConfig, PreferenceConfig, SFTConfig


def samples_per_step(config: Config) -> int:
    """Rows of a step."""
    return config.train.prompts_per_step * config.rollout.samples_per_prompt


def check_batches(findings: Findings, config: Config, plugins: PluginManager, roles: Mapping[str, RolePlan]) -> None:
    """Check that a step's samples can be shared out to minibatches and processes, and are worth comparing."""
    processes, minibatches = config.actor.processes, config.algorithm.minibatches
    prompts, each, samples = config.train.prompts_per_step, config.rollout.samples_per_prompt, samples_per_step(config)
    said = (
        f"a step has {samples} samples ({prompts} prompts, train.prompts_per_step, times {each}, "
        "rollout.samples_per_prompt)"
    )
    if minibatches > samples:
        findings.refuse(f"{said}, which cannot be cut into {minibatches} minibatches (algorithm.minibatches)")
    for role, section in beside(config).items():
        if role in roles and (section.processes or 0) > samples:
            whose = f"{section.processes} processes of the {role.replace('_', ' ')} ({role}.processes)"
            findings.refuse(f"{said}, fewer than the {whose}")
    if processes > samples:
        findings.refuse(f"{said}, fewer than the {processes} processes of the actor (actor.processes)")
    elif processes * minibatches > samples >= minibatches:
        findings.note(
            f"{said}, about {samples / minibatches:.3g} a minibatch: fewer than actor.processes ({processes}), so some "
            "processes have nothing to do in some optimizer steps"
        )
    if config.train.staleness and config.cluster.launcher == "inline":
        findings.refuse(
            f"train.staleness is {config.train.staleness}: responses are drawn while the actor trains, and an inline "
            "run has one process for both; set train.staleness=0, or cluster.launcher=ray"
        )
    if config.rollout.replicas > prompts:
        findings.note(
            f"{config.rollout.replicas} rollout replicas share {prompts} prompts a step: some have nothing to do"
        )
    name = config.algorithm.advantage.name
    records = [provided.record for provided in plugins.providers(Advantage, name)]
    compares = any(isinstance(record, Advantage) and record.compares_samples for record in records)
    if compares and each < 2:
        findings.refuse(
            f"rollout.samples_per_prompt is {each}, and the advantage {name!r} compares the samples of one prompt with "
            "each other: it needs at least 2"
        )
    if compares and config.rollout.sampling.temperature == 0:
        findings.refuse(
            f"rollout.sampling.temperature is 0: the samples of a prompt are all the same, so the advantage {name!r} "
            "is zero everywhere and nothing is learned"
        )


def check_rows(findings: Findings, config: SFTConfig | PreferenceConfig) -> None:
    """Check that a supervised step's rows can be shared out to processes."""
    processes, rows = config.actor.processes, config.train.rows_per_step
    if processes > rows:
        findings.refuse(
            f"a step has {rows} rows (train.rows_per_step), fewer than the {processes} processes of the actor "
            "(actor.processes)"
        )


def check_dpo(findings: Findings, config: DPOConfig) -> None:
    """Check the arguments of a loss of preferences: one that it does not take would do nothing."""
    algorithm = config.algorithm
    for name, losses in (
        ("label_smoothing", ("sigmoid",)),
        ("desirable_weight", ("kto",)),
        ("undesirable_weight", ("kto",)),
    ):
        value, unset = getattr(algorithm, name), type(algorithm).model_fields[name].default
        if value != unset and algorithm.loss not in losses:
            findings.refuse(
                f"algorithm.{name} is {value:g}: only algorithm.loss={losses[0]} takes it, not {algorithm.loss}"
            )
    if algorithm.loss == "kto" and config.train.rows_per_step < 2:
        findings.refuse("train.rows_per_step is 1: kto compares the responses of a step, and needs at least 2")


def check_inline(findings: Findings, config: AnyConfig, apart: Mapping[str, RolePlan]) -> None:
    """Check that an inline run has no model with processes of its own beside the actor's; `apart` are those."""
    for name, section in beside(config).items():
        if name in apart and config.cluster.launcher == "inline":
            key, what = "engine" if section.engine else "processes", name.replace("_", " ")
            findings.refuse(
                f"{name}.{key}: the {what} wants processes of its own, and an inline run has one for all roles; leave "
                f"it unset, set {name}.shares=actor, or cluster.launcher=ray"
            )


def check_placement(
    findings: Findings, config: Config, device: str, roles: Mapping[str, RolePlan], not_shared: str
) -> None:
    """Check that the roles fit beside each other.

    Args:
        device: torch device type of the run.
        roles: by name.
        not_shared: why roles do not share GPUs, if there are too few, or what has them do so.
    """
    actor, rollout = config.actor.processes, config.rollout.replicas
    evaluation, apart = "evaluation" in roles, own_processes(roles)
    check_inline(findings, config, apart)
    if evaluation and config.cluster.launcher == "inline":
        findings.refuse(
            "evaluation.engine wants a process of its own, and an inline run has one for all roles; leave it unset, or "
            "set cluster.launcher=ray"
        )
    check_environments(findings, config)
    if evaluation and not config.data.validation:
        findings.refuse("evaluation.engine is set, but there is no file to validate on (data.validation)")
    if "rollout" not in apart and actor != rollout and config.cluster.launcher != "inline":
        findings.refuse(
            "rollout.placement is colocated: each replica lives in a process of the actor, so rollout.replicas "
            f"({rollout}) has to equal actor.processes ({actor}); or set rollout.placement=separate"
        )
    check_cluster(findings, config.cluster, max(actor, rollout), gpus_needed(roles), device, not_shared)
    check_cores(findings, config.cluster, sum(role.processes for role in apart.values()), device)


def check_environments(findings: Findings, config: Config) -> None:
    """Check that environments have processes of their own only where there can be some."""
    environments = config.environment.processes
    if environments and config.cluster.launcher == "inline":
        findings.refuse(
            f"environment.processes is {environments}, and an inline run has one process for everything; leave it "
            "unset, or set cluster.launcher=ray"
        )


def check_cluster(
    findings: Findings, cluster: Cluster, largest: int, gpus: Mapping[str, int], device: str, not_shared: str = ""
) -> None:
    """Check the launcher against the number of processes, and GPUs where they can be counted.

    Args:
        largest: processes of the largest role.
        gpus: of each role, where the run is on GPUs.
        not_shared: why roles do not share them, if there are too few.
    """
    if cluster.launcher == "inline" and largest > 1:
        findings.refuse(
            "cluster.launcher is inline: every role runs in this one process, so actor.processes and rollout.replicas "
            f"have to be 1, not {largest}"
        )
    if cluster.launcher == "inline" and cluster.address:
        findings.refuse(
            "cluster.address: an inline run joins no Ray cluster; leave it unset, or set cluster.launcher=ray"
        )
    needed = sum(gpus.values())
    if device == "cuda" and gpus_are_known(cluster.address) and needed > (there := visible_gpus()):
        each = ", ".join(f"{role} {number}" for role, number in gpus.items() if number)
        why = f"; {not_shared}" if not_shared else ""
        where = "assumed (--gpus)" if gpus_are_assumed() else "visible on this machine"
        findings.refuse(f"the run needs {needed} GPUs ({each}), and {there} are {where}{why}")


def check_cores(findings: Findings, cluster: Cluster, processes: int, device: str) -> None:
    """Note engines that share cores of this machine; on GPUs they hardly use any.

    Args:
        processes: of all roles.
        device: torch device type of the run.
    """
    # macOS has no affinity
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = processes * (cluster.threads_per_process or 1)
    if device == "cpu" and not cluster.address and cluster.launcher != "inline" and threads > cores:
        findings.note(
            f"the engines have {threads} threads in {processes} process{'' if processes == 1 else 'es'}, and this "
            f"machine {cores} cores: they wait for each other"
        )


def check_evaluation(findings: Findings, config: Config) -> None:
    """Check that the answers to a validation prompt can differ, where several are drawn."""
    evaluation = config.evaluation
    if evaluation.samples_per_prompt > 1 and evaluation.sampling.temperature == 0:
        findings.refuse(
            f"evaluation.samples_per_prompt is {evaluation.samples_per_prompt}, and evaluation.sampling.temperature is "
            "0: the samples of a prompt would all be the same; set the temperature, to 1.0 say"
        )


def check_lengths(
    findings: Findings, config: Config, roles: Mapping[str, RolePlan], model: Mapping[str, Any]
) -> TokenLimit:
    """Check that a response fits into the model and each engine that generates, where limits are known.

    Args:
        roles: by name.
        model: the model's `config.json`.

    Returns:
        How long prompts may be: as the config says, or what a response leaves.
    """
    prompt = config.data.max_prompt_tokens
    said = TokenLimit.of("data.max_prompt_tokens", prompt)
    asked = replace(said, cure=f"{said.cure}; data.overlong_prompts=drop leaves them out")
    key, wanted = "rollout.sampling.max_tokens", config.rollout.sampling.max_tokens
    answers = [(key, wanted, "rollout")]
    if config.data.validation_files():
        by = "evaluation" if "evaluation" in roles else "rollout"
        if config.evaluation.sampling.max_tokens:
            key, wanted = "evaluation.sampling.max_tokens", config.evaluation.sampling.max_tokens
        answers.append((key, wanted, by))
    shortest = asked
    served, served_name = served_positions(model), "the model's positions (max_position_embeddings)"
    if served != positions(model):
        served_name = "the rows that all engines compute alike by the model's RoPE (longer ones have other frequencies)"
    for key, wanted, role in dict.fromkeys(answers):
        option = roles[role].options.get("max_model_tokens")
        if served is not None and served != positions(model) and option is not None and option > served:
            findings.refuse(
                f"{role}.engine.options.max_model_tokens is {option}, and beyond {served} tokens the model's RoPE has "
                f"other frequencies, which training and {role} would choose in different ways: at most {served}"
            )
        limits = {
            served_name: served,
            f"{role}.engine.options.max_model_tokens": roles[role].options.get("max_model_tokens"),
        }
        known = [(limit, name) for name, limit in limits.items() if isinstance(limit, int)]
        limit, name = min(known, default=(prompt + wanted, ""))
        if wanted >= limit:
            findings.refuse(f"{key} is {wanted}, which with a prompt before it is more than {name}, {limit}")
        elif limit - wanted < shortest.tokens:
            shortest = TokenLimit(
                limit - wanted,
                f"the {limit - wanted} that leave room for {wanted} new ones ({key}) within {name}, {limit}",
                f"drop such rows (data.overlong_prompts=drop leaves them out) or lower {key}",
            )
    return shortest


def check_positions(
    findings: Findings,
    config: Config,
    roles: Mapping[str, RolePlan],
    models: Mapping[str, Mapping[str, Any]],
    prompt: TokenLimit,
) -> None:
    """Check that the longest sample fits into the models beside the actor's.

    Args:
        roles: by name.
        models: `config.json` of those that have a model of their own, by role.
        prompt: how long prompts may be.
    """
    longest = prompt.tokens + config.rollout.sampling.max_tokens
    for name, model in models.items():
        needed = longest + (name == "reward_model")  # it reads a token more: `with_end`
        if name in roles and (limit := positions(model)) is not None and limit < needed:
            findings.refuse(
                f"{name}.path: the model has {limit} positions (max_position_embeddings), and a sample may need "
                f"{needed}: lower data.max_prompt_tokens or rollout.sampling.max_tokens"
            )


def row_limit(config: SFTConfig | PreferenceConfig, model: Mapping[str, Any], further: int = 0) -> TokenLimit:
    """How long a row may be: as the config says, or what the model, given its `config.json`, has room for.

    Args:
        further: tokens that are added to each row.
    """
    number = positions(model)
    if number is not None and number - further < config.data.max_tokens:
        said = f"the model's positions (max_position_embeddings), {number}"
        if further:
            said = f"the {number - further} that leave room for a score in {said}"
        return TokenLimit(number - further, said, "drop such rows, or shorten them")
    return TokenLimit.of("data.max_tokens", config.data.max_tokens)
