"""What a run is resumed from: its newest whole checkpoint, and whether a config may go on with it.

A checkpoint is a directory `checkpoints/step-000100/` of the run directory. It holds `actor/`, which the training
engine wrote and reads, and `loop.json`: where the loop stood, and with which config. `enginehouse.runs.checkpoints`
writes it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.config.paths import CHECKPOINTS, RUN_MARKER
from enginehouse.config.schema import SFTConfig
from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse.config.findings import Findings
    from enginehouse.config.schema import Config

log = logging.getLogger(__name__)

LOOP_FILE = "loop.json"
ACTOR = "actor"
FORMAT = 1
"""Raised when `loop.json` changes so that older code would misread it."""

FIXED = ("model.path", "model.dtype", "data", "train.seed", "train.prompts_per_step", "train.rows_per_step",
         "rollout.samples_per_prompt")  # fmt: skip
"""What decides which rows come next and what the state in a checkpoint is of: none of it may change on the way."""
FREE = ("data.validation", "model.trust_remote_code")
"""Parts of those that may."""
UNSAID = ("run", "cluster", "plugins")
"""Sections whose changes are not worth a note."""

_STEP = re.compile(r"step-(\d+)")


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
    """

    path: Path
    step: int
    elapsed_seconds: float
    loop: Mapping[str, Any]
    config: Mapping[str, Any]
    kind: str

    @property
    def actor(self) -> Path:
        """What the actor's engine wrote."""
        return self.path / ACTOR

    def encoded(self) -> str:
        """The content of `loop.json`."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "loop": self.loop,
            "kind": self.kind,
            "config": self.config,
        }
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read the checkpoint in the directory `path`.

        Raises:
            ConfigError: it is of a later version of enginehouse.
            OSError, ValueError, KeyError, TypeError: it is damaged.
        """
        content = json.loads((path / LOOP_FILE).read_text(encoding="utf-8"))
        if content["format"] > FORMAT:
            raise ConfigError(f"{path} was written by a later enginehouse (format {content['format']}, here {FORMAT})")
        return cls(
            path, int(content["step"]), float(content["elapsed_seconds"]), dict(content["loop"]),
            dict(content["config"]), str(content["kind"]),
        )  # fmt: skip


def kind_of(config: Config | SFTConfig) -> str:
    """The command that runs a config of this type."""
    return "sft" if isinstance(config, SFTConfig) else "train"


def checkpoint_paths(run_directory: Path) -> list[tuple[int, Path]]:
    """Directories that are there as checkpoints of a run, `(step, path)`, the newest first."""
    directory = run_directory / CHECKPOINTS
    found = directory.iterdir() if directory.is_dir() else ()
    named = [(match, entry) for entry in found if (match := _STEP.fullmatch(entry.name))]
    return sorted(((int(match[1]), entry) for match, entry in named), reverse=True)


def newest_checkpoint(run_directory: Path) -> Checkpoint | None:
    """The newest checkpoint of a run that can be read; None if there is none.

    Raises:
        ConfigError: it is of a later version of enginehouse.
    """
    for _, path in checkpoint_paths(run_directory):
        try:
            return Checkpoint.read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("checkpoint %s is damaged (%s): an older one is looked for", path, error)
    return None


def check_resume(findings: Findings, config: Config | SFTConfig) -> Checkpoint | None:
    """Find what a config's run goes on from, and check that it can; None after a problem."""
    directory = Path(config.run.directory).absolute()
    checkpoint = None
    with findings.collecting():
        checkpoint = _found(directory)
        if checkpoint.kind != kind_of(config):
            raise ConfigError(
                f"--resume: {directory} is a run of `enginehouse {checkpoint.kind}`, not of "
                f"`enginehouse {kind_of(config)}`"
            )
    if checkpoint is None or checkpoint.kind != kind_of(config):
        return None
    steps, record = config.train.steps, _record(directory)
    finished = record.get("status") == "finished"
    taken = max(checkpoint.step, record.get("steps", 0) if finished else 0)
    if taken > steps or (taken == steps and finished):
        findings.refuse(
            f"--resume: the run in {directory} has taken {taken} steps, and train.steps is {steps}: raise it to go on"
        )
    if taken > checkpoint.step:
        findings.note(
            f"steps {checkpoint.step + 1} to {taken} are taken once more: the newest checkpoint is of step "
            f"{checkpoint.step}"
        )
    for key, was, now in changes(checkpoint.config, config.model_dump(mode="json")):
        if _under(key, FIXED) and not _under(key, FREE):
            findings.refuse(
                f"--resume: {key} is {now!r}, and was {was!r} when {checkpoint.path} was written: the run could not go "
                f"on where it stood. Set it back, or start a new run in another directory"
            )
        elif not _under(key, UNSAID):
            findings.note(f"{key} is {now!r} from here on, and was {was!r} up to the checkpoint")
    return checkpoint


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys at which two configs differ, with both values; None stands for one that is not there."""
    before, after = dict(_flat(was)), dict(_flat(now))
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def _found(directory: Path) -> Checkpoint:
    if not (directory / RUN_MARKER).is_file():
        raise ConfigError(f"--resume: there is no run in {directory} (run.directory); start it without --resume")
    record = _record(directory)
    if pid := _alive(record):
        raise ConfigError(f"--resume: the run in {directory} is still under way (process {pid}); end it first")
    checkpoint = newest_checkpoint(directory)
    if checkpoint is None:
        raise ConfigError(
            f"--resume: the run in {directory} left no checkpoint to go on from. (It is written every "
            "train.checkpoint_every steps, and when a run is interrupted by Ctrl-C.) Start it anew by "
            "run.overwrite=true, without --resume"
        )
    return checkpoint


def _record(directory: Path) -> Mapping[str, Any]:
    """The run's record, empty where it cannot be read."""
    try:
        content = json.loads((directory / RUN_MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _alive(record: Mapping[str, Any]) -> int | None:
    """Process id of the run, if it is on this machine and still there."""
    import os
    import socket
    from datetime import datetime

    import psutil

    pid = record.get("pid")
    if record.get("status") != "running" or record.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    try:
        began = datetime.fromisoformat(str(record.get("started"))).timestamp()
        process = psutil.Process(pid)
        same = process.create_time() <= began + 1 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return None
    return pid if same and pid != os.getpid() else None


def _under(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from _flat(value, key)
        else:
            yield key, value
