"""Checks the run directory, the checkpoint to resume from, and the trackers that also get the metrics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from enginehouse.engines import tracker as protocol
from enginehouse.engines.declared import find_protocol_faults
from enginehouse.errors import ConfigError
from enginehouse.plugin import Tracker
from enginehouse.plugin.secrets import check_secrets
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config import schema
from enginehouse_rl.config.load import is_overridden
from enginehouse_rl.config.paths import EarlierRun, check_run_directory
from enginehouse_rl.plan.arguments import check_call, take_values
from enginehouse_rl.plan.evaluated import holds_training
from enginehouse_rl.plan.functions import find_function
from enginehouse_rl.plan.parts.data import DataPart
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.gguf import GgufPart
from enginehouse_rl.plan.parts.hub import map_model_paths
from enginehouse_rl.plan.resume import check_resume
from enginehouse_rl.plan.trackers import TrackerPlan


class DirectoryPart(Part[schema.AnyConfig]):
    """The run directory, and the earlier run in it.

    Attributes:
        resumed: the checkpoint that the run resumes from; None for a new run.
        spare_unfinished: true if `run.overwrite` must not delete a run that can be resumed.
        obstacle: the reason that the run cannot start although its config is valid; empty if it can.
    """

    path: Path
    obstacle: str = ""
    resumed: Checkpoint | None = None
    spare_unfinished: bool
    _deletes: str | None = None

    def settle(self) -> None:
        run, section = self.run, self.config.run
        self.path = Path(section.directory).absolute()
        self.spare_unfinished = not is_overridden("run.overwrite", run.overrides)
        if run.resume:
            trained = [name for name, role in run.roles.items() if role.trained]
            self.resumed = check_resume(self.findings, run.config, trained, run.dtype)
        models = map_model_paths(run.config) | {
            f"{entry['key']} (GGUF)": entry["file"] for entry in run[GgufPart].entries
        }
        with self.findings.collecting():
            try:
                self._deletes = check_run_directory(
                    section.directory,
                    overwrite=section.overwrite,
                    spare_unfinished=self.spare_unfinished,
                    needed={**models, **run[DataPart].files()},
                    resuming=run.resume,
                )
            except EarlierRun as error:
                if run.starts:
                    raise
                self.obstacle = str(error)

    def facts(self) -> Iterable[Fact]:
        if self.resumed:
            yield "resumes", f"after step {self.resumed.step}, from {self.resumed.path}"
        if self._deletes:
            yield "deletes", self._deletes
        yield from self.findings.seen
        yield "device", f"{self.run.device} ({self.run.device_reason})"
        yield "results", str(self.path)


class EvalDirectoryPart(DirectoryPart):
    """The directory of an evaluation outside a run."""

    def settle(self) -> None:
        path = Path(self.config.run.directory).absolute()
        if holds_training(path):
            self.refuse(
                f"run.directory: {path} holds models or checkpoints of a training run, and an evaluation never writes "
                "to such a directory: name another directory, or leave run.directory unset"
            )
        else:
            super().settle()


class CheckpointsPart(Part[schema.AnyConfig]):
    """Adds a note if an interrupted run may have no checkpoint to resume from."""

    def settle(self) -> None:
        train = self.config.train
        if not (train.checkpoint_every or train.checkpoint_minutes):
            self.note(
                "train.checkpoint_every and checkpoint_minutes are 0: a checkpoint for --resume is saved if the run is "
                "interrupted or fails, but not if its process is killed"
            )


class TrackersPart(Part[schema.AnyConfig]):
    """The trackers that get the metrics, besides the run directory."""

    plans: tuple[TrackerPlan, ...]

    def settle(self) -> None:
        sections, plans = self.config.run.trackers, []
        for number, section in enumerate(sections):
            key = f"run.trackers[{number}]"
            check_secrets(self.findings, f"{key}.arguments", section.arguments)
            if section.name in [earlier.name for earlier in sections[:number]]:
                self.refuse(
                    f"{key}.name: {section.name!r} is listed twice, but each tracker needs its own name for its folder "
                    "in the run directory: leave one out"
                )
            with self.findings.collecting():
                plans.append(self._plan_tracker(section, key))
        self.plans = tuple(plans)

    def facts(self) -> Iterable[Fact]:
        if self.plans:
            yield "trackers", ", ".join(plan.name for plan in self.plans)

    def _plan_tracker(self, section: schema.TrackerConfig, key: str) -> TrackerPlan:
        """Find a tracker, and check its methods and its arguments.

        Raises:
            UserError: there is no such tracker, it lacks a method, or it does not take the arguments.
        """
        name, plugins, within = section.name, self.run.plugins, f"{key}.arguments"
        reference, tracker = find_function(plugins, Tracker, name, f"{key}.name", self.run.python_path, always=True)
        for problem in find_protocol_faults(tracker, [protocol.Tracker]):
            raise ConfigError(f"{key}.name: {reference!r} {problem} (docs/plugins/tracker.md)")
        assert tracker is not None
        check_call(tracker, within, section.arguments, within, called=f"tracker {name!r}", values=section.arguments)
        arguments = take_values(self.findings, tracker, name, within, section.arguments)
        records = self.run.records(Tracker, name) if plugins.is_name(name) else []
        packages = tuple(text for record in records for text in record.requires)
        return TrackerPlan(name, reference, arguments, packages)
