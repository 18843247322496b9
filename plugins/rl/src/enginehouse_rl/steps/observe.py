"""Measures and writes the samples of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginehouse.engines.train import metric_values
from enginehouse_rl.episodes.samples import sample_metrics, sample_rows
from enginehouse_rl.episodes.traces import draw_traces, measure_traces
from enginehouse_rl.steps.mismatch import mismatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from enginehouse.controller import DistributedBatch
    from enginehouse_rl.loop.trainer import Trainer
    from enginehouse_rl.steps.stage import BatchStage


def observe(
    samples: DistributedBatch, batch: DistributedBatch, stages: Sequence[BatchStage], version: int
) -> dict[str, float]:
    """Return the metrics of a step's samples.

    Args:
        batch: The samples with the columns that the stages added.
    """
    metrics = {**sample_metrics(samples, version), **measure_traces(samples["trace"])}
    for stage in stages:
        metrics |= stage.figures
    if "old_logprobs" in batch:
        metrics |= metric_values(mismatch(batch, version))
    return metrics


def write_samples(
    run: Trainer, step: int, samples: DistributedBatch, batch: DistributedBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the samples with their advantages if `train.samples_every` selects the step. In any case, draw the longest
    episodes on the timeline."""
    train = run.plan.config.train
    if train.samples_every and (step == 1 or step % train.samples_every == 0):
        shown = samples.with_columns(advantages=batch["advantages"]) if "advantages" in batch else samples
        run.run_directory.write_samples(step, sample_rows(shown, tokenizer, train.samples_tokens))
    draw_traces(run.run_directory.timeline, samples["trace"])
