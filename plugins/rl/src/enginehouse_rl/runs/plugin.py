"""The built-in trackers."""

from __future__ import annotations

from enginehouse.plugin import Tracker, hookimpl


@hookimpl
def enginehouse_register_trackers(register):
    for name, class_name, summary, requires in (
        ("tensorboard", "TensorBoard", "Event files for TensorBoard, in the run directory", ()),
        ("wandb", "WandB", "Weights & Biases, online or offline as its own settings say", ("wandb>=0.31",)),
        (
            "mlflow",
            "MLflow",
            "MLflow, by MLFLOW_TRACKING_URI, else a database in the run directory",
            ("mlflow-skinny>=3.5", "sqlalchemy>=2", "alembic>=1.13"),
        ),
    ):
        register(
            Tracker(
                name=name,
                summary=summary,
                tracker=f"enginehouse_rl.runs.trackers.{name}:{class_name}",
                requires=requires,
            )
        )
