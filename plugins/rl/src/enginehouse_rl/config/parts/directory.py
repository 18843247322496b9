"""Where a run writes, what it goes on from, and what else gets its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config.evaluated import holds_training
from enginehouse_rl.config.parts.data import Data
from enginehouse_rl.config.parts.draft import Fact, Part
from enginehouse_rl.config.paths import EarlierRun, check_run_directory
from enginehouse_rl.config.resume import check_resume, kind_of
from enginehouse_rl.config.roles import beside
from enginehouse_rl.config.schema import AnyConfig
from enginehouse_rl.config.trackers import TrackerPlan, check_trackers

_OVERWRITE = ("run.overwrite", "run")
"""Overrides that set `run.overwrite`."""


class Directory(Part[AnyConfig]):
    """The run directory, and what an earlier run left there.

    Attributes:
        path: it, absolute.
        resumed: the checkpoint the run goes on from; None for a run that starts.
        spare_unfinished: `run.overwrite` is not to delete a run that can be gone on with.
    """

    path: Path
    resumed: Checkpoint | None = None
    spare_unfinished: bool
    _deletes: str | None = None

    def settle(self) -> None:
        run, section = self.run, self.config.run
        self.path = Path(section.directory).absolute()
        self.spare_unfinished = not any(given.partition("=")[0].strip() in _OVERWRITE for given in run.overrides)
        if run.resume:
            trained = [name for name, role in run.roles.items() if role.trained]
            self.resumed = check_resume(self.findings, run.config, trained, run.dtype)
        models = {f"{name}.path": section.path for name, section in beside(run.config).items() if section.path}
        with self.findings.collecting():
            try:
                self._deletes = check_run_directory(
                    section.directory,
                    overwrite=section.overwrite,
                    spare_unfinished=self.spare_unfinished,
                    needed={"model.path": run.config.model.path, **models, **run[Data].files()},
                    resuming=run.resume,
                )
            except EarlierRun as error:
                if run.starts:
                    raise
                self.note(f"`enginehouse {kind_of(run.config)}` refuses that: {error}")

    def facts(self) -> Iterable[Fact]:
        if self.resumed:
            yield "resumes", f"after step {self.resumed.step}, from {self.resumed.path}"
        if self._deletes:
            yield "deletes", self._deletes
        yield from self.findings.seen
        yield "device", f"{self.run.device} ({self.run.device_reason})"
        yield "results", str(self.path)


class LoneDirectory(Directory):
    """The directory of an evaluation without a run."""

    def settle(self) -> None:
        path = Path(self.config.run.directory).absolute()
        if holds_training(path):
            self.refuse(
                f"run.directory: {path} holds a run that trained, with its models or checkpoints, and an evaluation "
                "never writes there: name another, or leave run.directory unset"
            )
        else:
            super().settle()


class Checkpoints(Part[AnyConfig]):
    """What a run that is interrupted can go on from."""

    def settle(self) -> None:
        train = self.config.train
        if not (train.checkpoint_every or train.checkpoint_minutes):
            self.note(
                "train.checkpoint_every and checkpoint_minutes are 0: state to --resume from is saved when the run is "
                "interrupted or fails, but not if it is killed outright"
            )


class Trackers(Part[AnyConfig]):
    """What metrics are sent to, besides the run directory.

    Attributes:
        plans: each of them.
    """

    plans: tuple[TrackerPlan, ...]

    def settle(self) -> None:
        run = self.run
        self.plans = check_trackers(self.findings, run.plugins, run.config.run.trackers, run.python_path)

    def facts(self) -> Iterable[Fact]:
        if self.plans:
            yield "trackers", ", ".join(plan.name for plan in self.plans)
