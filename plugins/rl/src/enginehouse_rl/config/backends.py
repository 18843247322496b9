"""Checks of the backends a config names: there, usable, given options they know, able to do what is asked of them."""

from __future__ import annotations

import ast
import difflib
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from enginehouse.engines.declared import protocols_of
from enginehouse.engines.options import EngineOptions, RolloutOptions, TrainOptions
from enginehouse.errors import ConfigError, UserError, nearest
from enginehouse.plugin import Backend, Placement, ResolveError, RolloutBackend, TrainBackend, Transport, resolve
from enginehouse.plugin.capabilities import (
    CROSS_HOST,
    LORA,
    PROMPT_LOGPROBS,
    SAME_HOST,
    SAME_PROCESS,
    SEED,
    STOP_STRINGS,
    VALUE_HEAD,
    WEIGHT_CHECKSUMS,
)
from enginehouse.plugin.references import find_definition, lacking
from enginehouse.runtimes import CURRENT, Interpreter, NoRuntime, choose_runtime
from enginehouse.weights.names import stored_shapes
from enginehouse_rl.config.device import gpus_are_assumed
from enginehouse_rl.config.load import check
from enginehouse_rl.config.migration import answer_key
from enginehouse_rl.config.schema import RMConfig

if TYPE_CHECKING:
    from enginehouse.engines.memory import MemoryDemand, MemoryUse
    from enginehouse.engines.model import Device, ModelSpec
    from enginehouse.plugin import PluginManager
    from enginehouse.plugin.findings import Findings
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse_rl.config.device import Dtype
    from enginehouse_rl.config.schema import AnyConfig, Config, Engine, EvaluationSampling, Sampling

B = TypeVar("B", bound=Backend)
logger = logging.getLogger(__name__)

HIGH_LR = 0.01
"""Learning rates above it are noted."""
_EMBEDDING = re.compile(r"embed|^w[pt]e$|^shared$")
"""The last part of an embedding's name, whose weight has two dimensions as a linear layer's has."""


class RunsOn(NamedTuple):
    """What the engines of a run compute on, and in."""

    device: Device
    dtype: Dtype


def find_backend(
    findings: Findings, plugins: PluginManager, kind: type[B], engine: Engine, key: str, device: str
) -> B | None:
    """The record of the backend that plays a role, made for `device`; None after a problem.

    Args:
        kind: `TrainBackend` or `RolloutBackend`.
        key: config key of the role: `"actor"`.
        device: torch device type of the run.
    """
    try:
        record = plugins.get(kind, engine.backend, elsewhere=True)
    except UserError as error:
        error.args = (f"{key}.engine.backend: {error}", *error.args[1:])
        findings.problems.append(error)
        return None
    if device not in record.devices:
        findings.refuse(
            f"{key}.engine.backend: {record.name!r} runs on {' and '.join(record.devices)}, and this run is on "
            f"{device} (cluster.device)"
        )
    try:
        definition = find_definition(record.engine)
    except ResolveError as error:
        if engine.runtime in ("auto", CURRENT) and not plugins.missing(record):  # else it may be in its runtime alone
            findings.refuse(f"{key}.engine.backend: the engine of {record.name!r}: {error}")
        return record
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        findings.refuse(f"{key}.engine.backend: the engine of {record.name!r}, {record.engine}, is no class")
    for protocol in protocols_of(record):
        if missing := lacking(definition, protocol):
            findings.refuse(
                f"{key}.engine.backend: the engine of {record.name!r}, {record.engine}, is no {protocol.__name__}; it "
                f"lacks {', '.join(missing)}"
            )
    return record


def choose_interpreter(
    findings: Findings,
    plugins: PluginManager,
    record: Backend | None,
    engine: Engine,
    options: Mapping[str, Any],
    key: str,
    launcher: str,
    device: str,
) -> Interpreter:
    """The interpreter of a role's workers; this process's own after a problem.

    Args:
        record: the role's backend.
        options: as `typed_options` gives them.
        key: config key of the role: `"actor"`.
        launcher: `cluster.launcher`.
        device: torch device type of the run.
    """
    here = Interpreter(CURRENT)
    if record is None:
        return here
    typed = _typed(record, options)
    if typed is not None and typed.servers():
        record = replace(record, requires=())
    try:
        if engine.runtime == "auto" and not record.runtimes:
            plugins.get(record.kind, engine.backend)  # says which of the plugin's extras brings what is missing
        chosen = choose_runtime(record, engine.runtime, device)
    except UserError as error:
        if isinstance(error, NoRuntime) and gpus_are_assumed():  # it is to be made where they are
            name = f"{record.name}-{device}"
            findings.note(f"{key}.engine: {error}")
            return Interpreter(name, python=name, reason="it is not made here")
        at = "backend" if engine.runtime == "auto" else "runtime"
        error.args = (f"{key}.engine.{at}: {error}", *error.args[1:])
        findings.problems.append(error)
        return here
    if chosen.python is not None and launcher == "inline":
        findings.refuse(
            f"{key}.engine.runtime: an inline run has one process and one interpreter, and {record.name!r} would run "
            f"in {chosen.name} ({chosen.reason}); set cluster.launcher=ray"
        )
    return chosen


def check_native_names(
    findings: Findings, record: Backend | None, options: Mapping[str, Any], runs_in: Interpreter, key: str
) -> None:
    """Refuse arguments of an engine (`native`) that it does not know, by its own source where that is installed.

    Args:
        record: the backend; None after a problem.
        options: as `typed_options` gives them.
        runs_in: what the role's workers run under.
        key: config key of the role: `"actor"`.
    """
    typed = None if record is None else _typed(record, options)
    if record is None or typed is None or not typed.native:
        return
    known = native_names(typed.native_sources, runs_in.python)
    for name in typed.native if known else ():
        if name.replace("-", "_") not in known:
            close = difflib.get_close_matches(name, known, n=1)  # of hundreds, which nobody reads
            hint = f"did you mean {close[0]!r}?" if close else f"{' and '.join(typed.native_sources)} name those it has"
            findings.refuse(
                f"{key}.engine.options.native: the engine has no argument {name!r}; {hint} (options of backend "
                f"{record.name!r})"
            )


def native_names(sources: Sequence[str], python: str | None) -> set[str]:
    """Return the names that an engine's source declares as fields of classes or as flags; none where it is not there.

    Args:
        sources: as of `EngineOptions.native_sources`.
        python: the interpreter whose packages hold the engine; None: this process's.
    """
    if python is None:
        roots = {Path(entry) for entry in sys.path}
    else:
        roots = set(Path(python).parents[1].glob("lib/python*/site-packages"))
    names: set[str] = set()
    for file in {file for root in roots for pattern in sources for file in root.glob(pattern)}:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
                names.add(node.value.removeprefix("--").replace("-", "_"))
    return names


_FLAG = re.compile(r"--[a-z0-9][a-z0-9_-]*")


def typed_options(
    findings: Findings,
    plugins: PluginManager,
    record: Backend | None,
    engine: Engine,
    key: str,
    processes: int,
    runs_on: RunsOn,
) -> dict[str, Any]:
    """A backend's options, checked and completed by its own class, as plain data; empty after a problem."""
    if record is None:
        return {}
    schema = _options_class(record)
    if isinstance(schema, str):
        findings.refuse(f"{key}.engine.backend: {schema}")
        return {}

    def instead(option: str) -> str:
        return _who_has(option, plugins, record, key)

    options, problems = check(schema, engine.options, prefix=f"{key}.engine.options", instead=instead)
    findings.problems += [ConfigError(f"{problem} (options of backend {record.name!r})") for problem in problems]
    if isinstance(options, EngineOptions):
        options = options.for_device(runs_on.device)
        _check_processes(findings, record, options, processes, f"{key}.engine.options")
        try:
            options.check_device(runs_on.device, runs_on.dtype)
        except UserError as error:
            findings.refuse(f"{key}.engine.options: {error} (options of backend {record.name!r})")
        for surprise in options.surprises():
            findings.note(f"{key}.engine.options: {surprise}")
    return {} if options is None else options.model_dump()


def check_processes(
    findings: Findings, record: Backend | None, options: Mapping[str, Any], processes: int, key: str
) -> None:
    """Check a backend's options against a number of processes that is not the one they were given for.

    Args:
        options: as `typed_options` gives them.
        key: config key of the number.
    """
    if record is not None and (typed := _typed(record, options)) is not None:
        _check_processes(findings, record, typed, processes, f"{key} is {processes}")


def _check_processes(findings: Findings, record: Backend, options: EngineOptions, processes: int, said: str) -> None:
    """Check options against a number of processes; a refusal begins with `said`."""
    try:
        options.check(processes)
    except UserError as error:
        findings.refuse(f"{said}: {error} (options of backend {record.name!r})")


def _options_class(record: Backend) -> type[BaseModel] | str:
    """A backend's own class of options, or why there is none."""
    try:
        found = resolve(record.options)
    except ResolveError as error:
        return f"the options of {record.name!r}: {error}"
    if isinstance(found, type) and issubclass(found, BaseModel):
        return found
    return (
        f"the options of {record.name!r}: {record.options} is no pydantic model; its author has to derive it from "
        f"{TrainOptions.__module__}:{TrainOptions.__name__} or {RolloutOptions.__name__}"
    )


def _who_has(option: str, plugins: PluginManager, record: Backend, key: str) -> str:
    """What to do about an option that a backend lacks: another has it, or it may be the engine's own; empty: nothing.

    Args:
        option: dotted, without `engine.options`.
        key: config key of the role: `"actor"`.
    """
    own = _options_class(record)
    known = list(own.model_fields) if isinstance(own, type) else []
    first = option.partition(".")[0]
    if first in known or difflib.get_close_matches(option, known, n=1, cutoff=0.8):
        return ""  # mistyped
    having = []
    for one in plugins.all(record.kind):
        schema = _options_class(one)
        if isinstance(schema, type) and first in schema.model_fields:
            having.append(plugins.name_of(one))
    if having:
        noun = "backend" if len(having) == 1 else "backends"
        return (
            f"{noun} {' and '.join(map(repr, having))} {'has' if len(having) == 1 else 'have'} it; set "
            f"{key}.engine.backend={having[0]}"
        )
    answer = answer_key(option)
    if not answer and _passes_on(own):
        answer = f"{nearest(option, known)}. What the engine itself takes goes under {key}.engine.options.native"
    return answer


def _passes_on(options: type[BaseModel] | str) -> bool:
    """Whether a backend hands `native` on to its engine."""
    try:
        return isinstance(options, type) and bool(options.model_validate({"native": {"name": 0}}))
    except ValidationError:
        return False


def check_servers(
    findings: Findings, rollout: RolloutBackend | None, options: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> None:
    """Refuse a server that both the rollout and the evaluation would use; options as `typed_options` gives them.

    Args:
        rollout: the backend of the rollout; None after a problem.
        options: the rollout's.
        evaluation: those of the engine for validations, of the same backend.
    """
    if rollout is None:
        return
    ours, theirs = _typed(rollout, options), _typed(rollout, evaluation)
    shared = set(ours.servers()) & set(theirs.servers()) if ours and theirs else set()
    if shared:
        findings.refuse(
            f"evaluation.engine.options: {min(shared)} is a server of the rollout's, and each has weights of its own; "
            "start another, or leave evaluation.engine unset: the rollout then answers the validation prompts"
        )


def gpus_of(record: RolloutBackend | None, options: Mapping[str, Any]) -> int:
    """GPUs of a replica, where the run is on GPUs; 1 after a problem."""
    typed = None if record is None else _typed(record, options)
    return typed.gpus() if isinstance(typed, RolloutOptions) else 1


def check_model(
    findings: Findings,
    record: Backend | None,
    options: Mapping[str, Any],
    model: Mapping[str, Any],
    key: str,
    spec: ModelSpec,
    path_key: str = "model.path",
) -> None:
    """Check a backend's options against a model, and the model's files; nothing after a problem with either.

    Args:
        options: as `typed_options` gives them.
        model: `config.json`.
        key: config key of the role: `"actor"`.
        spec: the model, as the engine is given it.
        path_key: the config key that names the model.
    """
    typed = None if record is None else _typed(record, options)
    if record is None or typed is None or not model:
        return
    findings.doing(f"Building {spec.path} without its weights")
    try:
        typed.check_model(model.get("text_config") or model)
        notes = typed.check_files(spec) if stored_names(Path(spec.path)) else ()
    except ImportError as error:  # the engine has a runtime of its own
        logger.debug("%s: the files of %s are not checked: %s", record.name, spec.path, error)
    except UserError as error:
        findings.refuse(f"{key}.engine.options, {path_key}: {error} (options of backend {record.name!r})")
    else:
        for note in (f"{path_key}: {note}" for note in notes):
            if note not in findings.notes:  # by another role that has the same model
                findings.note(note)


def check_sampling(
    findings: Findings,
    config: Config,
    record: RolloutBackend | None,
    role: RolePlan,
    device: str,
    name: str = "rollout",
) -> None:
    """Check how a role that generates draws against its backend's options; nothing after a problem with these.

    Args:
        record: its backend.
        role: the role.
        device: torch device type of the run.
        name: `"rollout"`, or `"evaluation"`.
    """
    typed = None if record is None else _typed(record, role.options)
    if record is None or not isinstance(typed, RolloutOptions):
        return
    drawn: dict[str, Sampling | EvaluationSampling] = {"rollout": config.rollout.sampling} if name == "rollout" else {}
    if name == "evaluation" or (config.evaluation.engine is None and config.data.validation_files()):
        drawn["evaluation"] = config.evaluation.sampling
    for key, sampling in drawn.items():
        try:
            typed.check_sampling(sampling.top_p, sampling.top_k, device, {**os.environ, **role.env})
        except UserError as error:
            findings.refuse(f"{key}.sampling: {error} (options of backend {record.name!r})")


def memory_of(record: Backend | None, options: Mapping[str, Any], demand: MemoryDemand) -> MemoryUse | None:
    """What a rank of a backend will hold; None where that is not known.

    Args:
        options: as `typed_options` gives them.
        demand: what it is asked to do.
    """
    typed = None if record is None else _typed(record, options)
    return None if typed is None else typed.memory(demand)


def check_targets(findings: Findings, options: Mapping[str, Any], path: str) -> None:
    """Refuse layers to adapt (`LoraOptions.targets`) of which a model's files have none, and note patterns of
    `lr_groups` that match none of their tensors.

    Args:
        options: of the actor, as `typed_options` gives them.
        path: the model's directory.
    """
    targets = (options.get("lora") or {}).get("targets", "all-linear")
    groups = options.get("lr_groups") or {}
    shapes = _stored_shapes(Path(path)) if groups or not isinstance(targets, str) else {}
    names = list(shapes)
    if names:
        for pattern in groups:
            if not any(fnmatchcase(name, pattern) for name in names):
                patterns = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}
                findings.note(
                    f"actor.engine.options.lr_groups: no tensor in {path} is called {pattern!r}; "
                    f"{nearest(pattern, patterns)}"
                )
    stored = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    last = {layer.rpartition(".")[2] for layer in stored}
    linear = {
        layer.rpartition(".")[2]
        for layer, shape in stored.items()
        if len(shape) == 2 and not _EMBEDDING.search(layer.rpartition(".")[2])
    }
    for target in targets if stored and not isinstance(targets, str) else ():
        key, called = "actor.engine.options.lora.targets", target.rpartition(".")[2]
        if called in last - linear:
            findings.refuse(f"{key}: {target!r} is no linear layer of {path}; {nearest(called, linear)}")
        elif not any(layer == target or layer.endswith(f".{target}") for layer in stored):
            said = f"{key}: no tensor in {path} is of a layer {target!r}"
            if called in last:  # a model may call the same layer otherwise than its files
                findings.note(said)
            else:
                findings.refuse(f"{said}; {nearest(called, linear)}")


def check_export(
    findings: Findings, config: AnyConfig, record: TrainBackend | None, options: Mapping[str, Any]
) -> None:
    """Check that there is an adapter where one is to be exported.

    Args:
        record: the actor's backend; None after a problem.
        options: the actor's, as `typed_options` gives them.
    """
    kind = config.train.export
    if kind == "merged" or record is None:
        return
    if isinstance(config, RMConfig):
        findings.refuse(f"train.export is {kind}: an adapter cannot hold the head of a reward model; set it to merged")
    elif LORA not in record.capabilities:
        findings.refuse(
            f"train.export is {kind}, and backend {record.name!r} trains no adapters (capability {LORA!r}); set it to "
            "merged, or actor.engine to a backend that does, as fsdp, with actor.engine.options.lora"
        )
    elif options and not options.get("lora"):
        findings.refuse(
            f"train.export is {kind}, and the actor has no adapter: set actor.engine.options.lora, or train.export to "
            "merged"
        )


def stored_names(directory: Path) -> list[str]:
    """Names of the tensors in a directory's safetensors; none where they cannot be read."""
    return list(_stored_shapes(directory))


def _stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a directory's safetensors; none where they cannot be read."""
    try:
        return stored_shapes(directory)
    except (OSError, SafetensorError):
        return {}


def _typed(record: Backend, options: Mapping[str, Any]) -> EngineOptions | None:
    """What `typed_options` gave as plain data; None after a problem."""
    typed = resolve(record.options)(**options) if options else None
    return typed if isinstance(typed, EngineOptions) else None


def scheduled_options(
    findings: Findings,
    plugins: PluginManager,
    record: TrainBackend | None,
    engine: Engine,
    processes: int,
    runs_on: RunsOn,
    optimizer_steps: int,
) -> dict[str, Any]:
    """The actor's options, with the length of the run filled in for the learning-rate schedule."""
    options = typed_options(findings, plugins, record, engine, "actor", processes, runs_on)
    if options.get("lr", 0) > HIGH_LR:
        findings.note(
            f"actor.engine.options.lr is {options['lr']:g}: rates above {HIGH_LR:g} destroy most models; for a whole "
            "model 1e-6 is usual, for adapters 1e-4"
        )
    if "total_steps" not in options:
        return options
    options["total_steps"] = total = options["total_steps"] or optimizer_steps
    if total < optimizer_steps:
        findings.note(
            f"actor.engine.options.total_steps is {total} and the run takes {optimizer_steps} optimizer steps: the "
            "rest run at the schedule's end"
        )
    warmup = options.get("warmup_steps", 0)
    if warmup >= optimizer_steps:
        findings.note(f"the warm-up of {warmup} optimizer steps does not end within the run's {optimizer_steps}")
    return options


def check_value_head(findings: Findings, record: TrainBackend | None, key: str) -> None:
    """Check that the backend of a role, whose section is `key`, trains models that give values."""
    if record is not None and VALUE_HEAD not in record.capabilities:
        findings.refuse(
            f"{key}.engine.backend: backend {record.name!r} has no value heads (capability {VALUE_HEAD!r}), which a "
            f"{'critic' if key == 'critic' else 'reward model'} is"
        )


def check_capabilities(
    findings: Findings, config: Config, rollout: RolloutBackend | None, role: str = "rollout"
) -> int:
    """Check what the config asks of the backend of a role that generates.

    Args:
        rollout: the backend; None after a problem.
        role: `"rollout"`, or `"evaluation"` for the engine that answers nothing but validation prompts.

    Returns:
        `weights.effect_check_every`, or 0 where the backend cannot take part in that check.
    """
    every = config.weights.effect_check_every
    if rollout is None:
        return every
    name, able = rollout.name, rollout.capabilities
    check_stops(findings, config, rollout, role)
    if SEED not in able:
        findings.note(f"backend {name!r} does not seed its samples: two runs with the same train.seed will differ")
    if WEIGHT_CHECKSUMS not in able:
        findings.note(
            f"backend {name!r} cannot read its weights back: an update's bytes are checked on arrival, and what is "
            + (
                "served by the logprobs of a few tokens, at every update that changes weights"
                if every and PROMPT_LOGPROBS in able
                else "served not at all: that it drops updates would not be noticed"
            )
        )
    if every and PROMPT_LOGPROBS not in able:
        findings.note(
            f"backend {name!r} cannot score prompts (capability {PROMPT_LOGPROBS!r}): the effect of a weight update is "
            "not checked (weights.effect_check_every)"
        )
        return 0
    return every


def check_stops(findings: Findings, config: Config, rollout: RolloutBackend | None, role: str) -> None:
    """Check that a backend can stop at the strings that the config asks for; arguments as of `check_capabilities`."""
    stops = {"rollout.sampling.stop": config.rollout.sampling.stop} if role == "rollout" else {}
    if role == "evaluation" or (config.evaluation.engine is None and config.data.validation_files()):
        given = config.evaluation.sampling.stop is not None
        stop = config.evaluation.sampling.beside(config.rollout.sampling).stop
        if given or role == "evaluation":
            stops["evaluation.sampling.stop" + ("" if given else ", unset and so rollout.sampling.stop")] = stop
    for key, stop in stops.items():
        if stop and rollout is not None and STOP_STRINGS not in rollout.capabilities:
            findings.refuse(f"{key}: backend {rollout.name!r} cannot stop at strings (capability {STOP_STRINGS!r})")


def choose_transport(
    findings: Findings,
    plugins: PluginManager,
    config: Config,
    train: TrainBackend | None,
    rollout: RolloutBackend | None,
    device: str,
    colocated: bool,
    role: str = "rollout",
) -> tuple[str, str]:
    """The weight transport's name, and why it is that; empty after a problem.

    Args:
        rollout: the backend of the role that gets weights.
        role: its name. `weights.transport` is the rollout's; another role has it where it reaches, else one is chosen.
    """
    one_process = colocated or config.cluster.launcher == "inline"
    joined = bool(config.cluster.address)
    apart = f"in different processes of {'any hosts of a cluster' if joined else 'one host'}"
    where = "in the same process" if one_process else apart
    named = config.weights.transport
    with findings.collecting():
        record = None if named == "auto" else plugins.get(Transport, named)
        wanted = {SAME_PROCESS} if one_process else {SAME_HOST, CROSS_HOST}
        reaches = record is not None and bool(set(record.capabilities) & wanted)
        if record is None or (role != "rollout" and not reaches):
            if train is None or rollout is None:
                return "", ""
            placement = Placement(
                colocated=one_process, hosts=1 + joined, device=device, training_ranks=config.actor.processes
            )
            if joined and not one_process and role == "rollout":
                findings.note(
                    "cluster.address is set: whether actor and rollout share a host shows only at the start; the "
                    "transport is chosen as if they did not (weights.transport=shared_memory is quicker where they do)"
                )
            picked = plugins.pick_transport(train, rollout, placement)
            ranks = placement.training_ranks
            several = f", and {ranks} processes train" if joined and not one_process and ranks > 1 else ""
            return plugins.name_of(picked), f"actor and {role} are {where}{several}"
        if not reaches:
            reach = ", ".join(sorted(record.capabilities)) or "none"
            raise ConfigError(
                f"weights.transport: actor and rollout are {where} (rollout.placement), and {named!r} does not reach "
                f"there (its capabilities: {reach}); leave it at auto to have one chosen"
            )
        return named, "weights.transport names it"
    return "", ""
