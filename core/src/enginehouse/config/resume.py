"""What a run is resumed from: its newest whole checkpoint, and whether a config may go on with it.

A checkpoint is a directory `checkpoints/step-000100/` of the run directory. It holds `actor/`, which the training
engine wrote and reads, and `loop.json`: where the loop stood, with which config and data, and the digests of all files.
`enginehouse.runs.checkpoints` writes it. A checkpoint is whole if all its files are what they were when it was written:
every byte is read, before a process starts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from enginehouse.config.earlier_run import RUN_MARKER, checkpoint_paths, read_record, steps_taken
from enginehouse.config.load import section_type
from enginehouse.config.run_lock import check_free
from enginehouse.config.schema import SFTConfig
from enginehouse.data.digests import data_digests, file_digests, text_digest
from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from enginehouse.config.findings import Findings
    from enginehouse.config.schema import Config

log = logging.getLogger(__name__)

LOOP_FILE = "loop.json"
ACTOR = "actor"
FORMAT = 2
"""Raised when `loop.json` changes so that older code would misread it. The digest of itself
stays as it is. Format 1 had no digests."""
LARGE_BYTES = 4 * 2**30
"""Reading a checkpoint larger than this is announced, as it may take a while."""

FIXED = ("model.path", "model.dtype", "data", "train.seed", "train.prompts_per_step", "train.rows_per_step",
         "rollout.samples_per_prompt")  # fmt: skip
"""What decides which rows come next and what the state in a checkpoint is of: none of it may change on the way."""
FREE = ("data.validation", "model.trust_remote_code")
"""Parts of those that may."""
UNSAID = ("run", "cluster", "plugins")
"""Sections whose changes are not worth a note."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a loop stood after a step.

    Attributes:
        path: its directory.
        step: the last step whose update is in it.
        elapsed_seconds: of the run, when it was written.
        loop: what the loop keeps of its own, as plain data.
        config: the run's config then, as plain data.
        kind: the command that runs such a config, `"train"` or `"sft"`.
        data: digests of the files of training data, by path as the config has it; empty in one of format 1.
        files: size in bytes and digest of each file, by its path in the directory; empty in one of format 1.
        passed_over: damaged checkpoints of later steps, in whose place this one was taken.
        record: the run's record when this one was found; another one means that another process went on meanwhile.
    """

    path: Path
    step: int
    elapsed_seconds: float
    loop: Mapping[str, Any]
    config: Mapping[str, Any]
    kind: str
    data: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    passed_over: Sequence[Path] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def actor(self) -> Path:
        """What the actor's engine wrote."""
        return self.path / ACTOR

    def encoded(self) -> str:
        """The content of `loop.json`, with a digest of itself."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "loop": self.loop,
            "kind": self.kind,
            "config": self.config,
            "data": self.data,
            "files": {name: list(entry) for name, entry in self.files.items()},
        }
        return json.dumps({**content, "digest": _digest(content)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read `loop.json` in the directory `path`, and look at no other file.

        Raises:
            ConfigError: it is of a later version of enginehouse.
            OSError, ValueError, KeyError, TypeError: it is damaged.
        """
        try:
            content = json.loads((path / LOOP_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{LOOP_FILE} is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{LOOP_FILE} holds no JSON object")
        written = content.pop("digest", None)
        if written is not None and written != _digest(content):
            raise ValueError(f"{LOOP_FILE} is not what was written")
        if content["format"] > FORMAT:
            raise ConfigError(f"{path} was written by a later enginehouse (format {content['format']}, here {FORMAT})")
        if content["format"] > 1 and written is None:
            raise ValueError(f"{LOOP_FILE} lacks its digest")
        return cls(
            path, int(content["step"]), float(content["elapsed_seconds"]), dict(content["loop"]),
            dict(content["config"]), str(content["kind"]), dict(content.get("data", {})),
            {name: (size, digest) for name, (size, digest) in content.get("files", {}).items()},
        )  # fmt: skip

    def check_files(self) -> None:
        """Check that every file is what was written, to the byte.

        Raises:
            OSError, ValueError: one is not.
        """
        if not self.actor.is_dir():
            raise ValueError(f"{ACTOR}/ is missing")
        for name, (size, _) in self.files.items():
            file = self.path / name
            if not file.is_file():
                raise ValueError(f"{name} is missing")
            if (there := file.stat().st_size) != size:
                raise ValueError(f"{name} has {there} bytes, {size} were written")
        if (total := sum(size for size, _ in self.files.values())) > LARGE_BYTES:
            log.warning("reading all %.1f GiB of %s, to see that it is whole", total / 2**30, self.path)
        digests = file_digests(self.path / name for name in self.files)
        for name, (_, digest) in self.files.items():
            if digests[str(self.path / name)] != digest:
                raise ValueError(f"the content of {name} is not what was written")


def files_of(directory: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of each file that lies in `directory`, for `Checkpoint.files`; all are on disk then.

    Raises:
        OSError: one cannot be read, or not be written to disk.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = file_digests(files, to_disk=True)
    return {file.relative_to(directory).as_posix(): (file.stat().st_size, digests[str(file)]) for file in files}


def _digest(content: Mapping[str, Any]) -> str:
    """Of what JSON makes of `content`, where all keys are strings."""
    return text_digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True))


def kind_of(config: Config | SFTConfig) -> str:
    """The command that runs a config of this type."""
    return "sft" if isinstance(config, SFTConfig) else "train"


def newest_checkpoint(run_directory: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest whole checkpoint of a run, None if there is none; and what is wrong with each newer one.

    Raises:
        ConfigError: it is of a later version of enginehouse.
    """
    damaged: dict[Path, str] = {}
    record = read_record(run_directory)
    for _, path in checkpoint_paths(run_directory):
        try:
            checkpoint = Checkpoint.read(path)
            checkpoint.check_files()
        except FileNotFoundError as error:
            damaged[path] = f"{Path(error.filename).name} is missing"
        except KeyError as error:
            damaged[path] = f"{LOOP_FILE} has no {error}"
        except (OSError, ValueError, TypeError) as error:
            damaged[path] = str(error)
        else:
            return replace(checkpoint, passed_over=tuple(damaged), record=record), damaged
    return None, damaged


def check_resume(findings: Findings, config: Config | SFTConfig) -> Checkpoint | None:
    """Find what a config's run goes on from, and check that it can; None after a problem."""
    directory = Path(config.run.directory).absolute()
    checkpoint = None
    with findings.collecting():
        checkpoint = _found(findings, directory)
        if checkpoint.kind != kind_of(config):
            raise ConfigError(
                f"--resume: {directory} is a run of `enginehouse {checkpoint.kind}`, not of "
                f"`enginehouse {kind_of(config)}`"
            )
    if checkpoint is None or checkpoint.kind != kind_of(config):
        return None
    steps, record = config.train.steps, read_record(directory)
    finished = record.get("status") == "finished"
    taken = max(checkpoint.step, steps_taken(record) if finished else 0)
    if taken > steps or (taken == steps and finished):
        findings.refuse(
            f"--resume: the run in {directory} has taken {taken} steps, and train.steps is {steps}: raise it to go on"
        )
    if taken > checkpoint.step:
        findings.note(
            f"steps {checkpoint.step + 1} to {taken} are taken once more: the newest checkpoint is of step "
            f"{checkpoint.step}"
        )
    for key, was, now in changes(_filled(checkpoint.config, type(config)), config.model_dump(mode="json")):
        if _under(key, FIXED) and not _under(key, FREE):
            findings.refuse(
                f"--resume: {key} is {now!r}, and was {was!r} when {checkpoint.path} was written: the run could not go "
                f"on where it stood. Set it back, or start a new run in another directory"
            )
        elif not _under(key, UNSAID):
            findings.note(f"{key} is {now!r} from here on, and was {was!r} up to the checkpoint")
    with findings.collecting():
        _check_data(config, checkpoint)
    return checkpoint


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys at which two configs differ, with both values; None stands for one that is not there."""
    before, after = dict(_flat(was)), dict(_flat(now))
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def _found(findings: Findings, directory: Path) -> Checkpoint:
    if not (directory / RUN_MARKER).is_file():
        raise ConfigError(f"--resume: there is no run in {directory} (run.directory); start it without --resume")
    check_free(directory)
    checkpoint, damaged = newest_checkpoint(directory)
    if checkpoint is None and not damaged:
        raise ConfigError(
            f"--resume: the run in {directory} left no checkpoint to go on from. (It is written every "
            "train.checkpoint_every steps, and when a run is interrupted or fails.) Start it anew by "
            "run.overwrite=true, without --resume"
        )
    listed = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
    if checkpoint is None:
        raise ConfigError(
            f"--resume: no checkpoint of the run in {directory} is whole ({listed}). Bring one back from a copy, or "
            "start anew in another directory, without --resume"
        )
    if damaged:
        findings.note(f"passed over, and set aside when the run goes on: damaged checkpoints ({listed})")
    if not checkpoint.files:
        findings.note(
            f"{checkpoint.path} has no digests of its files, as its run ended in a hurry or was of an older "
            "enginehouse: whether they, and in the latter case the data, are what they were is not checked"
        )
    return checkpoint


def _check_data(config: Config | SFTConfig, checkpoint: Checkpoint) -> None:
    """Check that the training data are those that the run began with.

    Raises:
        ConfigError: they are not.
    """
    try:
        now = data_digests(config.data.train)
    except OSError:
        return  # found where data files are checked
    changed = [path for path, digest in now.items() if checkpoint.data.get(path, digest) != digest]
    if changed:
        raise ConfigError(
            f"--resume: data.train: {', '.join(changed)} has other content than when {checkpoint.path} was written: "
            "other rows would come next. Put the former file back, or start a new run in another directory"
        )


def _filled(was: Mapping[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    """A config of a checkpoint, with the defaults of keys that were not there yet when it was written."""
    filled = dict(was)
    for name, described in schema.model_fields.items():
        inner = section_type(described.annotation)
        held = was.get(name, {} if described.default is not None else None)
        if inner is not None and isinstance(held, Mapping):
            filled[name] = _filled(held, inner)
        elif name not in was and not described.is_required():
            filled[name] = to_jsonable_python(described.get_default(call_default_factory=True))
    return filled


def _under(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from _flat(value, key)
        else:
            yield key, value
