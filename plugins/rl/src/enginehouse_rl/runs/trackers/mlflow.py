"""Metrics to MLflow: to the server that `MLFLOW_TRACKING_URI` names, else to a database in the run directory."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from enginehouse_rl.runs.trackers.earlier import earlier_rows
from enginehouse_rl.runs.trackers.run_id import keep_run_id, read_run_id

if TYPE_CHECKING:
    from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts

log = logging.getLogger(__name__)

LONGEST_NAME, LONGEST_VALUE = 250, 500
"""Characters of a metric's or a parameter's name, and of a parameter's value, that MLflow takes."""
AT_ONCE = 100
"""Parameters that MLflow takes in a call; metrics are 1000."""


class MLflow:
    """Logs each metric under its name, and each key of the config as a parameter.

    Without `MLFLOW_TRACKING_URI` it writes `<run>/mlflow/mlflow.db`: `mlflow ui --backend-store-uri sqlite:///...`.
    After `--resume` the same run goes on; steps that are taken once more are there twice. Where the server has no such
    run, another one than before, a new run begins there with the steps so far.

    Args:
        experiment: where the run is listed.
        name: of the run; unset: that of the run directory.
    """

    def __init__(self, experiment: str = "enginehouse", name: str | None = None):
        self._experiment, self._name = experiment, name

    def start(self, run: RunFacts) -> None:
        folder, artifacts = run.directory / "mlflow", None
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            folder.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody is to be told of a local run

        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        if self._goes_on(read_run_id(folder)):
            return
        made = self._client.create_run(self._experiment_id(artifacts), run_name=self._name or run.name)
        self._run_id = made.info.run_id
        keep_run_id(folder, self._run_id)
        parameters = list(_parameters(run.config))
        for first in range(0, len(parameters), AT_ONCE):
            self._client.log_batch(self._run_id, params=parameters[first : first + AT_ONCE])
        for step, metrics, when in earlier_rows(run):
            self._add(step, metrics, when)

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        self._add(step, metrics, time.time())

    def _add(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        from mlflow.entities import Metric

        rows = [Metric(_name(name), value, int(when * 1000), step) for name, value in metrics.items()]
        for first in range(0, len(rows), AT_ONCE):
            self._client.log_batch(self._run_id, metrics=rows[first : first + AT_ONCE])

    def finish(self, outcome: Outcome) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self._run_id, status)

    def _goes_on(self, run_id: str | None) -> bool:
        """Whether the run of this id is taken up; not where there is none."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return False
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            where = "at MLFLOW_TRACKING_URI" if os.environ.get("MLFLOW_TRACKING_URI") else "in the run directory"
            log.warning("MLflow has no run %s %s: a new one begins there, with the steps so far", run_id, where)
            return False
        self._run_id = run_id
        return True

    def _experiment_id(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return self._client.create_experiment(self._experiment, artifact_location=artifacts)
            except MlflowException:  # another run has made it meanwhile
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return found.experiment_id


def _parameters(config: Mapping[str, Any], above: str = "") -> Iterator[Any]:
    """Every key of a config with its value, as parameters."""
    from mlflow.entities import Param

    for key, value in config.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _parameters(value, name)
        else:
            yield Param(_name(name), str(value)[:LONGEST_VALUE])


def _name(name: str) -> str:
    """A name that MLflow takes: of letters, digits, `_ - . : /` and spaces, and no path that could be shorter."""
    parts = [re.sub(r"[^\w\-. :]", "_", part) for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" for part in parts)[:LONGEST_NAME].rstrip("/")
