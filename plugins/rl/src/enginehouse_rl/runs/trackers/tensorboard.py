"""Writes metrics as event files to `<run>/tensorboard`, for `tensorboard --logdir`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from enginehouse_rl.config.document import dump
from enginehouse_rl.runs.trackers.earlier import read_earlier_rows

if TYPE_CHECKING:
    from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts


class TensorBoard:
    """Writes each metric as a scalar of its name, and the config as a text.

    After `--resume` all earlier steps are written again, from `metrics.jsonl`, because a killed process may have left
    some unwritten. TensorBoard hides duplicates and repeated steps.

    Args:
        flush_seconds: Maximum number of seconds before new rows are written.
    """

    def __init__(self, flush_seconds: float = 10.0):
        self._flush_seconds = flush_seconds

    def start(self, run: RunFacts) -> None:
        from tensorboardX import SummaryWriter

        # Files are named by the second: the file of a resumed run must not have an earlier file's name.
        purge_step, suffix = (0, f".after-{run.resumed_after}") if run.resumed_after else (None, "")
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge_step, filename_suffix=suffix)
        self._flushed = time.monotonic()
        # In Markdown, four spaces begin code.
        config = "".join(f"    {line}\n" for line in dump(dict(run.config)).splitlines())
        self._writer.add_text("config", config, run.resumed_after)
        for step, metrics, when in read_earlier_rows(run):
            self._add(step, metrics, when)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        self._add(step, metrics, time.time())
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self._writer.flush()
            self._flushed = time.monotonic()

    def finish(self, outcome: Outcome) -> None:
        self._writer.close()

    def _add(self, step: int, metrics: Mapping[str, float], when: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, when)
