"""Whole runs in the process of a test, by a config as plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from enginehouse_rl.config.load import load_config
from enginehouse_rl.loop.trainer import Trainer
from enginehouse_rl.metrics import find_metric
from enginehouse_rl.plan.plan import plan
from enginehouse_rl.runs import Progress, RunDirectory
from enginehouse_rl.runs.jsonlines import read_whole_lines


def run_inline(config: Mapping[str, Any], here: Path, trainer: type[Trainer] = Trainer) -> Any:
    """Train as a config says, without a process beside this one; returns the trainer at its end.

    Every metric that it wrote has its line in `enginehouse_rl.metrics`.

    Args:
        config: what it says, but for the launcher and the run directory, which is `here`/run.
        here: a directory.
        trainer: what runs it.
    """
    path = here / "run.yaml"
    cluster, run = {"launcher": "inline", "device": "cpu"}, {"directory": str(here / "run")}
    path.write_text(yaml.safe_dump({**config, "cluster": cluster, "run": run}))
    planned = plan(load_config(path), config_path=path)
    made = trainer(planned, RunDirectory.create(planned.run_directory, ""), Progress("inline", mode="quiet"))
    made.run()
    lines = read_whole_lines(made.run_directory.path / "metrics.jsonl")
    assert not [name for line in lines for name in line if find_metric(name) is None], "enginehouse_rl.metrics"
    return made
