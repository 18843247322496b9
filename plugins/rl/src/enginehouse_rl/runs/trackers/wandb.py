"""Sends metrics to Weights & Biases, online or offline by the settings of wandb, such as `WANDB_MODE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse.errors import EnginehouseError
from enginehouse_rl.runs.trackers.run_id import keep_run_id, read_run_id

if TYPE_CHECKING:
    from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts


VALIDATION_STEP = "validation/step"


class WandB:
    """Logs each metric under its name; files are in `<run>/wandb`.

    Validations have a separate axis, `validation/step`. The reason is that a validation may run beside later steps and
    end after them, but Weights & Biases accepts no rows of past steps. After `--resume` the same run of Weights &
    Biases continues; repeated steps keep their first metrics.

    Args:
        project: The project that lists the run.
        entity: The user or team that owns the project. Unset: the user's default.
        name: The name of the run. Unset: the name of the run directory.
        group: The group with which the run is shown.
        tags: The run's tags.
    """

    def __init__(
        self,
        project: str = "enginehouse",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ):
        self._settings: dict[str, Any] = {"project": project, "entity": entity, "group": group, "tags": list(tags)}
        self._name = name

    def start(self, run: RunFacts) -> None:
        import wandb

        # wandb would ask for a key on the terminal, which shows the run's progress.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise EnginehouseError(
                "Weights & Biases has no API key here: set WANDB_API_KEY, or run `wandb login` once; "
                "WANDB_MODE=offline writes only to the run directory"
            )
        folder = run.directory / "wandb"
        run_id = read_run_id(folder)
        self._run = wandb.init(
            **self._settings,
            name=self._name or run.name,
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(console="off", allow_val_change=True),
        )
        keep_run_id(folder, self._run.id)
        self._newest, self._has_axis = 0, False

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        self._newest = max(self._newest, step)
        axis = {VALIDATION_STEP: step} if kind == "validation" else {}
        if axis and not self._has_axis:
            self._run.define_metric("validation/*", step_metric=VALIDATION_STEP)
            self._has_axis = True
        self._run.log({**metrics, **axis}, step=self._newest)

    def finish(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
