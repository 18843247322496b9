"""The plugin of contract 1.0, from its wheel: a run with its engines, transport, algorithm, reward and observers."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from enginehouse.plugin import CONTRACT

from .conftest import REPOSITORY, SMALL, Start

WHEEL = REPOSITORY / "tests" / "contract" / "wheels" / "plugin_1_0-1.0-py3-none-any.whl"
NEXT = """
import enginehouse.plugin
from enginehouse.plugin import hookspecs, manager
hookspecs.CONTRACT = enginehouse.plugin.CONTRACT = (hookspecs.CONTRACT[0], hookspecs.CONTRACT[1] + 1)
manager.OFFERED = ".".join(map(str, hookspecs.CONTRACT))
"""
"""A `sitecustomize.py`: every process of a run offers one minor more than today."""
ELDER = (
    "actor.engine.backend=elder",
    "rollout.engine.backend=elder",
    "weights.transport=elder",
    "algorithm.advantage.name=elder",
    "algorithm.loss={name: elder, arguments: {}}",
    "reward.function=elder",
    "rollout.keep={name: elder}",
    "train.steps=2",
    "train.checkpoint_every=2",
    "cluster.launcher=inline",
)


@pytest.mark.slow
@pytest.mark.essential
def test_a_plugin_built_for_1_0_runs_on_the_next_minor(start: Start, house: Path):
    site = house / "site-plugin-1-0"
    zipfile.ZipFile(WHEEL).extractall(site)
    (site / "sitecustomize.py").write_text(NEXT)
    environment = {"PYTHONPATH": str(site)}
    asked = [sys.executable, "-c", "from enginehouse.plugin import CONTRACT; print(*CONTRACT)"]
    offered = subprocess.run(
        asked, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout
    assert offered.split() == [str(CONTRACT[0]), str(CONTRACT[1] + 1)]
    run = start("train", *SMALL, *ELDER, env=environment)
    run.finished()
    assert [line["elder/steps"] for line in run.metrics] == [1.0, 2.0]
    assert all(line["mismatch/absolute_max"] < 1e-4 for line in run.metrics), run.metrics
    noted = (run.directory / "elder.txt").read_text().splitlines()
    assert "started" in noted
    assert noted[-1] == "finished"
    assert [line for line in noted if line.startswith("version")][:2] == ["version 1", "version 2"], noted
