"""Checks whether a config may resume an earlier run, and finds the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from enginehouse.errors import ConfigError
from enginehouse.plugin.options_schema import section_type
from enginehouse_rl.checkpoints import Checkpoint, find_newest_checkpoint
from enginehouse_rl.config.earlier_run import RUN_MARKER, count_steps, read_record
from enginehouse_rl.config.run_lock import check_free
from enginehouse_rl.config.schema import SCHEMAS
from enginehouse_rl.data.digests import data_digests, model_digest
from enginehouse_rl.plan.roles import list_model_paths
from enginehouse_rl.plan.rows import name_files

if TYPE_CHECKING:
    from pydantic import BaseModel

    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config.schema import AnyConfig

FIXED = ("model.path", "model.dtype", "data", "train.seed", "train.prompts_per_step", "train.rows_per_step",
         "rollout.samples_per_prompt")  # fmt: skip
"""Keys that a resumed run may not change, because the order of the data or the state of the model depends on them."""
FREE = ("data.validation", "model.trust_remote_code")
"""Keys that may change, although they are in a section of `FIXED`."""
UNSAID = ("run", "cluster", "plugins")
"""Sections whose changes are not reported."""


def find_command(config: AnyConfig) -> str:
    return next(kind for kind, schema in SCHEMAS.items() if isinstance(config, schema))


def check_resume(findings: Findings, config: AnyConfig, trained: Sequence[str], dtype: str) -> Checkpoint | None:
    """Check that a run can resume, and return the checkpoint from which it resumes; None if a problem was found."""
    directory = Path(config.run.directory).absolute()
    checkpoint = None
    with findings.collecting():
        checkpoint = _find_checkpoint(findings, directory)
        if checkpoint.kind != find_command(config):
            raise ConfigError(
                f"--resume: {directory} is a run of `enginehouse {checkpoint.kind}`, not of "
                f"`enginehouse {find_command(config)}`"
            )
    if checkpoint is None or checkpoint.kind != find_command(config):
        return None
    steps, record = config.train.steps, read_record(directory)
    finished = record.get("status") == "finished"
    last = max(checkpoint.step, count_steps(record) if finished else 0)
    if last > steps or (last == steps and finished):
        findings.refuse(
            f"--resume: the run in {directory} has taken {last} steps, but train.steps is {steps}: raise train.steps "
            "to continue"
        )
    if missing := [role for role in trained if role not in checkpoint.roles]:
        findings.refuse(
            f"--resume: {checkpoint.path} holds no state of {' and '.join(missing)}, only of "
            f"{', '.join(checkpoint.roles)}: set algorithm.advantage as it was, or start a new run in another "
            "directory, from the saved model"
        )
    if last > checkpoint.step:
        findings.note(
            f"steps {checkpoint.step + 1} to {last} are repeated: the newest checkpoint is of step {checkpoint.step}"
        )
    before = _follow_moves(findings, _fill_defaults(checkpoint.config, type(config)), config, checkpoint)
    for key, was, now in compare_configs(before, record_config(config, dtype)):
        if _lies_in(key, FIXED) and not _lies_in(key, FREE):
            findings.refuse(
                f"--resume: {key} is {_spell(now)}, but was {_spell(was)} when {checkpoint.path} was written, so the "
                f"run cannot continue where it stopped. Set {key}={_spell(was, 'null')} again, or start a new run in "
                "another directory"
            )
        elif not _lies_in(key, UNSAID):
            findings.note(f"{key} is {_spell(now)} from here on, and was {_spell(was)} up to the checkpoint")
    for check in (_check_data, _check_models):
        with findings.collecting():
            check(config, checkpoint)
    return checkpoint


def _spell(value: Any, unset: str = "unset") -> str:
    """Return a value of a config as YAML writes it; None becomes `unset`."""
    return unset if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def record_config(config: AnyConfig, dtype: str) -> dict[str, Any]:
    """Return a config as checkpoints store it: as plain data, with the dtype that the run computes in."""
    plain = config.model_dump(mode="json")
    return {**plain, "model": {**plain["model"], "dtype": dtype}}


def compare_configs(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key at which two configs differ, with both values; None stands for a missing value."""
    before, after = dict(_flatten(was)), dict(_flatten(now))
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def _find_checkpoint(findings: Findings, directory: Path) -> Checkpoint:
    if not (directory / RUN_MARKER).is_file():
        raise ConfigError(f"--resume: there is no run in {directory} (run.directory); start one without --resume")
    check_free(directory)
    record = read_record(directory)  # read first, to notice a process that continues the run meanwhile
    checkpoint, damaged = find_newest_checkpoint(directory)
    if checkpoint is None and not damaged:
        raise ConfigError(
            f"--resume: the run in {directory} left no checkpoint to resume from. (A checkpoint is written every "
            "train.checkpoint_every steps and every train.checkpoint_minutes, and when a run is interrupted or fails.) "
            "Start the run again with run.overwrite=true, without --resume"
        )
    listed = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
    if checkpoint is None:
        raise ConfigError(
            f"--resume: no checkpoint of the run in {directory} is intact ({listed}). Restore one from a copy, or "
            "start again in another directory, without --resume"
        )
    if damaged:
        findings.note(f"damaged checkpoints are skipped, and renamed when the run resumes ({listed})")
    if not checkpoint.files:
        findings.note(
            f"{checkpoint.path} has no digests of its files, because its run was stopped in a hurry or used an older "
            "enginehouse. Changes of these files cannot be noticed. With an older enginehouse, changes of the data "
            "cannot be noticed either"
        )
    return replace(checkpoint, record=record)


def _follow_moves(
    findings: Findings, was: Mapping[str, Any], config: AnyConfig, checkpoint: Checkpoint
) -> Mapping[str, Any]:
    """Return a checkpoint's config with the present paths of its data and model, if their content is unchanged."""
    data, model = dict(was["data"]), dict(was["model"])
    before, now = name_files(data.get("train") or ())[1], name_files(config.data.train)[1]
    with suppress(OSError):  # the check of data files reports it
        is_same_data = [checkpoint.data.get(path) for path in before] == list(data_digests(now).values())
        if before != now and is_same_data and isinstance(data["train"], type(config.data.train)):
            weights = data["train"].values() if isinstance(data["train"], Mapping) else None
            data["train"] = config.data.train if weights is None else dict(zip(now, weights, strict=True))
            findings.note(f"data.train is {', '.join(now)} from here on, with the content that {', '.join(before)} had")
    with suppress(OSError):
        path = config.model.path
        if path != model["path"] and checkpoint.models.get(model["path"]) == model_digest(path):
            findings.note(f"model.path is {path} from here on, with the content that {model['path']} had")
            model["path"] = path
    return {**was, "data": data, "model": model}


def _check_data(config: AnyConfig, checkpoint: Checkpoint) -> None:
    """Check that the training files still have the content with which the run began.

    Raises:
        ConfigError: a file has changed.
    """
    try:
        now = data_digests(config.data.train)
    except OSError:
        return  # the check of data files reports it
    changed = [path for path, digest in now.items() if checkpoint.data.get(path, digest) != digest]
    if changed:
        raise ConfigError(
            f"--resume: data.train: {', '.join(changed)} has changed since {checkpoint.path} was written, so the run "
            "would continue with other rows. Put the former file back, or start a new run in another directory"
        )


def _check_models(config: AnyConfig, checkpoint: Checkpoint) -> None:
    """Check that the models from which roles start have not changed. A changed model would change the reference or the
    base model of adapters.

    Raises:
        ConfigError: a model has changed.
    """
    for path in list_model_paths(config):
        try:
            changed = model_digest(path) != checkpoint.models.get(path, model_digest(path))
        except OSError:
            continue  # the check of models reports it
        if changed:
            raise ConfigError(
                f"--resume: the files of the model in {path} have changed since {checkpoint.path} was written. Put the "
                "former files back, or start a new run in another directory"
            )


def _fill_defaults(was: Mapping[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    """Return a checkpoint's config, with defaults for the keys that were added after it was written."""
    filled = dict(was)
    for name, field in schema.model_fields.items():
        inner = section_type(field.annotation)
        value = was.get(name, {} if field.default is not None else None)
        if inner is not None and isinstance(value, Mapping):
            filled[name] = _fill_defaults(value, inner)
        elif name not in was and not field.is_required():
            filled[name] = to_jsonable_python(field.get_default(call_default_factory=True))
    return filled


def _lies_in(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from _flatten(value, key)
        else:
            yield key, value
