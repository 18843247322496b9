"""Made-up samples of a step for trials of losses and advantages, with every column that a run can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from enginehouse.data import Batch, Ragged
from enginehouse_testing.given import ColumnOf

GROUPS, GROUP_SIZE = 4, 3
OUTPUTS = ("logprobs", "entropy", "values")
"""Outputs of an engine. Made-up samples have them as `now(NAME)`, because some other columns have the same names."""


def now(output: str) -> str:
    """Return the name of the column that holds an engine's output in made-up samples."""
    return f"now:{output}"


def samples(columns: Mapping[str, ColumnOf], groups: int = GROUPS, size: int = GROUP_SIZE, seed: int = 0) -> Batch:
    """Return `size` samples for each of `groups` prompts, with every column of a run and further random `columns`.

    Rows have prompts and responses of different lengths. In some rows, tokens that do not count stand between tokens
    that do, as a tool's output does. Rewards differ. The rows of a group are not adjacent. Ratios to the old policy lie
    within and beyond the usual clip ranges.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = groups * size
    prompts = torch.randint(1, 4, (rows,), generator=generator)
    lengths = prompts + torch.randint(3, 8, (rows,), generator=generator)
    tokens, starts = int(lengths.sum()), lengths.cumsum(0) - lengths
    position = torch.arange(tokens) - starts.repeat_interleave(lengths)
    counted = position >= prompts.repeat_interleave(lengths)
    counted &= ~(
        (position == prompts.repeat_interleave(lengths) + 1) & (torch.arange(rows) % 3 == 1).repeat_interleave(lengths)
    )

    def by_token(values: torch.Tensor) -> Ragged:
        return Ragged.from_lengths(values, lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    logprobs = -torch.rand(tokens, generator=generator) - 0.05
    mask = by_token(counted)
    made = {
        "input_ids": by_token(torch.randint(0, 50, (tokens,), generator=generator)),
        "loss_mask": mask,
        now("logprobs"): by_token(logprobs),
        now("entropy"): by_token(torch.rand(tokens, generator=generator)),
        now("values"): by_token(normal(tokens)),
        "old_logprobs": by_token((logprobs + 0.3 * normal(tokens)).clamp(max=-0.01)),
        "rollout_logprobs": by_token((logprobs + 0.3 * normal(tokens)).clamp(max=-0.01)),
        "reference_logprobs": by_token((logprobs + 0.3 * normal(tokens)).clamp(max=-0.01)),
        "advantages": by_token(normal(tokens)),
        "weights": by_token(normal(tokens)),
        "values": by_token(normal(tokens)),
        "returns": by_token(normal(tokens)),
        "token_rewards": by_token(0.1 * normal(tokens)),
        "first_version": torch.ones(rows, dtype=torch.int64),
        "weight_version": torch.ones(rows, dtype=torch.int64),
        "reward": torch.rand(rows, generator=generator).round(decimals=3),
        "rewards": torch.rand(rows, 2, generator=generator),
        "baseline": torch.rand(rows, generator=generator),
        "group": torch.arange(rows) % groups + 7,
        "response_tokens": mask.values.long().new_zeros(rows).index_add(0, mask.row, counted.long()),
    }
    shapes = {"row": rows, "token": tokens}
    for name, place in columns.items():
        values = torch.rand(shapes[place], generator=generator)
        made[name] = by_token(values) if place == "token" else values
    made.setdefault("kl_penalty", torch.rand(rows, generator=generator))
    return Batch(made)


def with_silent(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return the samples, in which no token of some rows counts, as in the rows of a failed episode."""
    mask = batch.ragged("loss_mask")
    silent = torch.isin(mask.row, torch.tensor(rows))
    return batch.with_columns(loss_mask=mask.like(mask.values & ~silent))


def with_others_changed(batch: Batch) -> Batch:
    """Return the samples with other numbers at every token that does not count."""
    mask = batch.ragged("loss_mask")
    changed = {}
    for name in batch.columns:
        column = batch[name]
        if isinstance(column, Ragged) and column.dtype == torch.float32:
            changed[name] = column.like(torch.where(mask.values, column.values, column.values * 3 - 2))
    return batch.with_columns(**changed)


def with_longer_prompts(batch: Batch, by: int = 3) -> Batch:
    """Return the samples with `by` additional tokens at the start of each row, none of which counts."""
    lengths = batch.lengths("loss_mask")
    ends = lengths.cumsum(0)
    starts = ends - lengths
    index = torch.cat(
        [
            torch.cat([start.repeat(by), torch.arange(int(start), int(end))])
            for start, end in zip(starts, ends, strict=True)
        ]
    )
    longer = {
        name: Ragged.from_lengths(batch[name].values[index], lengths + by)
        for name in batch.columns
        if isinstance(batch[name], Ragged)
    }
    return batch.with_columns(**longer)
