"""Sends metrics to the MLflow server in `MLFLOW_TRACKING_URI`, or else to a database in the run directory."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from enginehouse_rl.runs.trackers.earlier import read_earlier_rows
from enginehouse_rl.runs.trackers.run_id import keep_run_id, read_run_id

if TYPE_CHECKING:
    from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts

log = logging.getLogger(__name__)

LONGEST_NAME, LONGEST_VALUE = 250, 500
"""Maximum number of characters that MLflow accepts in a name and in a parameter's value."""
AT_ONCE = 100
"""Number of parameters or metrics in a call to MLflow, which accepts at most 100 parameters and 1000 metrics."""


class MLflow:
    """Logs each metric under its name, and each key of the config as a parameter.

    Without `MLFLOW_TRACKING_URI` it writes `<run>/mlflow/mlflow.db`: `mlflow ui --backend-store-uri sqlite:///...`.
    After `--resume` the same MLflow run continues, and steps that the run repeats occur twice. If the server does not
    know the run, because it is another server, a new run begins there with the steps so far.

    Args:
        experiment: The experiment that lists the run.
        name: The name of the run. Unset: the name of the run directory.
    """

    def __init__(self, experiment: str = "enginehouse", name: str | None = None):
        self._experiment, self._name = experiment, name

    def start(self, run: RunFacts) -> None:
        folder, artifacts = run.directory / "mlflow", None
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            folder.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a local run is private

        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        if self._resume_run(read_run_id(folder)):
            return
        new_run = self._client.create_run(self._find_experiment(artifacts), run_name=self._name or run.name)
        self._run_id = new_run.info.run_id
        keep_run_id(folder, self._run_id)
        parameters = list(_iterate_parameters(run.config))
        for first in range(0, len(parameters), AT_ONCE):
            self._client.log_batch(self._run_id, params=parameters[first : first + AT_ONCE])
        for step, metrics, when in read_earlier_rows(run):
            self._add(step, metrics, when)

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        self._add(step, metrics, time.time())

    def _add(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        from mlflow.entities import Metric

        rows = [Metric(_clean_name(name), value, int(when * 1000), step) for name, value in metrics.items()]
        for first in range(0, len(rows), AT_ONCE):
            self._client.log_batch(self._run_id, metrics=rows[first : first + AT_ONCE])

    def finish(self, outcome: Outcome) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self._run_id, status)

    def _resume_run(self, run_id: str | None) -> bool:
        """Continue the run with this id; return False if the server has no such run."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return False
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            place = "at MLFLOW_TRACKING_URI" if os.environ.get("MLFLOW_TRACKING_URI") else "in the run directory"
            log.warning("MLflow has no run %s %s: a new run begins there, with the steps so far", run_id, place)
            return False
        self._run_id = run_id
        return True

    def _find_experiment(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return self._client.create_experiment(self._experiment, artifact_location=artifacts)
            except MlflowException:  # another run has made it meanwhile
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        return experiment.experiment_id


def _iterate_parameters(config: Mapping[str, Any], above: str = "") -> Iterator[Any]:
    from mlflow.entities import Param

    for key, value in config.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _iterate_parameters(value, name)
        else:
            yield Param(_clean_name(name), str(value)[:LONGEST_VALUE])


def _clean_name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits, `_ - . : /` and spaces, without `.` or `..` as a part."""
    parts = [re.sub(r"[^\w\-. :]", "_", part) for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" for part in parts)[:LONGEST_NAME].rstrip("/")
