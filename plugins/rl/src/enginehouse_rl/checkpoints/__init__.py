"""Checkpoints of a run: their contents, their paths, and the newest complete one.

A checkpoint is a directory `checkpoints/step-000100/` in the run directory. It contains a folder for each trained role,
which the role's engine writes and reads. It also contains `loop.json`: the state of the loop, the config of the run,
and digests of the training data, the models and all files of the checkpoint. `store` creates the checkpoints that
`enginehouse_rl.loop.checkpoint_writer` requests. A checkpoint is complete if all its files are unchanged since they
were written. To check this, a resumed run reads every byte before it starts any process.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from enginehouse.errors import ConfigError
from enginehouse.jsontext import decode_json
from enginehouse_rl.data.digests import file_digests, text_digest

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""The directory of the checkpoints in a run directory."""
LOOP_FILE = "loop.json"
FORMAT = 2
"""Format version of `loop.json`. Raise it if older code would misread the file, but do not change how its digest is
computed: older code checks the digest before the version. Format 1 had no digests."""
LARGE_BYTES = 4 * 2**30
"""Size in bytes above which a message announces that a checkpoint is read, because reading may take a while."""

Files = Mapping[str, tuple[int, str]]
"""Size in bytes and digest of each file of a checkpoint, by its path in the checkpoint."""

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a loop after a step.

    Attributes:
        step: the last step whose update it contains.
        elapsed_seconds: elapsed seconds of the run when it was written.
        loop: the state of the training loop, as plain data.
        config: the run's config at that time, as plain data.
        kind: the command that runs such a config, `"train"` or another key of `enginehouse_rl.config.schema.SCHEMAS`.
        data: digests of the training files, by their paths in the config; empty in format 1.
        models: digests of the models from which roles started (`model_digest`), by their paths in the config; empty if
            an older enginehouse wrote it.
        files: size in bytes and digest of each file, by its path in the directory; empty in format 1.
        roles: the roles whose state it contains, each in a folder of its name.
        passed_over: damaged checkpoints of later steps. The run resumes from this checkpoint instead.
        record: content of `run.json` just before the search for this checkpoint. If `run.json` has changed since then,
            another process has resumed the run.
    """

    path: Path
    step: int
    elapsed_seconds: float
    loop: Mapping[str, Any]
    config: Mapping[str, Any]
    kind: str
    data: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    roles: Sequence[str] = ()
    passed_over: Sequence[Path] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def state_of(self, role: str) -> Path:
        return self.path / role

    def encoded(self) -> str:
        """Return the content of `loop.json`, including its own digest."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "loop": self.loop,
            "kind": self.kind,
            "config": self.config,
            "data": self.data,
            "models": self.models,
            "roles": list(self.roles),
            "files": {name: list(entry) for name, entry in self.files.items()},
        }
        return json.dumps({**content, "digest": _digest(content)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read `loop.json` in the directory `path`, and no other file.

        Raises:
            ConfigError: a later version of enginehouse wrote the file.
            OSError, ValueError, KeyError, TypeError: the file is missing or damaged.
        """
        try:
            content = decode_json((path / LOOP_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{LOOP_FILE} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{LOOP_FILE} must hold a JSON object")
        digest = content.pop("digest", None)
        if digest is not None and digest != _digest(content):
            raise ValueError(f"{LOOP_FILE} has changed since it was written")
        if content["format"] > FORMAT:
            raise ConfigError(
                f"{path} was written by a later enginehouse: it has format {content['format']}, but this enginehouse "
                f"reads formats up to {FORMAT}"
            )
        if content["format"] > 1 and digest is None:
            raise ValueError(f"{LOOP_FILE} lacks its digest")
        return cls(
            path, int(content["step"]), float(content["elapsed_seconds"]), dict(content["loop"]),
            dict(content["config"]), str(content["kind"]),
            dict(content.get("data", {})), dict(content.get("models", {})),
            {name: (size, digest) for name, (size, digest) in content.get("files", {}).items()},
            tuple(content["roles"] if "roles" in content else _list_folders(path)),
        )  # fmt: skip

    def check_files(self) -> None:
        """Check that no byte of any file has changed since it was written.

        Raises:
            OSError, ValueError: a file has changed or is missing.
        """
        if not self.roles:
            raise ValueError("it contains no folder of a role")
        for role in self.roles:
            if not self.state_of(role).is_dir():
                raise ValueError(f"{role}/ is missing")
        for name, (size, _) in self.files.items():
            file = self.path / name
            if not file.is_file():
                raise ValueError(f"{name} is missing")
            if (size_found := file.stat().st_size) != size:
                raise ValueError(f"{name} has {size_found} bytes, but {size} were written")
        if (total := sum(size for size, _ in self.files.values())) > LARGE_BYTES:
            log.warning("reading all %.1f GiB of %s to check that it is intact", total / 2**30, self.path)
        digests = file_digests(self.path / name for name in self.files)
        for name, (_, digest) in self.files.items():
            if digests[str(self.path / name)] != digest:
                raise ValueError(f"the content of {name} has changed since it was written")


def digest_files(directory: Path) -> dict[str, tuple[int, str]]:
    """Return the size and digest of each file in `directory`, for `Checkpoint.files`, and fsync all of them.

    Raises:
        OSError: a file cannot be read or fsynced.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = file_digests(files, to_disk=True)
    return {file.relative_to(directory).as_posix(): (file.stat().st_size, digests[str(file)]) for file in files}


def _list_folders(directory: Path) -> list[str]:
    """Return the roles of a checkpoint that an earlier enginehouse wrote without a list of roles."""
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def _digest(content: Mapping[str, Any]) -> str:
    """Return the digest of `content` after a round trip through JSON, which turns all keys into strings."""
    return text_digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True))


def name_checkpoint(step: int) -> str:
    return f"step-{step:06d}"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return the directories of a run's checkpoints as `(step, path)`, newest first."""
    checkpoints = directory / CHECKPOINTS
    entries = checkpoints.iterdir() if checkpoints.is_dir() else ()
    matches = [(match, entry) for entry in entries if (match := _STEP.fullmatch(entry.name))]
    return sorted(((int(match[1]), entry) for match, entry in matches), reverse=True)


def find_newest_checkpoint(run_directory: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest complete checkpoint of a run, or None, and the problem of each newer checkpoint.

    Raises:
        ConfigError: a later version of enginehouse wrote a checkpoint.
    """
    damaged: dict[Path, str] = {}
    for _, path in list_checkpoints(run_directory):
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
            return replace(checkpoint, passed_over=tuple(damaged)), damaged
    return None, damaged
